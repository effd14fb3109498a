"""Upstream's functions that record in ``Sample.trace``, as hooks use them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.observability import trace
from slime.observability.trace_utils import (
    TraceHandle,
    bind_trace,
    bind_trace_carrier,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from tests.forked import forked

NUM_GPUS = 0


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    trace.begin(str(tmp_path), "rollout_manager")
    yield tmp_path
    trace._forget()


def written(run_dir: Path) -> list[dict[str, Any]]:
    trace.flush()
    path = run_dir / "trace" / "rollout_manager.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sample_of(index: int = 3) -> Sample:
    return Sample(index=index, group_index=1)


def events_of(sample: Sample, *keys: str) -> list[tuple[Any, ...]]:
    assert sample.trace is not None
    return [tuple(event.get(key) for key in keys) for event in sample.trace["events"]]


def test_a_span_is_two_events_with_what_was_added_at_its_end() -> None:
    sample = sample_of()
    with trace_span(sample, "generate", attrs={"turn": 1}) as span:
        assert span.update({"tokens": 5}) is span
        span.set("finish", "stop")
    begin, end = sample.trace["events"]  # type: ignore[index]
    assert (begin["type"], begin["name"], begin["attrs"]) == ("span_start", "generate", {"turn": 1})
    assert (end["type"], end["name"], end["attrs"]) == ("span_end", "generate", {"tokens": 5, "finish": "stop"})
    assert begin["span_id"] == end["span_id"]
    assert begin["ts"] <= end["ts"]
    assert {(event["sample_id"], event["group_id"], event["attempt"]) for event in (begin, end)} == {(3, 1, 0)}
    assert sample.trace["version"] == 1  # type: ignore[index]


def test_spans_within_name_the_one_around_of_the_same_sample() -> None:
    first, second = sample_of(1), sample_of(2)
    with trace_span(first, "outer"), trace_span([first, second], "inner"):
        pass
    outer = first.trace["events"][0]["span_id"]  # type: ignore[index]
    assert events_of(first, "name", "parent_span_id")[:2] == [("outer", None), ("inner", outer)]
    assert events_of(second, "name", "parent_span_id")[:1] == [("inner", None)]


def test_an_error_is_recorded_and_passes() -> None:
    sample = sample_of()
    with pytest.raises(KeyError), trace_span(sample, "a"):
        raise KeyError("x")
    with pytest.raises(ValueError, match="y"), trace_span(sample, "b", record_error=False):
        raise ValueError("y")
    attrs = [attrs for (attrs,) in events_of(sample, "attrs")]
    assert attrs == [None, {"error_type": "KeyError", "error_message": "'x'"}, None, None]


def test_what_is_recorded_is_in_the_runs_trace_as_well(run_dir: Path) -> None:
    with trace_span([sample_of(4), sample_of(5)], "grade", attrs={"within": 1}) as span:
        trace_event(sample_of(4), "tool", attrs={"code": 7})
        span.update({"score": 0.5})
    moment, line = written(run_dir)
    assert (moment["name"], moment["sample"], moment["code"], moment["instant"]) == ("tool", 4, 7, True)
    assert (line["name"], line["sample"], line["group"], line["samples"]) == ("grade", 4, 1, 2)
    assert (line["within"], line["score"], moment["parent"]) == (1, 0.5, line["id"])


def test_a_handle_stands_for_its_sample_in_other_tasks() -> None:
    sample = sample_of()
    handle = bind_trace(sample)
    assert isinstance(handle, TraceHandle)
    assert bind_trace(sample).trace_id == handle.trace_id

    async def tool() -> None:
        trace_event(handle, "tool")

    async def run() -> None:
        with trace_span(sample, "agent"):
            await asyncio.create_task(tool())

    asyncio.run(run())
    assert events_of(sample, "name") == [("agent",), ("tool",), ("agent",)]


def test_functions_plain_and_asynchronous_by_every_way_to_name_the_target() -> None:
    sample, handle = sample_of(), bind_trace(sample_of(9))

    @trace_function("plain", target="sample")
    def plain(args: object, sample: Sample) -> int:
        """Keeps its name."""
        return 1

    @trace_function("task", target_getter=lambda args, payload: payload["sample"], attrs_getter=lambda *_: {"n": 2})
    async def task(args: object, payload: dict[str, Sample]) -> int:
        return 2

    @trace_function("found")
    def found(args: object, group: list[Sample]) -> int:
        return 3

    assert (plain(None, sample=sample), asyncio.run(task(None, {"sample": sample}))) == (1, 2)
    assert found(None, [sample]) == 3
    assert plain.__name__ == "plain"
    assert asyncio.iscoroutinefunction(task)
    assert events_of(sample, "type", "name", "attrs")[::2] == [
        ("span_start", "plain", None),
        ("span_start", "task", {"n": 2}),
        ("span_start", "found", None),
    ]
    assert handle.carrier["events"] == []


def test_no_call_fails_by_a_target_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    @trace_function("a", target="no_such")
    def wrong(sample: Sample) -> int:
        return 1

    @trace_function("b", target_getter=lambda sample: sample["x"])
    def broken(sample: Sample) -> int:
        return 2

    sample = sample_of()
    assert (wrong(sample), broken(sample)) == (1, 2)
    trace_event(None, "nothing")
    with trace_span({"no": "target"}, "nothing") as span:
        span.update({"x": 1})
    assert sample.trace is None
    assert "trace_function('b')" in caplog.text
    with pytest.raises(TypeError, match="missing 1 required"):
        wrong()  # type: ignore[call-arg]


def test_another_try_is_counted() -> None:
    sample = sample_of()
    assert trace_next_attempt(sample, attrs={"why": "reward"}) is sample
    trace_event(sample, "a")
    assert events_of(sample, "name", "attempt") == [("attempt_start", 1), ("a", 1)]


def test_attributes_of_any_kind_can_be_kept(run_dir: Path) -> None:
    sample = sample_of()
    with trace_span(sample, "a", attrs={"lock": threading.Lock(), "path": Path("/x"), "list": [1, (2, Path("/y"))]}):
        pass
    attrs = pickle.loads(pickle.dumps(sample)).trace["events"][0]["attrs"]
    assert (attrs["path"], attrs["list"]) == ("/x", [1, [2, "/y"]])
    assert written(run_dir)[0]["path"] == "/x"


def test_dumps_keep_it_and_are_not_changed_later() -> None:
    sample = sample_of()
    trace_event(sample, "a")
    dumped = sample.to_dict()
    trace_event(sample, "b")
    assert [event["name"] for event in dumped["trace"]["events"]] == ["a"]
    again = Sample.from_dict(pickle.loads(pickle.dumps(sample.to_dict())))
    assert again.trace == sample.trace
    assert Sample.from_dict({"index": 1}).trace is None


@pytest.mark.parametrize(
    ("meta", "attrs"),
    [
        ({"id": "r1", "finish_reason": {"type": "length", "length": 8}}, {"finish_reason": "length"}),
        ({"id": "r1", "finish_reason": "stop", "prompt_tokens": 3}, {"finish_reason": "stop", "prompt_tokens": 3}),
        ({"id": "r1", "finish_reason": None, "cached_tokens": 0, "other": 1}, {"cached_tokens": 0}),
        ({"id": "r1", "pd_decode_forward_duration": 0.5}, {"pd_decode_forward_duration": 0.5}),
    ],
)
def test_what_an_engine_tells(meta: dict[str, Any], attrs: dict[str, Any]) -> None:
    assert build_sglang_meta_trace_attrs(meta) == attrs | {"sglang_request_id": "r1"}
    assert build_sglang_meta_trace_attrs({}) == {}


_ELSEWHERE = """
import json, sys
from slime.observability.trace_utils import bind_trace_carrier, export_trace, trace_event, trace_span
handle = bind_trace_carrier(json.load(sys.stdin))
with trace_span(handle, "environment", attrs={"host": "b"}):
    with trace_span(handle, "tool"):
        trace_event(handle, "cache_missed")
