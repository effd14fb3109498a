"""Starting an engine with a stand-in for its server: ports of attempts, flags, environment, the nodes that it has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime.backends.sglang import engine as engine_module
from slime.backends.sglang.engine import Engine, EngineError, ExitInfo
from slime.fleet import actors, engines, placement
from slime.fleet.placement import Placement, Slot
from slime.fleet.spec import Fleet
from slime.ray.engine_actor import EnginePlan
from slime.ray.supervision import InputError
from tests.small_fleet import entry

NUM_GPUS = 0


class FakeProcess:
    """A server that ends at once, as one does whose port is taken."""

    commands: ClassVar[list[list[str]]] = []
    made: ClassVar[list[FakeProcess]] = []

    status: ClassVar[int | None] = 1

    def __init__(
        self, command: list[str], env: dict[str, str], log_path: Path, secrets: Any = (), held: bool = False, **_: Any
    ) -> None:
        self.commands.append(command)
        self.made.append(self)
        self.held = held

    def let_go(self) -> None:
        assert self.held
        self.held = False

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def poll(self) -> int | None:
        return self.status

    def tail(self, lines: int) -> str:
        return "OSError: [Errno 98] Address already in use"


class FakeNodes:
    """The servers of an engine's other nodes."""

    def __init__(self, *ends: list[ExitInfo]) -> None:
        self.meetings: list[str] = []
        self.stops = 0
        self._ends = list(ends)

    def start(self, meeting: str) -> None:
        self.meetings.append(meeting)

    def ends(self) -> list[ExitInfo]:
        """The next of those given, the last one again and again."""
        return self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]

    def stop(self) -> None:
        self.stops += 1


def make_engine(tmp_path: Path, *sglang_cli: str, ranks: int = 1, **nodes: Any) -> Engine:
    args = Namespace(
        hf_checkpoint="m",
        rollout_num_gpus_per_engine=ranks,
        params_dtype="float32",
        seed=1,
        sglang_cli=list(sglang_cli),
        engine_start_timeout=10.0,
        random_weights=False,
        lora_sync="merged",
        offload_rollout=False,
        pushes_float8=False,
        worker_type="regular",
        keeps_weights=False,
        returns_routes=False,
        true_on_policy_mode=False,
        deterministic_mode=False,
    )
    return Engine(args, 0, "127.0.0.1", None, tmp_path / "log", None, **nodes)


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_every_attempt_has_ports_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ServerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "commands", [])
    with pytest.raises(EngineError, match="Address already in use"):
        make_engine(tmp_path).start()
    ports = [flag(command, name) for command in FakeProcess.commands for name in ("--port", "--nccl-port")]
    assert len(ports) == 6
    assert len(set(ports)) == 6


