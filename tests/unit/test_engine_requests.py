"""Engines that join and leave as an operator asks: the run's control server, who may ask it, and what it tells."""

from __future__ import annotations

import os
import stat
import threading
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from slime.backends.sglang.client import EngineError
from slime.driver.control.engine_requests import EngineRequests
from slime.driver.control.server import Control
from slime.driver.control.version_files import VersionFiles
from slime.files.control_file import control_file, read_control_file
from slime.fleet import joining
from slime.fleet.arrivals import Told
from slime.fleet.joining import RefusedError
from slime.fleet.spec import EngineSpec
from slime.ray.supervision import RunError
from slime.weights import EngineAddress
from tests.unit.test_engines import Cluster, Ref, failure, killed
from tools import engines as tool

NUM_GPUS = 0
__all__ = ["killed"]
URL = "http://10.0.0.7:30000"


class Engines:
    """Those of a run, which notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses: Exception | None = None
        self.there = {"engine 0": "serves"}
        self.starting: Told | None = None
        """Whom to tell that the one that was added has started, or of what it has not."""

    def add(self, told: Told, url: str | None = None, slots_within: float = 0.0) -> str:
        self._do(("add", url), "engine 1", "starts")
        self.starting = told
        return "engine 1"

    def start(self, failure: str = "") -> None:
        """Have the start that is under way be over."""
        told, self.starting = self.starting, None
        assert told is not None
        self.there |= {"engine 1": "waits for weights"}
        if failure:
            del self.there["engine 1"]
        told("engine 1", failure)

    def remove(self, name: str) -> None:
        self._do(("remove", name), name, "")

    def _do(self, what: tuple[str, str | None], name: str, state: str) -> None:
        self.asked.append(what)
        if self.refuses is not None:
            raise self.refuses
        self.there = {other: its for other, its in {**self.there, name: state}.items() if its}

    def describe(self) -> dict[str, Any]:
        rows = [{"name": name, "state": state} for name, state in self.there.items()]
        return {"engines": [{"url": URL, "model": "actor", "kind": "regular"} | row for row in rows], "version": "3"}


class Run:
    """One that serves requests from time to time, as a driver does."""

    def __init__(self, run_dir: Path) -> None:
        self.engines = Engines()
        self.requests = EngineRequests(self.engines)  # type: ignore[arg-type]
        no_versions = VersionFiles(Namespace(update_weight_transport="distributed"), lambda: None)
        self.control = Control(str(run_dir), "127.0.0.1", self.requests, self.engines.describe, no_versions)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ended.wait(0.05):
            if self.requests.pending:
                self.requests.serve()
            elif self.engines.starting is not None:
                self.engines.start()
            elif "engine 1" in self.engines.there:
                self.engines.there["engine 1"] = "serves"

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self.control.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(tool, "_POLL_S", 0.02)
    made = Run(tmp_path)
    yield made
    made.close()


def test_the_tool_lists_adds_and_removes(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path), "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "weights of version 3",
        "name      url                    model  kind     state",
        "engine 0  http://10.0.0.7:30000  actor  regular  serves",
    ]
    assert tool.main([str(tmp_path), "add", "10.0.0.7:30000"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "engine 1 serves, with the weights of version 3"
    assert tool.main([str(tmp_path), "remove", "1"]) == 0
    assert "engine 1 was removed" in capsys.readouterr().out
    assert tool.main([str(tmp_path), "add"]) == 0
    assert run.engines.asked == [("add", URL), ("remove", "engine 1"), ("add", None)]


@pytest.mark.parametrize(
    ("words", "refuses", "message"),
    [
        (["remove", "7"], RefusedError("remove engine 7: there is no such engine"), "there is no such engine"),
        (["add", "10.0.0.7"], None, "10.0.0.7: must be HOST:PORT"),
        (["add", "10.0.0.7:1"], RefusedError("it does not serve this run's model"), "does not serve"),
    ],
)
def test_what_is_refused_is_told_and_the_run_goes_on(
    run: Run,
    tmp_path: Path,
    words: list[str],
    refuses: Exception | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run.engines.refuses = refuses
    assert tool.main([str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err
    run.engines.refuses = None
    assert tool.main([str(tmp_path), "add"]) == 0


@pytest.mark.parametrize("words", [["remove"], ["list", "1"], ["grow"], []])
def test_other_words_are_bad_input(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        tool.main([str(tmp_path), *words])
    assert raised.value.code == 2


def test_without_a_run_or_in_time_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ((tmp_path, "engines.json is not there: the run in "), (tmp_path / "no", "no: there is no such directory"))
    for place, said in cases:
        assert tool.main([str(place), "list"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    made = Run(tmp_path)
    made._ended.set()
    made._thread.join(10)
    assert tool.main([str(tmp_path), "add", "--timeout", "0"]) == 1
    assert "the run has not made the change in time (--timeout)" in capsys.readouterr().err
    told = control_file(tmp_path).read_text()
    made.control.close()
    assert made.requests.get(1) == {
        "number": 1, "kind": "add", "subject": "", "state": "refused", "told": "the run has ended",
    }  # fmt: skip
    assert not control_file(tmp_path).exists()
    control_file(tmp_path).write_text(told)  # of a driver that was killed
    assert tool.main([str(tmp_path), "list"]) == 1
    assert "does not answer: has it ended?" in capsys.readouterr().err


def test_only_its_owner_reads_the_key_without_which_nothing_is_answered(run: Run, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(control_file(tmp_path)).st_mode) == 0o600
    url, key = read_control_file(tmp_path)
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": key[:-1]}):
        for method, where in (("GET", "/engines"), ("POST", "/engines"), ("DELETE", "/engines/engine%200")):
            assert requests.request(method, url + where, headers=headers, timeout=10).status_code == 401
    assert run.engines.asked == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/requests/9", b"", 404),
        ("GET", "/other", b"", 404),
        ("POST", "/other", b"{}", 404),
        ("DELETE", "/engines/", b"", 404),
        ("POST", "/engines", b"{", 400),
        ("POST", "/engines", b"[]", 400),
        ("POST", "/engines", b'{"addr": 3}', 400),
        ("POST", "/engines", b" " * 70000, 400),
    ],
)
def test_bad_requests_are_answered(run: Run, tmp_path: Path, method: str, path: str, body: bytes, status: int) -> None:
    url, key = read_control_file(tmp_path)
    headers = {"Authorization": f"Bearer {key}"}
    assert requests.request(method, url + path, data=body, headers=headers, timeout=10).status_code == status
    assert run.engines.asked == []


def test_an_engine_is_added_when_it_has_started_and_refused_when_it_does_not() -> None:
    engines = Engines()
    asked = EngineRequests(engines)  # type: ignore[arg-type]
    for number in (1, 2, 3):
        asked.put("add", "")
        asked.serve()
        assert not asked.pending, "the driver goes on"
        state = {"number": number, "kind": "add", "subject": "", "state": "under way", "told": ""}
        assert asked.get(number) == state
        if number == 3:
            asked.close()
        else:
            engines.start("" if number == 1 else "start engine 1: it ended with status 1\nits log")
    found = [asked.get(number) or {} for number in (1, 2, 3)]
    assert [(each["state"], each["told"]) for each in found] == [
        ("done", "engine 1"),
        ("refused", "start engine 1: it ended with status 1\nits log"),
        ("refused", "the run has ended"),
    ]


def test_what_ends_the_run_ends_it() -> None:
    engines = Engines()
    asked = EngineRequests(engines)  # type: ignore[arg-type]
    asked.put("add", "")
    engines.refuses = RunError("the process of trainer 0 died")
    with pytest.raises(RunError, match="trainer 0 died"):
        asked.serve()


# ---- the engines themselves


def external(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: str = "regular") -> None:
    """Have any address be that of a server of this kind."""

    def described(spec: EngineSpec, keys: Any, timeout: float) -> EngineSpec:
        return replace(spec, width=2, worker_type=kind, keyed=False)

    monkeypatch.setattr(joining, "described", described)
    monkeypatch.setattr(joining, "given_keys", lambda args: None)
    vars(cluster.engines._args).update(num_gpus_per_node=8, update_weight_transport="tensor", lora_sync="merged")
    monkeypatch.setattr("slime.ray.cluster.ray.get_runtime_context", lambda: Namespace(get_node_id=lambda: "0" * 56))


def add(cluster: Cluster, url: str, start: Any = None) -> str:
    return cluster.joined(*begin_to_add(cluster, url, start))


def begin_to_add(cluster: Cluster, url: str, start: Any = None) -> tuple[str, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []

    def at(plan: Any) -> Any:
        assert (plan.url, plan.api_keys) == (url, None)
        actor = cluster.create(plan)
        actor.answers["start"] = start or url
        return actor

    with pytest.MonkeyPatch.context() as patch:
        created = Namespace(options=lambda **_: Namespace(remote=at))
        patch.setattr("slime.fleet.actors.as_actor", lambda cls, **threads: created)
        return cluster.engines.add(url=url, told=lambda *what: told.append(what)), told


def test_an_external_engine_joins_engines_beside_trainers_and_leaves(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    cluster, pushed = Cluster(), list[EngineAddress]()
    external(cluster, monkeypatch)
    local = "http://127.0.0.1:30000"
    assert add(cluster, local) == "engine 2"
    with pytest.raises(RefusedError, match="it is one of the run's engines already"):
        add(cluster, local)
    other = "http://127.0.0.1:30001"
    begin_to_add(cluster, other, start=Ref())
    with pytest.raises(RefusedError, match="it is one of the run's engines already"):
        add(cluster, other)
    cluster.engines.remove("engine 3")
    states = {row["name"]: (row["kind"], row["state"]) for row in cluster.engines.describe()}
    assert states["engine 2"] == ("regular, external", "waits for weights")

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        pushed.extend(engines)
        return {}

    cluster.engines.push(1, publish)
    cluster.engines.admit()
    address = pushed[-1]
    assert (address.url, address.num_gpus, address.apart, address.admin_key) == (local, 2, True, None)
    assert address.first_slot == len(cluster.placement.slots)
    assert cluster.serving()[-1] == ["http://e0", "http://e1", local]
    cluster.engines.remove("engine 2")
    assert [call[0] for call in cluster.actors[-2].calls] == ["start", "leave"]
    assert killed == cluster.actors[:-3:-1]
    assert add(cluster, local) == "engine 4"
    cluster.engines.push(1, publish)
    assert pushed[-1] != address, "the publisher must not take it for the one that has these weights"


def test_one_that_is_lost_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(restarts=3)
    external(cluster, monkeypatch)
    add(cluster, "http://127.0.0.1:30000")
    cluster.engines.push(1, lambda engines: {})
    cluster.engines.admit()
    cluster.actors[-1].die()
    assert cluster.rollout() == ["samples"]
    assert [row["name"] for row in cluster.engines.describe()] == ["engine 0", "engine 1"]
    assert cluster.serving()[-1] == ["http://e0", "http://e1"]
    assert "going on with 2 of 3 engines, which get its requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("http://127.0.0.1:30000", "decode", "its worker type is decode, and the run has regular engines"),
        ("http://192.0.2.1:30000", "regular", "it is on another host, and the trainers, all on one, push on loopback"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_has_an_actor(
    monkeypatch: pytest.MonkeyPatch, url: str, kind: str, message: str
) -> None:
    cluster = Cluster()
    external(cluster, monkeypatch, kind)
    with pytest.raises(RefusedError, match=message):
        add(cluster, url)
    assert len(cluster.actors) == 2


def test_as_many_stay_as_the_run_needs() -> None:
    cluster = Cluster(min_engines=2)
    with pytest.raises(RefusedError, match="remove engine 1: --min-engines 2 would not be left"):
        cluster.engines.remove("engine 1")
    assert len(cluster.engines.describe()) == 2


def test_one_that_serves_another_model_is_refused_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    external(cluster, monkeypatch)
    wrong = failure(EngineError("the server at http://127.0.0.1:1 does not serve this run's model: dtype"))
    with pytest.raises(RefusedError, match=r"^start engine 2: the server at .* does not serve this run's model: dtype"):
        add(cluster, "http://127.0.0.1:1", start=lambda: wrong)
    assert cluster.rollout() == ["samples"]
    assert [row["name"] for row in cluster.engines.describe()] == ["engine 0", "engine 1"]
