"""What routers are told of engines, and which of them is whose."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang import router as router_module
from slime.backends.sglang.client import EngineError, HangError
from slime.backends.sglang.router import Router, RunningRouter
from slime.fleet.routers import Routers
from slime.fleet.spec import ModelSpec
from slime.rollout.runtime import RolloutRuntime
from slime.utils.http_client import Http
from tests.fake_servers import Servers

NUM_GPUS = 0
KEYS = ("generate-key", "admin-key")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers write into the run's directory, which is a relative path here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def router_args(**changes: Any) -> Namespace:
    values = {"sglang_router_ip": None, "sglang_router_port": None, "run_dir": "run", "router_cli": []}
    values |= {"use_fault_tolerance": True, "engine_restart_limit": 3, "rollout_health_check_timeout": 5.0}
    return Namespace(
        **values | {"prefills_apart": False, "engine_start_timeout": 5.0, "request_timeout": 5.0} | changes
    )


def test_a_router_learns_from_an_engine_which_part_it_has(servers: Servers, tmp_path: Path) -> None:
    router = Router(router_args(prefills_apart=True), "127.0.0.1", KEYS, tmp_path / "log")
    router.url = servers.url
    servers.answers["/server_info"] = 200, {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8}
    router.add(servers.url)
    servers.answers["/server_info"] = 200, {"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 8998}
    router.add(servers.url)
    engine = {"url": servers.url, "api_key": KEYS[0]}
    prefill = engine | {"worker_type": "prefill", "bootstrap_port": 8}
    assert servers.posted == [("/workers", prefill), ("/workers", engine | {"worker_type": "decode"})]
    assert servers.asked == [("/server_info", f"Bearer {KEYS[0]}")] * 2
    servers.answers["/server_info"] = 500, {}
    with pytest.raises(EngineError, match=rf"engine {servers.url}: GET /server_info: status 500"):
        router.add(servers.url)
    router.stop()


def test_a_router_is_given_no_key_for_an_engine_that_asks_for_none(servers: Servers, tmp_path: Path) -> None:
    router = Router(router_args(), "127.0.0.1", KEYS, tmp_path / "log")
    router.url = servers.url
    router.open_engines = frozenset(["http://e1"])
    router.add("http://e0")
    router.add("http://e1")
    assert servers.posted == [
        ("/workers", {"url": "http://e0", "api_key": KEYS[0]}),
        ("/workers", {"url": "http://e1"}),
    ]
    router.stop()


def test_a_router_that_runs_gets_engines_and_loses_them_again(servers: Servers) -> None:
    router = RunningRouter(router_args(), servers.address, KEYS, ("theirs", "their-admin"))
    router.start()
    assert servers.asked == [("/workers", "Bearer their-admin")]
    assert router.api_keys()[servers.url] == router.generate_key == "theirs"
    assert router.api_keys()[f"{servers.url}/workers"] == "their-admin"
    router.add("http://e0")
    assert servers.posted == [("/workers", {"url": "http://e0", "api_key": KEYS[0]})]
    servers.answers["/workers"] = 200, {"workers": [{"url": f"http://e{i}", "id": f"w{i}"} for i in range(2)]}
    with pytest.raises(EngineError, match="has engines that are not this run's: http://e0, http://e1"):
        RunningRouter(router_args(), servers.address, None, (None, None)).start()
    router.stop()
    router.stop()
    assert servers.posted[1:] == [("DELETE /workers/w0", None)], "the other one is somebody else's"


@pytest.mark.parametrize(
    ("answer", "of_keys"),
    [((401, {}), True), ((403, {}), True), ((404, {}), False), ((502, "an engine answered with status 401"), False)],
)
def test_only_a_refused_key_is_said_to_be_one(servers: Servers, answer: tuple[int, Any], of_keys: bool) -> None:
    servers.answers["/workers"] = answer
    with pytest.raises(EngineError, match=rf"GET /workers: status {answer[0]}: ") as refused:
        RunningRouter(router_args(), servers.address, None, (None, None)).start()
    assert ("its keys are taken from the variables" in str(refused.value)) == of_keys


def test_a_router_that_ends_by_itself_is_found_to_hang(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    router = RunningRouter(router_args(), servers.address, None, (None, None))
    vars(router._args).update(rollout_health_check_interval=60.0, rollout_health_check_timeout=1.0)
    router.start()
    router.listen()
    router.check()
    servers.close()
    with pytest.raises(HangError, match=rf"router at {servers.url} hangs: .*GET /liveness"):
        router.examine("a test")
    router.stop()


def models() -> list[ModelSpec]:
    policy = ModelSpec("policy", "to generate", "m", trained=True, tolerates_loss=True, generates=True)
    return [policy, ModelSpec("my.judge", "for it", "j", trained=False, tolerates_loss=False)]


@pytest.mark.parametrize("running", [False, True])
def test_hooks_and_their_programs_find_each_router(running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLIME_")]:
        monkeypatch.delenv(name)
    for kind in (Router, RunningRouter):
        monkeypatch.setattr(kind, "start", lambda self: None)
        monkeypatch.setattr(kind, "listen", lambda self: None)
    monkeypatch.setattr(router_module.Router, "_reserve", lambda self, count=1: 5 if self._name == "router" else 6)
    monkeypatch.setattr("slime.fleet.routers.serving_host", lambda keys: "10.0.0.1")
    own = {"sglang_router_ip": "10.0.0.2", "sglang_router_port": 7} if running else {}
    limits = {"rollout_health_check_timeout": 1.0, "num_engines": 1, "sglang_server_concurrency": 1}
    args = router_args(**own, **limits)
    routers = Routers(args, KEYS, RolloutRuntime(args), models(), ("theirs", None))
    found = routers.options()
    policy = ("10.0.0.2", 7) if running else ("10.0.0.1", 5)
    assert found["sglang_model_routers"] == {"policy": policy, "my.judge": ("10.0.0.1", 6)}
    assert (found["sglang_router_ip"], found["sglang_router_port"]) == policy
    assert found["sglang_router_api_key"] == ("theirs" if running else KEYS[0])
    with monkeypatch.context() as context:
        context.setattr(os, "environ", dict(os.environ))
        routers.open()
        variables = {name: value for name, value in os.environ.items() if name.startswith("SLIME_")}
        expected = {
            "SLIME_ROUTER_API_KEY": found["sglang_router_api_key"],
            "SLIME_ROUTER_URL": "http://{}:{}".format(*policy),
        }
        others = {} if running else {"SLIME_MY_JUDGE_ROUTER_URL": "http://10.0.0.1:6"}
        assert variables == expected | others, "one key opens all of these"
        program = Http()
        assert program.authorization(variables["SLIME_ROUTER_URL"] + "/generate")["Authorization"].endswith(
            found["sglang_router_api_key"]
        )
        assert bool(program.authorization("http://10.0.0.1:6/generate")) != running
