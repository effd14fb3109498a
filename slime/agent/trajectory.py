"""What a model has said in one session, as token ids: a tree of turns, and the samples that it becomes.

A turn goes on from an earlier one when its prompt begins with that one's prompt and output, token for token. One that
does not is a fork: it begins a path of its own. Every turn is trained once, in one sample, whatever paths go through
it.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slime.agent.messages import Chain, Key, chain_of
from slime.data import Sample, Status
from slime.data.rows.messages import Messages

_STATUS = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


class DriftKind(enum.Enum):
    """How a turn's prompt relates to the turn that it answers to."""

    CLEAN = "clean"
    """It begins with all of that one's tokens."""
    REALIGN = "realign"
    """It differs within the last tokens of that one's output, of which those behind the difference are not trained."""
    FORK = "fork"
    """It differs elsewhere, or there is none: a new path."""


@dataclass
class TurnRecord:
    """One generation.

    Attributes:
        prompt_ids: all tokens that the engine was given.
        output_ids: all that it made.
        finish_reason: SGLang's: ``stop``, ``length`` or ``abort``.
        output_log_probs: of the output, one a token; none of a turn that is not to be trained.
        ill_formed: its tool calls could not be read: it was answered as words.
        segments: weight version and number of output tokens of each part that other weights made.
        meta_info: the engine's counters, for `Sample.append_response_tokens`.
        routes: of prompt and output (`slime.data.routes`); None where they are not replayed.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str = "stop"
    output_log_probs: Sequence[float] = ()
    ill_formed: bool = False
    segments: Sequence[tuple[str, int]] = ()
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    routes: np.ndarray | None = None


@dataclass(eq=False)
class MessageNode:
    """A turn in its tree.

    Attributes:
        turn: without its prompt and the routes of that, of which the path has the tokens (`before`) and routes: copies
            with each turn would take memory that grows with the square of their number.
        added: prompt tokens (int32) behind the turn that it goes on from.
        output: tokens (int32) that the engine made.
        kept: of the output of ``parent``, the tokens that this path keeps: all, unless it is realigned.
        length: tokens of the whole path up to the end of the output.
        drift: how its prompt related to the turn that it answers to.
        metadata: what the caller noted with it.
    """

    turn: TurnRecord
    parent: MessageNode | None
    added: np.ndarray
    output: np.ndarray
    kept: int
    length: int
    drift: DriftKind
    reply: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    children: list[MessageNode] = field(default_factory=list)

    @property
    def path(self) -> list[MessageNode]:
        """The turns from the first one to this."""
        nodes: list[MessageNode] = []
        node: MessageNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def before(self) -> np.ndarray:
        """All tokens (int32) before the output."""
        path = self.path
        parts = [part for each, after in itertools.pairwise(path) for part in (each.added, each.output[: after.kept])]
        return np.concatenate([*parts, self.added])


class Trajectory:
    """The turns of one session."""

    def __init__(self) -> None:
        self.roots: list[MessageNode] = []
        self._by_key: dict[Key, MessageNode] = {}
        self.nodes: list[MessageNode] = []
        """In the order in which they were added."""

    def find(self, chain: Chain) -> tuple[MessageNode, int] | None:
        """The latest turn that a conversation goes on from, and how many of its messages are up to that."""
        for end, key in chain.answered:
            if (node := self._by_key.get(key)) is not None:
                return node, end
        return None

    def find_by_ids(self, prompt: Sequence[int] | np.ndarray) -> MessageNode | None:
        """The turn with the longest path that a prompt begins with, and says more than."""
        prompt = _array(prompt)
        found, longest, ways = None, 0, [(0, self.roots)]
        for offset, children in ways:
            for node in children:
                end = offset + len(node.added) + len(node.output)
                begins = end < len(prompt) and np.array_equal(prompt[offset : offset + len(node.added)], node.added)
                if begins and np.array_equal(prompt[end - len(node.output) : end], node.output):
                    ways.append((end, node.children))  # the list grows while it is walked
                    if end >= longest:
                        found, longest = node, end
        return found

    def add(
        self,
        turn: TurnRecord,
        parent: MessageNode | None,
        *,
        key: Key | None = None,
        kept: int | None = None,
        reply: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> MessageNode:
        """Add a turn whose prompt begins with the path of ``parent``, with all of its output or the first ``kept``
        tokens of that; ``key`` is that of the conversation with its reply. ValueError where the turn has log-probs or
        segments of more or fewer tokens than its output."""
        output = _array(turn.output_ids)
        for what, tokens in (
            ("output_log_probs", len(turn.output_log_probs)),
            ("segments", sum(length for _, length in turn.segments)),
        ):
            if tokens not in (0, len(output)):
                raise ValueError(f"a turn of {len(output)} output_ids has {what} of {tokens}")
        drift, start = DriftKind.FORK, 0
        if parent is not None:
            drift = DriftKind.CLEAN if kept is None else DriftKind.REALIGN
            start = parent.length - (0 if kept is None else len(parent.output) - kept)
        whole = 0 if parent is None else len(parent.output) if kept is None else kept
        sizes = whole, len(turn.prompt_ids) + len(output)
        routes = None if turn.routes is None else turn.routes[max(start - 1, 0) :].copy()
        added, turn = _array(turn.prompt_ids[start:]), replace(turn, prompt_ids=(), routes=routes)
        node = MessageNode(turn, parent, added, output, *sizes, drift, reply or {}, metadata or {})
        (self.roots if parent is None else parent.children).append(node)
        self.nodes.append(node)
        if key is not None:
            self._by_key[key] = node
        return node

    def samples(
        self,
        base: Sample,
        reward: float | dict[str, Any] | None = None,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_tokens: int = 0,
    ) -> list[Sample]:
        """One sample a path, in the order in which paths were begun: its response begins with the first turn that none
        before it has trained. All share the numbers of ``base`` and have the whole ``reward``; ``decode`` gives their
        text. Of more than ``max_tokens`` (0: no bound) the turns behind are left out, and the sample is truncated. A
        path of which nothing is trained is none, unless all are so."""
        done: set[int] = set()
        made = []
        for leaf in (node for node in self.nodes if not node.children):
            path = leaf.path
            first = next(number for number, node in enumerate(path) if id(node) not in done)
            done.update(map(id, path))
            if (sample := _sample(base, path, first, decode, max_tokens)) is not None:
                sample.reward = copy.deepcopy(reward) if reward is not None else sample.reward
                made.append(sample)
        return [sample for sample in made if sample.effective_response_length] or made[:1]


def _sample(
    base: Sample,
    path: Sequence[MessageNode],
    first: int,
    decode: Callable[[Sequence[int]], str] | None,
    max_tokens: int,
) -> Sample | None:
    """The turns of a path from its ``first`` on; None where not even one fits into ``max_tokens``."""
    kept = list(itertools.takewhile(lambda node: not max_tokens or node.length <= max_tokens, path[first:]))
    if not kept:
        return None
    sample = copy.copy(base)
    sample.metadata, sample.columns = dict(base.metadata), dict(base.columns)
    sample.reset_response()
    sample.tokens = kept[0].before().tolist()
    for node, after in itertools.zip_longest(kept, kept[1:]):
        if node is not kept[0]:
            sample.append_response_tokens(tokens=node.added.tolist(), trainable=False)
        _append(sample, node.turn, len(node.output) if after is None else after.kept)
    sample.rollout_routed_experts = _routes(path[: first + len(kept)], len(sample.tokens))
    cut = len(kept) < len(path) - first
    sample.status = Status.TRUNCATED if cut else _STATUS.get(kept[-1].turn.finish_reason, Status.COMPLETED)
    if decode is not None:
        sample.response = decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    sample.metadata |= {name: value for node in kept for name, value in node.metadata.items()}
    return sample


def _routes(path: Sequence[MessageNode], tokens: int) -> np.ndarray | None:
    """Those of the first ``tokens`` of a path, up to the first turn that has none."""
    held: np.ndarray | None = None
    for node in path:
        if node.turn.routes is None:
            break
        # The last token of what it goes on from has a route of this turn's: before it, nothing was computed of it.
        start = max(node.length - len(node.output) - len(node.added) - 1, 0)
        if held is not None and len(held) < start:
            break
        held = node.turn.routes if held is None else np.concatenate([held[:start], node.turn.routes])
    return None if held is None else held[: tokens - 1]


def _append(sample: Sample, turn: TurnRecord, kept: int) -> None:
    """The first ``kept`` tokens of a turn's output, in the parts that each weights made."""
    ids, log_probs, start = list(turn.output_ids), list(turn.output_log_probs), 0
    counters: Mapping[str, Any] = turn.meta_info
    parts: Sequence[tuple[str | None, int]] = turn.segments or [(None, len(ids))]
    for version, length in parts:
        end = min(start + length, kept)
        if end > start:
            info = {**counters, "weight_version": version, "finish_reason": None}
            sample.append_response_tokens(
                tokens=ids[start:end], log_probs=log_probs[start:end], trainable=bool(log_probs), meta_info=info
            )
            start, counters = end, {}


