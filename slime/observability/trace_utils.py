"""What was done for each sample, in ``Sample.trace``: upstream's functions for hooks, by upstream's names.

`export_trace`, `bind_trace_carrier` and `import_trace` take a trace to another process and what that did back.

A trace is a *carrier*: a dict of plain values, with ``events`` in the order of their time, which debug dumps keep. Its
spans are lines of the run's trace (`slime.observability.trace`) as well. Targets are samples, handles of their traces
(`bind_trace`), and lists of both, however nested; of anything else nothing is recorded, as no hook may fail by this.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from slime.observability.trace import instant, span

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

_VERSION = 1
_LAST_TIME = 2.0**53
"""Seconds: a number beyond, or none, is no time."""
_ENDS = ("span_start", "span_end")
_OF_REQUEST = ("prompt_tokens", "completion_tokens", "cached_tokens")
_OF_ENGINES_APART = (
    *(f"pd_prefill_{what}" for what in ("bootstrap_queue_duration", "forward_duration", "transfer_queue_duration")),
    *("pd_prefill_retry_count", "pd_decode_prealloc_duration", "pd_decode_transfer_duration"),
    *("pd_decode_forward_duration", "pd_bootstrap_duration", "pd_alloc_waiting_duration"),
    *("pd_transfer_speed_gb_s", "pd_transfer_total_mb"),
)
"""What engines tell that prefill or decode for others."""
_within: ContextVar[Mapping[str, str]] = ContextVar("span_of_each_trace", default=MappingProxyType({}))
"""By trace, the id of the span that this task is in."""


@dataclass
class TraceHandle:
    """A sample's trace, to be handed to code that does not have the sample."""

    trace_id: str
    carrier: dict[str, Any]
    sample_id: int | str | None = None
    group_id: int | str | None = None
    attempt: int = 0
    parent_span_id: str | None = None


@dataclass
class TraceSpan:
    """A span that is under way; what is added to it stands at its end."""

    target: Any
    handles: list[TraceHandle]
    attrs: dict[str, Any] = field(default_factory=dict)

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpan:
        """Add attributes."""
        self.attrs.update(attrs or {})
        return self

    def set(self, key: str, value: Any) -> TraceSpan:
        """Add one."""
        return self.update({key: value})

    set_attr, update_attrs = set, update


def bind_trace(sample: Any) -> TraceHandle:
    """The handle of a sample's trace, which is begun where it has none."""
    carrier = sample.trace = getattr(sample, "trace", None) or {}
    carrier.setdefault("version", _VERSION)
    carrier.setdefault("trace_id", uuid.uuid4().hex)
    carrier.setdefault("events", [])
    carrier.setdefault("attempt", 0)
    carrier |= {"sample_id": sample.index, "group_id": sample.group_index}
    return TraceHandle(carrier["trace_id"], carrier, sample.index, sample.group_index, carrier["attempt"])


def export_trace(target: Any) -> Any:
    """What another process needs to go on with a sample's trace, to be sent as JSON: its ids, the span that this task
    is in, and, of a trace that `bind_trace_carrier` began, the events of this process. Of several targets a list, of
    anything else None."""
    if isinstance(target, (list, tuple)):
        return [export_trace(each) for each in target]
    handles = _handles_of(target)
    if not handles:
        return None
    (handle,) = handles
    parent = _within.get().get(handle.trace_id) or handle.parent_span_id
    sent = {"version": _VERSION, "trace_id": handle.trace_id, "attempt": handle.carrier["attempt"]}
    sent |= {"sample_id": handle.sample_id, "group_id": handle.group_id, "parent_span_id": parent}
    return {**sent, "is_sent": True, "events": list(handle.carrier["events"]) if handle.carrier.get("is_part") else []}


