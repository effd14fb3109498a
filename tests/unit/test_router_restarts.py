"""Routers that die or hang start again at their address; what requests do meanwhile, and who says who is there."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.backends.sglang.client import EngineError, GenerateClient
from slime.fleet import routers as fleet_routers
from slime.fleet.membership import Membership
from slime.fleet.routers import Routers
from slime.observability import events
from slime.ray import budget
from slime.rollout.engine.gate import PauseSwitch
from slime.rollout.runtime import RolloutRuntime
from slime.utils.http_client import Http
from tests.small_fleet import ACTOR, REWARD, bare_manager
from tests.unit.test_engines import members
from tests.unit.test_http_utils import serving

NUM_GPUS = 0


class Router:
    """Knows engines as long as it lives; it dies, or hangs, when ``problem`` is set."""

    def __init__(self, name: str) -> None:
        self.url = f"http://{name}:1"
        self.known: list[str] = []
        self.problem: str | None = None
        self.restarts: list[str | None] = []
        """What becomes of the next ones: None, or why it does not start."""
        self.started = 0
        self.on_wait: Callable[[], object] = lambda: None

    is_own, generate_key = True, None
    metrics_url = "http://127.0.0.1:29000/metrics"

    def api_keys(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        pass

    def listen(self) -> None:
        pass

    def stop(self) -> None:
        self.problem = "it was ended"

    def check(self) -> None:
        if self.problem:
            raise EngineError(f"{self.problem}\nlast lines of its log")

    def restart(self) -> None:
        self.started += 1
        if self.restarts and (problem := self.restarts.pop(0)):
            raise EngineError(problem)
        self.known, self.problem = [], None

    def registered(self) -> set[str]:
        self.check()
        return set(self.known)

    def add(self, url: str) -> None:
        self.check()
        self.known.append(url)

    def remove(self, url: str) -> None:
        self.check()
        self.known.remove(url)

    def wait_registered(self, urls: list[str], timeout: float) -> None:
        self.on_wait()
        self.check()
        assert set(urls) <= set(self.known)

    def failed_tries(self) -> Any:
        raise AssertionError


@pytest.fixture
def runtime(make_args: Callable[..., Namespace]) -> RolloutRuntime:
    return RolloutRuntime(make_args())


class Both:
    """The routers of a trained and a frozen model, of which each has two engines."""

    def __init__(
        self, runtime: RolloutRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int = 3
    ) -> None:
        monkeypatch.setattr(events, "_log", None)
        monkeypatch.setattr(events, "_version", "2")
        events.begin(str(tmp_path), "rollout_manager")
        self._events = tmp_path / events.FILE
        self.sleeps: list[float] = []
        monkeypatch.setattr(fleet_routers.time, "sleep", self.sleeps.append)
        monkeypatch.setattr(fleet_routers, "bypass_proxies", lambda hosts: None)
        monkeypatch.setattr(fleet_routers, "serving_host", lambda keys: "127.0.0.1")
        values = {
            "num_engines": 2,
            "sglang_server_concurrency": 8,
            "engine_start_timeout": 5.0,
            "run_dir": str(tmp_path),
        }
        values |= {"use_fault_tolerance": bool(limit), "engine_restart_limit": limit, "router_cli": []}
        values |= {"sglang_router_ip": None, "sglang_router_port": None}
        args = Namespace(**values, rollout_health_check_timeout=1.0)
        monkeypatch.setattr(fleet_routers, "Router", lambda args, host, keys, log, name: Router(name))
        self.routers = Routers(args, None, runtime, [ACTOR, REWARD])
        self.routers.open()
        self.membership = Membership().having(*members("e0", "e1", "r0", "r1"))
        self.routers.serve(self.membership)
        self.actor: Any = self.routers._routers["actor"]
        self.reward: Any = self.routers._routers["reward"]

    def held(self, model: str = "actor") -> bool:
        return self.routers._holds[model]._paused

    def events(self, *names: str) -> list[tuple[str, ...]]:
        """Of each event these, by default its kind and subject."""
        lines = map(json.loads, self._events.read_text().splitlines()) if self._events.exists() else []
        return [tuple(line[name] for name in names or ("kind", "subject")) for line in lines]


@pytest.fixture
def both(runtime: RolloutRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(runtime, tmp_path, monkeypatch)


def test_a_router_that_died_knows_the_engines_again_and_requests_wait_until_then(both: Both) -> None:
    seen: list[bool] = []
    both.actor.on_wait = lambda: seen.append(both.held())
    both.actor.problem = "router at http://router:1 ended with status 137 (signal 9)"
    both.routers.check("rollout 3")
    assert (both.actor.started, both.reward.started) == (1, 0)
    assert sorted(both.actor.known) == ["http://e0", "http://e1"]
    assert seen == [True]
    assert not both.held()
    assert not both.held("reward")
    assert both.events() == [("router_died", "router"), ("router_back", "router")]
    assert both.events("phase", "version") == [("rollout 3", "2")] * 2
    both.routers.check("rollout 3")
    assert both.actor.started == 1


def test_what_is_told_of_a_router_is_what_its_manager_does_and_of_the_version_that_the_driver_says(
    runtime: RolloutRuntime, make_args: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_version", "none yet")
    phases: list[str] = []

    def check(phase: str) -> None:
        phases.append(phase)
        raise EngineError("it is in no other loop")

    manager = bare_manager(make_args(), runtime, routers=Namespace(check=check))
    with pytest.raises(EngineError):
        manager.watch()
    with manager._cancellable(0, "rollout 3"), pytest.raises(EngineError):
        manager.watch()
    assert phases == ["between rollouts", "rollout 3"]
    manager.note_version("4")
    assert events._version == "4"


def test_a_router_that_does_not_start_is_tried_again_and_ends_the_run_when_its_budget_is_spent(both: Both) -> None:
    both.reward.problem = "reward router at http://reward router:1 hangs: it was stopped"
    both.reward.restarts = ["the port is taken", None]
    both.routers.check("rollout 3")
    assert both.sleeps == [0.0, 5.0]
    assert both.events()[-1] == ("router_back", "reward router")
    both.reward.problem = "it died again"
    both.routers.check("rollout 3")
    both.reward.problem = "it died once more"
    with pytest.raises(EngineError, match="it died once more"):
        both.routers.check("rollout 3")


def test_without_fault_tolerance_a_router_ends_the_run(
    runtime: RolloutRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(runtime, tmp_path, monkeypatch, limit=0)
    both.actor.problem = "router at http://router:1 ended with status 1"
    with pytest.raises(EngineError, match="ended with status 1"):
        both.routers.check("rollout 3")
    with pytest.raises(EngineError):
        both.routers.serve(both.membership.without("e0"))
    assert both.actor.started == 0


def test_an_engine_that_comes_or_goes_while_the_router_is_down_is_told_of_later(both: Both) -> None:
    both.actor.problem = "router at http://router:1 ended with status 1"
    both.routers.serve(both.membership.without("e0"))
    assert both.actor.known == ["http://e0", "http://e1"]
    both.routers.check("rollout 3")
    assert both.actor.known == ["http://e1"]
    both.actor.problem = "it does not answer just now"
    both.routers.leave_out("actor", "http://e1")
    assert both.held(), "nobody is there to answer"
    both.actor.problem = None
    both.routers.check("rollout 3")
    assert both.actor.known == []
    assert both.actor.started == 1, "it was no loss"


def test_who_waits_for_an_engine_to_be_registered_waits_for_the_router_as_well(both: Both) -> None:
    both.actor.problem = "router at http://router:1 ended with status 1"
    asked: list[None] = []

    def once() -> None:
        asked.append(None)
        if len(asked) == 2:  # by whoever watches it
            both.routers.check("rollout 3")

    both.actor.on_wait = once
    both.routers.serve(both.membership.having(*members("e2")))
    assert sorted(both.actor.known) == ["http://e0", "http://e1", "http://e2"]
    assert both.events()[-1] == ("router_back", "router")


def test_a_router_that_has_other_engines_than_were_confirmed_is_an_error(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that is being mended, nor where another change is on its way."""
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(fleet_routers.time, "monotonic", lambda: next(clock))
    both.routers.confirm(both.membership)
    both.actor.known = ["http://e1", "http://e7"]
    message = "the router at http://router:1 does not know http://e0, sends requests to http://e7, which is none of its"
    with pytest.raises(EngineError, match=message):
        both.routers.confirm(both.membership)
    assert len(both.sleeps) == 2, "it may need a moment"
    both.routers.confirm(both.membership.without("e0"))  # nobody was told of this one
    both.actor.problem = "it does not answer"
    both.routers.confirm(both.membership)
    both.routers.serve(both.membership.without("e0"))
    both.actor.problem = None
    both.routers.confirm(both.membership.without("e0"))
    both.routers.check("rollout 3")
    both.actor.is_own, both.actor.known = False, ["http://e1", "http://theirs"]
    both.routers.confirm(both.membership.without("e0"))
    both.actor.known = []
    with pytest.raises(EngineError, match="the router at http://router:1 does not know http://e1"):
        both.routers.confirm(both.membership.without("e0"))