def test_a_prepared_server_has_its_ports_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `start`; further attempts wait for nothing."""
    monkeypatch.setattr(engine_module, "ServerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "commands", commands := [])
    monkeypatch.setattr(FakeProcess, "made", made := [])
    engine = make_engine(tmp_path)
    engine.prepare()
    assert [process.held for process in made] == [True]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(flag(commands[0], "--port"))))
    with pytest.raises(EngineError, match="Address already in use"):
        engine.start()
    assert [process.held for process in made] == [False] * 3
    across = make_engine(tmp_path, ranks=4, num_nodes=2)
    across.prepare()
    assert len(commands) == 3


def test_dp_attention_gets_a_block_of_ports(tmp_path: Path) -> None:
    engines = [make_engine(tmp_path, "--enable-dp-attention") for _ in range(2)]
    blocks = []
    for engine in engines:
        meeting = engine._meeting_point()
        assert meeting is not None
        assert flag(engine._command(1, 2, meeting), "--dist-init-addr") == meeting
        host, port = meeting.split(":")
        assert host == "127.0.0.1"
        # SGLang's PortArgs takes those from the port itself to the sixth after it, its controller the 13th.
        blocks.append(set(range(int(port), int(port) + 14)))
    assert not blocks[0] & blocks[1]
    for engine in engines:
        engine.stop()
    engine = make_engine(tmp_path)
    assert engine._meeting_point() is None
    assert "--dist-init-addr" not in engine._command(1, 2)


def test_an_engine_over_nodes_has_a_server_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ServerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "commands", [])
    first, second = (make_engine(tmp_path, ranks=4, node=node, num_nodes=2) for node in range(2))
    meeting = first._meeting_point()
    assert meeting is not None
    first.join(meeting)
    second.join(meeting)
    for node, command in enumerate(FakeProcess.commands):
        assert [flag(command, name) for name in ("--tp-size", "--nnodes", "--node-rank")] == ["4", "2", str(node)]
        assert flag(command, "--dist-init-addr") == meeting
    assert len({flag(command, "--port") for command in FakeProcess.commands}) == 2
    # SGLang wants cores for the ranks of all nodes, on each.
    assert first._environment()["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 3
    first.stop()
    second.stop()


@pytest.mark.parametrize(("width", "nodes"), [(1, [1]), (2, [2]), (4, [2, 2])])
def test_an_engine_has_an_actor_on_the_first_slot_of_each_of_its_nodes(
    width: int, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[EnginePlan] = []
    created = Namespace(options=lambda **options: Namespace(remote=plans.append))
    monkeypatch.setattr(actors, "as_actor", lambda cls, **threads: created)
    monkeypatch.setattr(Placement, "options", lambda self, slot, trains: {"bundle": slot.bundle})
    slots = [Slot(9 - i, f"10.0.0.{i // 2}", str(i % 2)) for i in range(4)]
    spec = entry(count=4 // width, width=width, per_node=2)
    args = Namespace(offload_rollout=None, use_rollout_routing_replay=False)
    supervisor = Namespace(watch=lambda *_: None)
    engines.Engines(args, supervisor).create(Fleet(0, (spec,)), Placement(slots, [], [slots]))  # type: ignore[arg-type]
    assert [plan.name for plan in plans] == ["engine"] * (4 // width)
    assert [plan.rank for plan in plans] == list(range(4 // width))
    assert [[len(node.gpus or []) for node in plan.nodes] for plan in plans] == [nodes] * (4 // width)
    firsts = [node.options["bundle"] for plan in plans for node in plan.nodes]
    assert firsts == [9 - i for i in range(0, 4, min(width, 2))]


def test_a_server_does_not_cross_hosts() -> None:
    slots = [Slot(i, f"10.0.0.{1 + i // 2}", None) for i in range(4)]
    for width, per_node in ((1, 8), (2, 8), (4, 2), (4, 1)):
        placement._check_engines(slots, entry(width=width, per_node=per_node))
    with pytest.raises(InputError, match=r"placement: engine 0 of 4 slots would lie on the hosts 10\.0\.0\.1, 10"):
        placement._check_engines(slots, entry(width=4))
    with pytest.raises(InputError, match=r"2 slots of engine 0 of 4 slots .* --rollout-num-gpus-per-engine"):
        placement._check_engines([slots[0], *slots], entry(width=4, per_node=2))


def test_a_start_that_fails_ends_the_servers_of_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ServerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "status", None)
    others = FakeNodes([ExitInfo(1.0, "engine 0 node 1 ended with status 1: Address already in use")])
    monkeypatch.setattr(engine_module, "_FOLLOW_S", 0.0)
    with pytest.raises(EngineError, match=r"^engine 0 node 1 ended"):
        make_engine(tmp_path, num_nodes=2, others=others).start()
    assert len(set(others.meetings)) == 3
    assert others.stops == 3


def test_the_server_that_ended_first_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ServerProcess", FakeProcess)
    late, early = ExitInfo(9e12, "node 2"), ExitInfo(1.0, "node 1", hangs=True)
    engine = make_engine(tmp_path, num_nodes=3, others=FakeNodes([], [], [late], [late, early]))
    assert engine.end() is None
    monkeypatch.setattr(FakeProcess, "status", None)
    engine.join("127.0.0.1:1")
    assert engine.end() is None
    monkeypatch.setattr(FakeProcess, "status", 137)
    end = engine.end()
    assert end is not None
    lines = end.message.splitlines()
    assert (lines[0], lines[-1], end.hangs) == ("node 1", "node 2", True)
    assert lines[1].startswith("engine 0 node 0 at http://127.0.0.1")
    assert lines[1].endswith("ended with status 137 (signal 9)")


def test_colocated_ranks_do_not_compare_their_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    monkeypatch.delenv(name, raising=False)
    assert make_engine(tmp_path)._environment()[name] == "false"
    monkeypatch.setenv(name, "true")
    assert make_engine(tmp_path)._environment()[name] == "true"


@pytest.mark.parametrize(
    ("algorithm", "sleeps", "pushes", "keeps"),
    [
        ("EAGLE3", True, set(), True),
        ("EAGLE", True, {"pushes_heads"}, False),
        ("EAGLE", True, {"pushes_heads", "pushes_float8"}, True),
        ("EAGLE", False, set(), False),
        (None, True, set(), False),
    ],
)
def test_what_an_engine_drafts_by_outlives_its_sleep(
    tmp_path: Path, algorithm: str | None, sleeps: bool, pushes: set[str], keeps: bool
) -> None:
    """SGLang keeps a draft model's weights only when told to, and only what is pushed comes anew."""
    engine = make_engine(tmp_path)
    engine._cuda_devices = ["0"]
    own = {"offload_rollout": sleeps, "sglang_speculative_algorithm": algorithm}
    vars(engine._args).update(own, **{name: name in pushes for name in ("pushes_heads", "pushes_float8")})
    command = engine._command(1, 2)
    assert ("--enable-draft-weights-cpu-backup" in command) == keeps
    assert ("--enable-memory-saver" in command) == sleeps


def test_a_server_knows_that_it_will_be_pushed_float8(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert "SLIME_ENGINE_TAKES_FLOAT8" not in engine._environment()
    engine._args.pushes_float8 = True
    assert engine._environment()["SLIME_ENGINE_TAKES_FLOAT8"] == "1"


TWO_CHILDREN = """
import signal, subprocess
from slime.backends.sglang import fixes
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background jobs ignore it; SGLang has a handler
first, second = (subprocess.Popen(["sleep", "300"]) for _ in range(2))
second.kill()
fixes.end_with_any_of([first.pid, second.pid])
first.wait(60)
"""


def test_the_server_of_a_further_node_ends_with_any_of_its_schedulers(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TWO_CHILDREN]
    server = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.wait(60) == -signal.SIGQUIT
    finally:
        os.killpg(server.pid, signal.SIGKILL)
    assert server.stderr is not None
    assert "a scheduler has ended" in server.stderr.read()