json.dump(export_trace(handle), sys.stdout)
"""


def test_another_process_goes_on_with_a_trace_and_sends_back_what_it_did() -> None:
    """Within the span that its request was sent in; and once, however often the answer comes."""
    sample = sample_of()
    trace_next_attempt(sample)
    with trace_span(sample, "ask"):
        sent = json.dumps(export_trace(sample))
        command = [sys.executable, "-c", _ELSEWHERE]
        answer = subprocess.run(command, input=sent, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
        assert import_trace(sample, json.loads(answer)) is sample
        import_trace(sample, json.loads(answer))
    assert json.loads(sent)["events"] == []
    assert events_of(sample, "type", "name", "sample_id", "attempt")[1:] == [
        ("span_start", "ask", 3, 1),
        ("span_start", "environment", 3, 1),
        ("span_start", "tool", 3, 1),
        ("event", "cache_missed", 3, 1),
        ("span_end", "tool", 3, 1),
        ("span_end", "environment", 3, 1),
        ("span_end", "ask", 3, 1),
    ]
    begun = [event for event in sample.trace["events"] if event["type"] == "span_start"]  # type: ignore[index]
    assert [event.get("parent_span_id") for event in begun] == [None, begun[0]["span_id"], begun[1]["span_id"]]
    assert begun[1]["attrs"] == {"host": "b"}


def test_several_samples_and_one_that_is_none() -> None:
    samples = [sample_of(1), sample_of(2)]
    assert [carrier["sample_id"] for carrier in export_trace(samples)] == [1, 2]
    assert export_trace({"no": "sample"}) is None
    assert export_trace(bind_trace(samples[0])) == export_trace(samples[0])


@pytest.mark.parametrize("carrier", [None, 3, {}, {"trace_id": 4}])
def test_no_carrier_is_a_target_of_which_nothing_is_recorded(carrier: Any) -> None:
    handle = bind_trace_carrier(carrier)
    assert handle is None
    with trace_span(handle, "tool"):
        trace_event(handle, "found")
    sample = sample_of()
    before = export_trace(sample)
    assert import_trace(sample, carrier) is sample
    assert export_trace(sample) == before


def test_what_comes_from_elsewhere_may_be_anything() -> None:
    """Of a trace that is its own, events with what readers count on are taken, as plain values of this sample's."""
    sample = sample_of()
    carrier = export_trace(sample)
    good = {"type": "event", "name": "found", "ts": 5.0, "attempt": 0, "sample_id": 99, "attrs": {"of": object}}
    bad = [
        *({**good, key: None} for key in ("type", "name", "ts", "attempt")),
        *({**good, "ts": at} for at in (float("nan"), "5", True)),
        *({**good, "type": "span_end"}, {**good, "type": "other"}, "found", None),
    ]
    import_trace(sample, {**carrier, "events": [*bad, good]})
    assert events_of(sample, "name", "sample_id", "ts") == [("found", 3, 5.0)]
    json.dumps(sample.trace)
    import_trace(sample, {**carrier, "events": [{**good, "ts": 6.0, "attrs": None, "parent_span_id": None}]})
    assert sample.trace is not None
    assert not {"attrs", "parent_span_id"} & set(sample.trace["events"].pop())
    import_trace(sample, {**carrier, "trace_id": "another", "events": [{**good, "name": "other"}]})
    import_trace(sample, {**carrier, "events": {}})
    assert len(events_of(sample, "name")) == 1


