"""What other processes get of the environment, and which requests go through a proxy of the host."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import torch

from slime.backends.sglang import router as router_module
from slime.backends.sglang.engine import Engine
from slime.backends.sglang.router import Router
from slime.fleet import train_group
from slime.fleet.placement import Placement, Slot
from slime.fleet.train_group import TrainGroup
from slime.observability import logs, trace
from slime.ray.cluster import actor_environment
from slime.ray.supervision import Supervisor
from slime.ray.train_actor import TrainActor
from slime.utils.environment import bypass_proxies, proxy_of, server_environment
from slime.utils.http_utils import RequestError, post
from tests.proxy import RecordingProxy
from tests.unit.test_http_utils import http

NUM_GPUS = 0
PROXY = "http://proxy.example:3128"
PROXIES = [n for lower in ("http", "https", "all", "ftp", "ws", "wss", "socks", "grpc") for n in (lower, lower.upper())]
SECRETS = {
    "WANDB_API_KEY": "w",
    "HF_TOKEN": "h",
    "HUGGING_FACE_HUB_TOKEN": "h",
    "AWS_SECRET_ACCESS_KEY": "a",
    "AWS_ACCESS_KEY_ID": "AKIA",
    "OPENAI_API_KEY": "12345",
    "DB_PASSWORD": "p",
    "SLIME_ROUTER_API_KEY": "k",
    "RAY_AUTH_TOKEN": "r",
    "SGLANG_API_KEY": "k",
    "TORCH_SECRET_KEY": "k",
    "DB_PWD": "p",
    "GITHUB_PAT": "p",
    "SLIME_JOB_SECRET_FLAGS": "[]",
}
SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN_PATH": "/t",
    "SGLANG_SAVE_KEY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "GPG_KEY": "7169605F62C751356D054A26A821E680E5FA6305",
    "GOOGLE_APPLICATION_CREDENTIALS": __file__,
    "PWD": "/nowhere",
    "OLDPWD": "/nowhere",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("SLIME_"):
            monkeypatch.delenv(name)
    for name, value in (SECRETS | SETTINGS).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(f"{name}_{'PROXY' if name.isupper() else 'proxy'}", PROXY)


def assert_is_for_a_server(given: dict[str, str], *needed: str) -> None:
    assert not [name for name in given if name.lower().endswith("_proxy") and name.lower() != "no_proxy"]
    assert set(SECRETS) & set(given) == set(needed)
    assert set(SETTINGS) <= set(given)
    assert given["PATH"] == os.environ["PATH"]


@pytest.mark.usefixtures("proxies")
def test_programs_that_ask_nobody_outside_get_neither_proxies_nor_secrets() -> None:
    assert_is_for_a_server(server_environment())
    assert_is_for_a_server(server_environment(needs=("HF_TOKEN",)), "HF_TOKEN")
    assert os.environ["http_proxy"] == PROXY, "this process, which runs users' code, keeps them"
    assert os.environ["WANDB_API_KEY"] == "w"


@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("gpus", [None, ["0"]])
def test_an_engine(gpus: list[str] | None, tmp_path: Path) -> None:
    """It may load a draft model from the hub."""
    args = Namespace(
        rollout_num_gpus_per_engine=1, pushes_float8=False, true_on_policy_mode=False, deterministic_mode=False
    )
    given = Engine(args, 0, "127.0.0.1", None, tmp_path / "log", gpus)._environment()
    assert_is_for_a_server(given, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("name", ["router", "reward router"])
def test_a_router(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Process:
        held = False

        def __init__(self, command: list[str], env: dict[str, str], log_path: Path, secrets: Any) -> None:
            started.extend([env, command])

        def start(self) -> None:
            raise InterruptedError

        def stop(self) -> None:
            pass

    monkeypatch.setattr(router_module, "ServerProcess", Process)
    seconds = (
        "request_timeout",
        "engine_start_timeout",
        "rollout_health_check_interval",
        "rollout_health_check_timeout",
    )
    args = Namespace(router_cli=[], **dict.fromkeys(seconds, 1.0))
    with pytest.raises(InterruptedError):
        Router(args, "127.0.0.1", ("generate", "admin"), tmp_path / "log", name).start()
    given, command = started
    assert_is_for_a_server(given)
    assert command[command.index("--prometheus-host") + 1] == "127.0.0.1", "its metrics ask for no key"
    assert not {"generate", "admin"} & set(command)


def test_ray_shows_no_secret_of_the_hosts_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same rule as everywhere."""
    secret = ("HF_API_KEY", "SGLANG_AUTH", "TORCH_CREDENTIALS", "CUDA_PASSPHRASE", "NCCL_ACCESS_TOKENS")
    for name in secret:
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    variables = actor_environment()["env_vars"]
    assert not {*secret, *SECRETS, "CUDA_VISIBLE_DEVICES"} & set(variables)
    assert {"NCCL_DEBUG", "HF_TOKEN_PATH", "SGLANG_SAVE_KEY", "HF_HUB_DISABLE_IMPLICIT_TOKEN"} <= set(variables)


