"""The Ray that a run starts or joins, and how its slots are placed."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services, worker

from slime.driver.rollout_manager import RolloutManager
from slime.fleet import placement
from slime.fleet.placement import Slot, describe_placement
from slime.ray import cluster
from slime.ray.engine_actor import EngineActor, NodeActor
from slime.ray.supervision import InputError, RunError
from slime.ray.train_actor import TrainActor
from slime.utils import device
from tests.small_fleet import slot_options

NUM_GPUS = 0


@pytest.mark.parametrize("module", ["slime.ray.engine_actor", "slime.backends.sglang.launch_router"])
def test_processes_that_compute_nothing_do_without_torch(module: str) -> None:
    """Which takes seconds of a core each time that a run starts."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_switches_of_the_host_reach_workers_and_secrets_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "eth7", "SGLANG_X_TOKENS": "1"}
    kept = {"CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "secret", "SGLANG_API_KEY": "secret", "SOMETHING": "else"}
    for name, value in (passed | kept).items():
        monkeypatch.setenv(name, value)
    variables = cluster.actor_environment({"NCCL_IB_HCA": "mine"})["env_vars"]
    assert passed | {"NCCL_IB_HCA": "mine"} == {name: variables.get(name) for name in passed}
    assert not kept.keys() & variables.keys()
    assert variables["NCCL_CUMEM_ENABLE"] == "0", "as in SGLang's servers"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert cluster.actor_environment()["env_vars"]["NCCL_CUMEM_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("actor", "watch", "expected"),
    [
        (
            RolloutManager,
            "watch",
            {
                "rollouts": {"generate"},
                "evaluation": {"evaluate"},
                "routers": {"confirm_routers", "open_routers", "serve"},
            },
        ),
        (EngineActor, "watch", {"examination": {"examine"}}),
        (NodeActor, "serve", {}),
        (TrainActor, "watch", {}),
    ],
)
def test_calls_that_take_long_have_threads_of_their_own(actor: type, watch: str, expected: dict[str, set[str]]) -> None:
    """Ray looks for the group of a method beneath whatever wraps it: a decorator would lose it."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    made = cluster.as_actor(actor, **dict.fromkeys(expected, 1))
    for name, group in made.__ray_metadata__.method_meta.concurrency_group_for_methods.items():
        groups[group].add(name)
    assert groups == expected | {"watch": {watch}}


@pytest.mark.parametrize(("is_cuda", "expected"), [(False, 0), (True, None)])
def test_a_local_ray_counts_no_gpu_that_torch_cannot_use(
    is_cuda: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(device, "is_cuda", lambda: is_cuda)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    monkeypatch.setattr(cluster.janitor, "start", lambda: 0)
    cluster.connect(2)
    assert given.get("num_gpus") == expected


@pytest.mark.parametrize(
    ("terminals", "given", "coloured"),
    [({"stdout", "stderr"}, None, True), ({"stdout"}, None, False), ({"stderr"}, None, False), (set(), "1", True)],
)
def test_prefixes_of_workers_lines_are_coloured_on_a_terminal_only(
    terminals: set[str], given: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_COLOR_PREFIX", given or "")
    if given is None:
        monkeypatch.delenv("RAY_COLOR_PREFIX")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(cluster.janitor, "start", lambda: 0)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda name=name: name in terminals)
    cluster.connect(2)
    printed = io.StringIO()
    worker.print_worker_logs({"pid": "7", "lines": ["a line"]}, printed)
    assert ("\x1b" in printed.getvalue()) == coloured


def test_a_local_ray_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster.janitor, "start", lambda: 0)
    with pytest.raises(
        RunError,
        match=r"^start a local Ray: The current node .*This could happen. A machine that is busy .* Ray's own logs are",
    ):
        cluster.connect(2)


def test_a_signal_to_our_process_group_does_not_reach_a_local_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def init(**options: Any) -> None:
        started.append(services.start_ray_process(["sleep", "60"], "raylet", fate_share=True).process)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster.janitor, "start", lambda: 0)
    cluster.connect(2)
    init()
    try:
        assert [os.getpgid(process.pid) == os.getpgid(0) for process in started] == [False, True]
    finally:
        for process in started:
            process.kill()
            process.wait(60)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "http://127.0.0.1:8265",
            "RAY_ADDRESS=http://127.0.0.1:8265: a Ray is joined from one of its hosts, by the HOST:PORT",
        ),
        ("127.0.0.1:{port}", "connect to Ray: RAY_ADDRESS=127.0.0.1:{port} has not answered in 3 s: is it running?"),
        ("nonsense", "connect to Ray: RAY_ADDRESS=nonsense: "),
    ],
)
def test_a_ray_that_is_not_there_is_told_in_one_line(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing listens, and where something else does: `ray.init` would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", address.format(port=port))
        monkeypatch.setattr(cluster, "_ANSWER_S", 3.0 if "{" in address else 60.0)
        with pytest.raises(RunError) as raised:
            cluster.connect(2)
    assert str(raised.value).startswith(message.format(port=port))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("cores", "is_cuda", "address", "expected"),
    [
        (2, False, None, "8 slots share the 2 cores of this host, which has no GPU: fewer may well be faster "),
        (8, False, None, None),
        (2, True, None, None),
        (2, False, "10.0.0.1:6379", None),
    ],
)
def test_more_slots_than_cores_are_warned_of(
    cores: int, is_cuda: bool, address: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(placement.device, "is_cuda", lambda: is_cuda)
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    args = slot_options("colocate", train=8, rollout=8)
    warning = placement.core_shortage(args)
    assert warning == (expected and expected + "(--actor-num-gpus-per-node 8)")
    if warning:
        assert describe_placement(args).endswith(f"warning: {warning}")
        args.placement, args.actor_num_gpus, args.rollout_num_gpus = "disaggregate", 1, 4
        assert str(placement.core_shortage(args)).startswith("5 slots share the 2 cores")
        assert str(placement.core_shortage(args)).endswith("--rollout-num-gpus 4)")
        args.rm_num_gpus = 2
        assert str(placement.core_shortage(args)).startswith("7 slots share the 2 cores")
        assert str(placement.core_shortage(args)).endswith("--rollout-num-gpus 4, --rm-num-gpus 2)")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("colocate", ["training rank 0, engine 0", "training rank 1, engine 0"]),
        ("disaggregate", ["training rank 0", "training rank 1", "engine 0", "engine 0"]),
        ("rollout_only", ["engine 0", "engine 0"]),
    ],
)
def test_the_reward_model_has_the_last_slots_to_itself(kind: str, expected: list[str]) -> None:
    args = slot_options(kind, train=2, rollout=2, reward=2, width=2)
    lines = [line for line in describe_placement(args).splitlines() if line.startswith("  slot")]
    users = [line.split(": ")[1] for line in lines]
    assert users == [*expected, "reward engine 0", "reward engine 1"]
    args.num_gpus_per_node = 1
    assert re.findall(r"\bengine 0 node \d", describe_placement(args)) == ["engine 0 node 0", "engine 0 node 1"]


@pytest.mark.parametrize(
    ("is_cuda", "trained", "served", "refused"),
    [
        (True, "float32", [], True),
        (True, "float32", None, False),
        (True, "float32", ["--dtype", "bfloat16"], False),
        (True, "float32", ["--enable-deterministic-inference"], False),
        (True, "bfloat16", ["--dtype", "float32"], True),
        (True, "bfloat16", [], False),
        (False, "float32", [], False),
    ],
)
def test_engines_on_gpus_compute_in_float32_only_deterministically(
    is_cuda: bool, trained: str, served: list[str] | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: in a deterministic run."""
    monkeypatch.setattr(placement.device, "is_cuda", lambda: is_cuda)
    args = slot_options("colocate", train=1, rollout=1)
    args.params_dtype, args.sglang_cli, args.deterministic_mode = trained, served or [], served is None
    if refused:
        with pytest.raises(InputError, match=r"placement: engines would compute in float32, .* --bf16 instead of"):
            describe_placement(args)
    else:
        assert "engine 0" in describe_placement(args)


def test_servers_without_keys_stay_on_the_drivers_host() -> None:
    here, there = Slot(0, "10.0.0.1", None), Slot(1, "10.0.0.2", None)
    placement._check_loopback([here, here], "10.0.0.1")
    with pytest.raises(InputError, match=r"--no-api-keys .* slots on 10\.0\.0\.2, not only .* host 10\.0\.0\.1"):
        placement._check_loopback([here, there], "10.0.0.1")


def test_rays_token_is_its_owners_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray writes it for all to read; what is there from earlier runs is mended too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    modes: list[int] = []

    def write(**options: Any) -> None:
        modes.append(token.parent.stat().st_mode & 0o777)
        token.write_text("t")
        token.chmod(0o644)

    monkeypatch.setattr(ray, "init", write)
    cluster._init()
    assert modes == [0o700], "nobody reads it before it is mended"
    assert token.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(ray, "init", lambda **options: modes.append(0))
    cluster._init()
    assert modes[1:] == [0]