def _array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


class TrajectoryManager:
    """The trajectories of sessions whose prompts somebody else renders."""

    def __init__(self, fork_threshold_tokens: int | None = None) -> None:
        """A prompt that differs from the conversation's tokens within those of its last answer is realigned where
        fewer than ``fork_threshold_tokens`` (None: 1024) are behind the difference: these are not trained then. Else
        it is a fork."""
        self._threshold = 1024 if fork_threshold_tokens is None else fork_threshold_tokens
        self._sessions: dict[str, Trajectory] = {}

    def has_session(self, sid: str) -> bool:
        """Whether a turn of it was recorded, and it was not dropped."""
        return sid in self._sessions

    def turn_count(self, sid: str) -> int:
        """Its turns so far."""
        return len(self._sessions[sid].nodes) if sid in self._sessions else 0

    def drop_session(self, sid: str) -> None:
        """Forget it, if it is there."""
        self._sessions.pop(sid, None)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Messages,
        response_message: dict[str, Any] | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> MessageNode:
        """Add a turn, which answers ``prompt_messages`` by ``response_message``, or nothing, to a session; it begins
        one."""
        trajectory = self._sessions.setdefault(sid, Trajectory())
        chain, prompt = chain_of(prompt_messages), _array(turn.prompt_ids)
        parent, kept = trajectory.find_by_ids(prompt), None
        found = trajectory.find(chain)
        if found is not None and found[0] is not parent and (shared := self._realigned(found[0], prompt)) is not None:
            parent, kept = found[0], shared
        reply = response_message or {}
        key = chain.with_reply(reply)
        return trajectory.add(turn, parent, key=key, kept=kept, reply=reply, metadata=metadata)

    def _realigned(self, node: MessageNode, prompt: np.ndarray) -> int | None:
        """How many tokens of a turn's output a prompt that drifts from it keeps; None where it drifts elsewhere."""
        path = np.concatenate([node.before(), node.output])
        differs = np.flatnonzero(path[: len(prompt)] != prompt[: len(path)])
        shared = int(differs[0]) if len(differs) else min(len(path), len(prompt))
        start = node.length - len(node.output)
        return shared - start if shared >= start and node.length - shared < self._threshold else None

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """End a session: its samples (`Trajectory.samples`) of which something is trained; none of a session that is
        not there."""
        trajectory = self._sessions.pop(sid, None)
        samples = [] if trajectory is None else trajectory.samples(base_sample, reward, max_tokens=max_sample_tokens)
        for sample in samples:
            sample.metadata |= extra_metadata or {}
        return [sample for sample in samples if sample.effective_response_length]