def test_a_router_that_was_ended_in_order_stays_so(both: Both) -> None:
    actor = both.actor
    both.routers.stop()
    both.routers.check("rollout 3")
    assert actor.started == 0


def test_requests_wait_while_no_engine_serves_and_go_on_when_one_does(both: Both) -> None:
    none = both.membership.without("e0").without("e1")
    both.routers.serve(none)
    assert both.held()
    assert not both.held("reward")
    both.routers.serve(none.having(*members("e0", serves=False)))
    assert both.held(), "it has no weights yet"
    both.routers.serve(none.having(*members("e0", serves=False)).having(*members("e0")))
    assert not both.held()


def test_a_try_waits_as_long_as_who_answers_is_away() -> None:
    tried: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        tried.append(request)
        return web.json_response({"text": "there"})

    async def scenario() -> None:
        async with serving(handler) as url:
            http, hold = Http(60.0), PauseSwitch()
            http.hold_by(url, hold.wait_until_resumed)
            hold.pause()
            call = asyncio.ensure_future(GenerateClient(http, url, None, retries=0).generate([1], {}))
            while not hold._waiting:
                await asyncio.sleep(0.01)
            assert not tried
            hold.resume()
            assert await call == {"text": "there"}
            await http.close()

    asyncio.run(scenario())
    assert len(tried) == 1


def test_the_pauses_between_starts_of_routers_and_engines_are_the_same() -> None:
    assert fleet_routers.pause_before is budget.pause_before