def bind_trace_carrier(
    carrier: Any,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int | None = None,
    parent_span_id: str | None = None,
) -> Any:
    """The target for what is done here for the sample of a carrier, as in another process, where spans lie within the
    one that it was exported in.

    Args:
        carrier: of `export_trace`, which is left as it is; or a dict, into which is recorded. Of a list, a list comes
            back; of anything else None, which is a target of which nothing is recorded.
        trace_id, sample_id, group_id, attempt, parent_span_id: in place of what the carrier says.
    """
    if isinstance(carrier, (list, tuple)):
        return [bind_trace_carrier(each) for each in carrier]
    said = dict(carrier) if isinstance(carrier, Mapping) else {}
    given: dict[str, Any] = {
        "trace_id": trace_id,
        "sample_id": sample_id,
        "group_id": group_id,
        "parent_span_id": parent_span_id,
    }
    ids: dict[str, Any] = {k: said.get(k) if value is None else value for k, value in given.items()}
    if not isinstance(carrier, Mapping) or not isinstance(ids["trace_id"], str):
        return None
    tried = said.get("attempt") if attempt is None else attempt
    own: dict[str, Any] = {} if said.get("is_sent") or not isinstance(carrier, dict) else carrier
    if "events" not in own:  # else it is a whole trace, of which `export_trace` sends no events
        own |= {"events": [], "is_part": True}
    own |= {"version": _VERSION, "trace_id": ids["trace_id"], "attempt": tried if isinstance(tried, int) else 0}
    return TraceHandle(carrier=own, attempt=own["attempt"], **ids)


def import_trace(target: Any, carrier: Any = None) -> Any:
    """Add to the traces of samples the events that another process has sent back by `export_trace`; ``target`` again.
    Of a carrier alone it is `bind_trace_carrier`.

    Events have the times of that process's clock. What is there already, is of another trace or no event is left out:
    what comes from elsewhere may be anything.
    """
    if carrier is None and _carriers_of(target):
        return bind_trace_carrier(target)
    carriers = {each["trace_id"]: each for each in _carriers_of(carrier)}
    for handle in _handles_of(target):
        events = carriers.get(handle.trace_id, {}).get("events")
        if not isinstance(events, list):
            logger.warning("import_trace: no trace of sample %s: nothing is added to it", handle.sample_id)
            continue
        known = handle.carrier["events"]
        whose = {"sample_id": handle.sample_id, "group_id": handle.group_id, "trace_id": handle.trace_id}
        plain = [_plain(event) for event in events if _is_event(event)]
        told = [{k: v for k, v in event.items() if v is not None} | whose for event in plain]
        # In place: other handles have this list.
        known[:] = sorted([*known, *(event for event in told if event not in known)], key=lambda event: event["ts"])
    return target


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Record a moment."""
    handles = _handles_of(target)
    for handle in handles:
        _record(handle, "event", name, time.time(), attrs)
    if handles:
        instant(name, **_as_fields(handles, attrs))


@contextlib.contextmanager
def trace_span(
    target: Any, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
) -> Iterator[TraceSpan]:
    """Record a block of synchronous or asynchronous code, with the error that ends it if ``record_error``."""
    handles = _handles_of(target)
    block = TraceSpan(handles[0] if len(handles) == 1 else target, handles)
    if not handles:
        yield block
        return
    outer, ids = _within.get(), [uuid.uuid4().hex for _ in handles]  # which no fork repeats
    begun = time.time()
    for handle, own in zip(handles, ids, strict=True):
        parent = outer.get(handle.trace_id) or handle.parent_span_id
        _record(handle, "span_start", name, begun, attrs, span_id=own, parent_span_id=parent)
    inner = {handle.trace_id: own for handle, own in zip(handles, ids, strict=True)}
    token = _within.set({**outer, **inner})
    try:
        with span(name) as timed:
            timed.fields.update(_as_fields(handles, attrs))
            try:
                yield block
            finally:
                timed.fields.update(block.attrs)
    except Exception as error:
        if record_error:
            block.update({"error_type": type(error).__name__, "error_message": str(error)})
        raise
    finally:
        with contextlib.suppress(ValueError):  # of an asynchronous generator that another task has gone on with
            _within.reset(token)
        ended = time.time()
        for handle, own in zip(handles, ids, strict=True):
            _record(handle, "span_end", name, ended, block.attrs, span_id=own)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[Function], Function]:
    """A decorator that records each call of a function, plain or asynchronous.

    Args:
        target: the parameter that has the target; of neither this nor a getter, the first one that is a target.
        target_getter: makes the target of the call's arguments.
        attrs_getter: makes the span's attributes of them.
        record_error: whether an error that ends the call is an attribute.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function)

        def recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
            found, attrs = None, None
            try:
                if target_getter is not None:
                    found = target_getter(*args, **kwargs)
                else:
                    given = parameters.bind_partial(*args, **kwargs).arguments
                    found = given.get(target) if target else next(filter(_handles_of, given.values()), None)
                attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
            except Exception as error:  # of a getter; or the function will say what it lacks
                logger.warning("trace_function(%r) of %s: %r", name, function.__qualname__, error)
            return trace_span(found, name, attrs=attrs, record_error=record_error)

        @functools.wraps(function)
        async def in_task(*args: Any, **kwargs: Any) -> Any:
            with recorded(args, kwargs):
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            with recorded(args, kwargs):
                return function(*args, **kwargs)

        return in_task if inspect.iscoroutinefunction(function) else in_thread  # type: ignore[return-value]

    return decorate