def test_a_trainer_has_the_secrets_that_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not by Ray, which shows the environment of its workers."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is put back
    given: list[Any] = []

    class Actor:
        def options(self, **options: Any) -> Actor:
            given.append(options["runtime_env"]["env_vars"])
            return self

        def remote(self, *values: Any) -> None:
            given.append(values)

    monkeypatch.setattr(train_group, "as_actor", lambda cls: Actor())
    slot = Slot(0, "node", None)
    wanted = {"OPENAI_API_KEY": "mine", "OMP_NUM_THREADS": 2}
    args = Namespace(
        true_on_policy_mode=False,
        deterministic_mode=False,
        train_env_vars=wanted,
        wandb_key="s3cret",
        launch_dir="/nowhere",
        run_dir=str(tmp_path),
    )
    monkeypatch.setattr(logs, "begin", lambda *_: None)
    monkeypatch.setattr(trace, "begin", lambda *_: None)
    monkeypatch.setattr(Placement, "options", lambda *_, **__: {})
    monkeypatch.setattr(Supervisor, "watch", lambda *_: None)
    TrainGroup(args, Supervisor()).create(Placement([slot], train=[slot], engines=[]))
    variables, values = given
    assert variables["OMP_NUM_THREADS"] == "2"
    assert not set(SECRETS) & set(variables)
    assert values[0].wandb_key is None
    TrainActor(*values)
    kept = {name: os.environ[name] for name in SECRETS if name in os.environ}
    assert kept == {"OPENAI_API_KEY": "mine", "RAY_AUTH_TOKEN": "r"}, "what it is given, and its Ray's own"
    assert set(SETTINGS) <= set(os.environ)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for sharing in (None, 1, 3, 9):
        TrainActor(*values[:-1], sharing)
    assert threads == [8, 2, 1], "its part of the cores that it may use"