def test_upstreams_forms_of_carriers() -> None:
    """A carrier alone is bound; a dict that no process has sent is recorded into."""
    sample = Sample(index=3, group_index=1)
    handle = import_trace(export_trace(bind_trace(sample)))
    trace_event(handle, "there")
    assert (handle.sample_id, [event["name"] for event in handle.carrier["events"]]) == (3, ["there"])
    assert bind_trace(sample).carrier["events"] == []
    assert sample.trace is not None
    whole = bind_trace_carrier(sample.trace, parent_span_id="x")
    trace_event(whole, "here")
    assert [event["name"] for event in sample.trace["events"]] == ["here"]
    assert export_trace(whole)["events"] == export_trace(sample)["events"] == []
    made: dict[str, Any] = {}
    with trace_span(bind_trace_carrier(made, trace_id="t", sample_id=4, attempt=2, parent_span_id="x"), "tool"):
        pass
    first = made["events"][0]
    assert (first["trace_id"], first["sample_id"], first["attempt"], first["parent_span_id"]) == ("t", 4, 2, "x")
    again = bind_trace_carrier(made)
    assert [event["name"] for event in export_trace(again)["events"]] == ["tool", "tool"]


def test_carriers_of_several_samples_there_and_back() -> None:
    samples = [Sample(index=i, group_index=0) for i in range(3)]
    handles = bind_trace_carrier(json.loads(json.dumps(export_trace(samples))))
    for handle in handles:
        trace_event(handle, f"of {handle.sample_id}")
    import_trace(samples, json.loads(json.dumps(export_trace(handles[::-1]))))
    assert [[event["name"] for event in bind_trace(s).carrier["events"]] for s in samples] == [
        ["of 0"], ["of 1"], ["of 2"],
    ]  # fmt: skip


def test_forks_have_span_ids_of_their_own() -> None:
    def ids(handle: TraceHandle) -> set[str]:
        with trace_span(handle, "a"), trace_span(handle, "b"):
            pass
        return {event["span_id"] for event in handle.carrier["events"]}

    own = bind_trace(Sample(index=0, group_index=0))
    ids(own)
    told = forked(lambda: print(json.dumps(sorted(ids(own)))), os.environ)
    assert len(ids(own) | set(json.loads(told.stdout))) == 6, "two before, two here, two there"


@pytest.mark.parametrize("wrong", [{"ts": 10**400}, {"ts": float("nan")}, {"attrs": 3}, {"parent_span_id": 4}])
def test_no_event_of_another_process_does_harm(wrong: dict[str, Any]) -> None:
    sample = Sample(index=0, group_index=0)
    event = {"type": "event", "name": "a", "ts": 1.0, "attempt": 0}
    import_trace(sample, {**export_trace(sample), "events": [{**event, **wrong}, event]})
    assert [each["ts"] for each in bind_trace(sample).carrier["events"]] == [1.0]
