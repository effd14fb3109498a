"""Spans laid into lanes: of each lane, two spans are one after the other, or one within the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.tracing.lines import Span

_ROUNDING = 500
"""Nanoseconds by which what lines say of two spans, in numbers of 53 bits, may contradict how they were."""


def lay(spans: Iterable[Span]) -> list[list[Span]]:
    """Lanes, each in the order of starts, outer spans first; a span is in its parent's lane if it lies within that one.

    Spans that overlap by no more than lines are exact to are cut to lie within or behind each other.
    """
    lanes: list[list[Span]] = []
    stacks: list[list[Span]] = []  # of each lane, what is under way
    lane_of: dict[int, int] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end, span.own_id or 0)):
        parents = lane_of.get(id(span.parent), -1)
        for lane in sorted(range(len(lanes)), key=lambda lane: lane != parents):
            depth = _depth_of(span, stacks[lane])
            if depth is not None:
                _fit(span, stacks[lane], depth)
                break
        else:
            lane = len(lanes)
            lanes.append([])
            stacks.append([])
        lanes[lane].append(span)
        stacks[lane].append(span)
        lane_of[id(span)] = lane
    return lanes


def _depth_of(span: Span, stack: list[Span]) -> int | None:
    """How many spans of a lane it would lie within; None where it overlaps one."""
    depth = len(stack)
    while depth and stack[depth - 1] is not span.parent and stack[depth - 1].end <= span.start + _ROUNDING:
        depth -= 1
    return None if depth and span.end > stack[depth - 1].end + _ROUNDING else depth


def _fit(span: Span, stack: list[Span], depth: int) -> None:
    if depth < len(stack):
        span.start = max(span.start, stack[depth].end)
    if depth:
        span.start, span.end = min(span.start, stack[depth - 1].end), min(span.end, stack[depth - 1].end)
    span.end = max(span.start, span.end)
    del stack[depth:]


def busy(spans: Sequence[Span]) -> int:
    """Nanoseconds in which at least one of them was under way."""
    total, reached = 0, -1
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