@pytest.mark.parametrize(
    ("changed", "slots"),
    [
        ({}, {"a": 3, "b": 1}),
        ({"train_env_vars": {"OMP_NUM_THREADS": 2}}, {"a": None, "b": None}),
        ({"deterministic_mode": True}, {"a": None, "b": None}),
        ({"true_on_policy_mode": True}, {"a": None, "b": None}),
    ],
)
def test_trainers_share_the_cores_of_their_host(
    changed: dict[str, Any], slots: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all slots of the run there, engines' too; unless their threads are told, or bits may not depend on it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = {"true_on_policy_mode": False, "deterministic_mode": False, "train_env_vars": None} | changed
    group = TrainGroup(Namespace(**settings), Supervisor())
    hosts = [Slot(number, host, None) for number, host in enumerate("aaab")]
    placement = Placement(hosts, train=hosts[2:], engines=[hosts[:2]])
    assert {slot.host: group._sharing(placement, slot) for slot in placement.train} == slots
    assert group._sharing(placement, Slot(0, "a", "0")) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert group._sharing(placement, hosts[2]) is None


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        ("http://judge.example/score", {"http_proxy": PROXY}, PROXY),
        ("http://judge.example/score", {"HTTP_PROXY": PROXY}, PROXY),
        ("https://judge.example/score", {"http_proxy": PROXY}, None),
        ("https://judge.example/score", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://judge.example/score", {"ALL_PROXY": PROXY}, PROXY),
        ("http://judge.example/score", {"all_proxy": "socks5://s:1080"}, None),
        ("http://judge.example/score", {"http_proxy": PROXY, "no_proxy": "judge.example"}, None),
        ("http://judge.example:80/score", {"http_proxy": PROXY, "NO_PROXY": ".example"}, None),
        ("http://user:secret@judge.example/score", {"http_proxy": PROXY, "no_proxy": ".example"}, None),
        ("http://judge.example/score", {"http_proxy": PROXY, "no_proxy": "*"}, None),
        ("http://localhost:1/score", {"http_proxy": PROXY}, None),
        ("http://127.0.1.1:1/score", {"http_proxy": PROXY}, None),
        ("http://[::1]:1/score", {"http_proxy": PROXY}, None),
        ("http://judge.example/score", {}, None),
        ("http://judge.example/score", {"http_proxy": "proxy.example:3128"}, PROXY),
        ("http://127.judge.example/score", {"http_proxy": PROXY}, PROXY),
        ("http://[::ffff:127.0.0.1]/score", {"http_proxy": PROXY}, None),
    ],
)
def test_calls_of_users_go_by_the_variables(
    url: str, variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(
    ("entry", "direct", "by_proxy"),
    [
        ("10.0.0.0/8", "10.1.2.3 10.1.2.3:8000 [::ffff:10.1.2.3] me:s3cret@10.1.2.3", "11.1.2.3 10.example [fd00::1]"),
        ("10.1.2.3/8", "10.9.9.9", "11.1.2.3"),
        ("192.0.2.0/25", "192.0.2.127:1", "192.0.2.128:1"),
        ("fd00::/8", "[fd00::1] [FDAB::1]:8000", "[fe80::1] 10.1.2.3 fd00.example"),
        ("10.0.0.0/99", "", "10.1.2.3"),
        ("corp.example/8", "", "corp.example"),
        ("192.0.2.2", "192.0.2.2 192.0.2.2:8000", "192.0.2.22 1192.0.2.2"),
        ("192.0.2.2:8000", "192.0.2.2:8000", "192.0.2.2 192.0.2.2:8001"),
        ("2001:db8::2", "[2001:db8::2] [2001:DB8:0::2]:8000", "[2001:db8::3]"),
        ("[2001:db8::2]", "[2001:db8::2]:8000", "[2001:db8::3]"),
        ("[2001:db8::2]:8000", "[2001:db8::2]:8000", "[2001:db8::2]:8001"),
        (
            "corp.example",
            "corp.example a.corp.example A.CORP.Example:8 corp.example.",
            "acorp.example corp.org",
        ),
        (".corp.example", "corp.example a.corp.example", "acorp.example"),
        ("*.corp.example", "a.corp.example", "acorp.example"),
        ("CORP.Example", "a.corp.example", "other.example"),
        ("corp.example:80", "corp.example a.corp.example:80", "corp.example:8000"),
        ("corp.example:443", "", "corp.example"),
        ("*", "10.1.2.3 judge.example [2001:db8::2]:1", ""),
        ("a.example,*", "judge.example", ""),
        ("a.example , 10.0.0.0/8 b.example", "a.example 10.1.2.3 b.example", "c.example"),
        (".", "", "judge.example"),
        (",", "", "judge.example"),
    ],
)
def test_what_no_proxy_lists_is_asked_directly(
    name: str, entry: str, direct: str, by_proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, entry)
    for host in direct.split():
        assert proxy_of(f"http://{host}/score") is None, host
    for host in by_proxy.split():
        assert proxy_of(f"http://{host}/score") == PROXY, host


@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_every_client_passes_proxies_by_for_the_hosts_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "corp.example, other.example")
    bypass_proxies(["192.0.2.2", "2001:db8::2"])
    bypass_proxies(["192.0.2.3", "192.0.2.2"])
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    hosts = os.environ["no_proxy"].split(",")
    assert len(set(hosts)) == len(hosts)
    for host in ("127.0.0.1", "192.0.2.2", "192.0.2.3", "[2001:db8::2]", "a.corp.example", "other.example"):
        assert proxy_of(f"http://{host}:30000/generate") is None
        assert not requests.utils.get_environ_proxies(f"http://{host}:30000/generate", no_proxy=None), host
    assert proxy_of("http://judge.example/score") == PROXY
    httpx.Client(trust_env=True).close()  # which fails at what it cannot read


def test_a_run_without_any_proxy_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    bypass_proxies(["192.0.2.2"])
    assert os.environ["no_proxy"] == "*"
    assert "NO_PROXY" not in os.environ


def test_post_asks_the_world_through_the_proxy_and_the_runs_own_servers_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own are those that it has a key of or counts the requests to, and those that a hook's process is told of."""
    proxy = RecordingProxy()
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
    own = ["http://192.0.2.2:9", "http://192.0.2.3:9", "http://192.0.2.4:9"]
    http().add_api_keys({own[0]: "key"})
    http().limit_posts(own[1], asyncio.Lock)
    monkeypatch.setenv("SLIME_ROUTER_URL", own[2])
    asked: list[str | None] = []

    async def send(*_: Any, proxy: str | None, **kwargs: Any) -> None:
        asked.append(proxy)

    async def scenario() -> None:
        with pytest.raises(RequestError, match="status 502"):
            await post("http://judge.example/score", {"n": 1}, max_retries=0)
        monkeypatch.setattr(http(), "send", send)
        for url in own:
            await post(f"{url}/generate", {})
        await http().close()

    asyncio.run(scenario())
    assert asked == [None] * 3
    assert proxy.close() == ["POST http://judge.example/score HTTP/1.1"]