def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> Any:
    """Count another try at samples, to which what is recorded from now on belongs; ``target`` again."""
    for handle in _handles_of(target):
        handle.attempt = handle.carrier["attempt"] = handle.carrier["attempt"] + 1
        trace_event(handle, "attempt_start", attrs={"attempt": handle.attempt, **(attrs or {})})
    return target


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Of the ``meta_info`` of an engine's reply, what a span of its request should have: counts of tokens, why it
    ended, its id, and the seconds of engines that prefill or decode for others."""
    attrs = {key: meta[key] for key in (*_OF_REQUEST, *_OF_ENGINES_APART) if meta.get(key) is not None}
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return attrs | {k: v for k, v in (("finish_reason", kind), ("sglang_request_id", meta.get("id"))) if v is not None}


def _handles_of(target: Any) -> list[TraceHandle]:
    if isinstance(target, TraceHandle):
        return [target]
    if isinstance(target, (list, tuple)):
        return [handle for each in target for handle in _handles_of(each)]
    return [bind_trace(target)] if hasattr(target, "group_index") and hasattr(target, "index") else []


def _carriers_of(told: Any) -> list[Mapping[str, Any]]:
    if isinstance(told, (list, tuple)):
        return [carrier for each in told for carrier in _carriers_of(each)]
    return [told] if isinstance(told, Mapping) and isinstance(told.get("trace_id"), str) else []


def _is_event(told: Any) -> bool:
    """Whether it has what readers of a trace count on."""
    if not isinstance(told, Mapping) or not isinstance(told.get("name"), str):
        return False
    if not isinstance(told.get("attrs"), Mapping | None) or not isinstance(told.get("parent_span_id"), str | None):
        return False
    at, kind, of_span = told.get("ts"), told.get("type"), isinstance(told.get("span_id"), str)
    is_time = isinstance(at, (int, float)) and not isinstance(at, bool) and abs(at) < _LAST_TIME
    return is_time and isinstance(told.get("attempt"), int) and (kind == "event" or (kind in _ENDS and of_span))


def _record(
    handle: TraceHandle,
    kind: str,
    name: str,
    at: float,
    attrs: Mapping[str, Any] | None,
    **ids: str | None,
) -> None:
    event: dict[str, Any] = {"type": kind, "name": name, "ts": at, "trace_id": handle.trace_id}
    event |= {"sample_id": handle.sample_id, "group_id": handle.group_id, "attempt": handle.carrier["attempt"]}
    event |= {key: value for key, value in ids.items() if value is not None}
    if attrs:
        event["attrs"] = {str(key): _plain(value) for key, value in attrs.items()}
    handle.carrier["events"].append(event)


def _plain(value: Any) -> Any:
    """As text what is no number, text or container of these: checkpoints hold samples under way, with their traces."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _as_fields(handles: list[TraceHandle], attrs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A line's: of several samples it names the first, and how many there are."""
    more = {} if len(handles) == 1 else {"samples": len(handles)}
    return {"sample": handles[0].sample_id, "group": handles[0].group_id, **more, **(attrs or {})}
