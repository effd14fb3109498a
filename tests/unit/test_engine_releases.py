"""Where releases of SGLang differ: what a client asks of each, and what the code within one takes from each."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from slime.backends.sglang import client
from slime.backends.sglang.client import EngineControl, EngineError
from slime.backends.sglang.loads import load_record
from slime.backends.sglang.loads.loaded import ACTION

NUM_GPUS = 0
OLD, NEW = "0.5.17", "0.5.23"
Asked = list[tuple[str, Any]]


class Engine:
    """What one of a release answers."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.asked: Asked = []
        self.is_open = False

    def answer(self, who: str, url: str, method: str, path: str, body: Any = None, **_: Any) -> requests.Response:
        self.asked.append((path, body))
        if path == "/openapi.json":
            sessions = {"/begin_weight_update": {}, "/end_weight_update": {}} if self.release == NEW else {}
            return reply({"paths": {"/generate": {}} | sessions})
        if path == "/weights_checker":
            place = {"tp_rank": 1, "tp_size": 2}
            told = [place, {**place, "role": "draft"}] if self.release == NEW else place
            return reply({"ranks": [{"checksums": {"a": "1"}, "parallelism_info": told}]})
        if path == "/begin_weight_update" and self.is_open:
            return reply({"success": False, "message": "a weight-update session is already open; call ..."}, 400)
        if path.endswith("_weight_update"):
            self.is_open = path.startswith("/begin")
        return reply({"success": True})


def reply(body: Any, status: int = 200) -> requests.Response:
    response = requests.Response()
    response.status_code, response._content = status, json.dumps(body).encode()
    return response


@pytest.fixture(params=[OLD, NEW])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(request.param)
    monkeypatch.setattr(client, "ask_server", made.answer)
    return made


@pytest.fixture
def control(engine: Engine) -> EngineControl:
    return EngineControl("http://engine", None, None, timeout=1)


def test_engines_leave_garbage_collection_as_it_is_where_they_cannot_freeze_it(
    engine: Engine, control: EngineControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.freeze_garbage_collection()
    assert engine.asked == [("/freeze_gc", {})]
    monkeypatch.setattr(client, "ask_server", lambda *_, **__: reply({"detail": "Not Found"}, 404))
    control.freeze_garbage_collection()


def test_weights_are_loaded_in_a_session_where_there_are_any(engine: Engine, control: EngineControl) -> None:
    control.begin_weight_update()
    control.update_weights_from_tensor(["x"], leaves_draft=True)
    control.end_weight_update()
    bucket = {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket", "flush_cache": False}
    calls = engine.asked[1:]
    if engine.release == OLD:
        assert calls == [("/update_weights_from_tensor", bucket | {"disable_draft_model": True})]
    else:
        update = ("/update_weights_from_tensor", bucket | {"selector": "target"})
        assert calls == [("/begin_weight_update", {}), update, ("/end_weight_update", {})]


def test_a_session_that_a_failed_push_left_open_is_closed(engine: Engine, control: EngineControl) -> None:
    control.begin_weight_update()
    control.begin_weight_update()
    paths = [path for path, _ in engine.asked[1:]]
    again = ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    assert paths == ([] if engine.release == OLD else ["/begin_weight_update", *again])


def test_another_refusal_of_a_session_is_an_error(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    control = EngineControl("http://engine", None, None, timeout=1)
    if not control.has_sessions:
        return
    monkeypatch.setattr(client, "ask_server", lambda *_, **__: reply({"message": "no memory"}, 400))
    with pytest.raises(EngineError, match=r"POST /begin_weight_update: status 400: .*no memory"):
        control.begin_weight_update()


def test_ranks_are_told_apart(control: EngineControl) -> None:
    assert control._of_ranks("checksum", "") == {1: {"a": "1"}}


class OldChecker:
    def handle(self, action: str, allow_quant_error: bool = False) -> Any:
        return ["plain", action, allow_quant_error]

    def _parallelism_info(self) -> Any:
        return SimpleNamespace(model_dump=lambda: {"tp_rank": 3})


class NewChecker:
    def handle(self, action: str, allow_quant_error: bool = False, skip: Any = None, *, role: str) -> Any:
        return ["plain", action, role]

    def _parallelism_info(self, *, role: str) -> Any:
        return SimpleNamespace(model_dump=lambda: {"tp_rank": 3, "role": role})


@pytest.mark.parametrize(
    ("checker", "options", "rank"),
    [(OldChecker, {}, {"tp_rank": 3}), (NewChecker, {"role": "draft"}, {"tp_rank": 3, "role": "draft"})],
)
def test_what_was_loaded_is_answered_by_each_release(
    checker: Callable[[], Any], options: dict[str, Any], rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(as_strings=lambda: {"a": "1"})
    monkeypatch.setattr(load_record, "note_of", lambda _: SimpleNamespace(answer=lambda model, number: told))
    its = checker()
    its._get_model = lambda: None
    answer = functools.partial(load_record._answering(type(its).handle), its)
    assert answer("checksum", allow_quant_error=True, **options)[:2] == ["plain", "checksum"]
    assert answer(f"{ACTION}7", allow_quant_error=False, **options) == {
        "checksums": {"a": "1"},
        "per_gpu_checksum": "",
        "parallelism_info": rank,
    }
