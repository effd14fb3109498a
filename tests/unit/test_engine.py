"""Starting an engine with a stand-in for its server: ports of attempts, flags, environment."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime.backends.sglang import engine as engine_module
from slime.backends.sglang.engine import Engine, EngineError

NUM_GPUS = 0


class FakeProcess:
    """A server that ends at once, as one does whose port is taken."""

    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], env: dict[str, str], log_path: Path, **options: Any) -> None:
        self.commands.append(command)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def poll(self) -> int:
        return 1

    def tail(self, lines: int) -> str:
        return "OSError: [Errno 98] Address already in use"


def make_engine(tmp_path: Path, *sglang_cli: str) -> Engine:
    args = Namespace(
        hf_checkpoint="m",
        rollout_num_gpus_per_engine=1,
        params_dtype="float32",
        seed=1,
        sglang_cli=list(sglang_cli),
        engine_start_timeout=10.0,
        random_weights=False,
        lora_sync="merged",
        offload_rollout=False,
        pushes_float8=False,
    )
    return Engine(args, 0, "127.0.0.1", None, tmp_path / "log", None)


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


def test_dp_attention_gets_a_block_of_ports(tmp_path: Path) -> None:
    engines = [make_engine(tmp_path, "--enable-dp-attention") for _ in range(2)]
    blocks = []
    for engine in engines:
        command = engine._command(1, 2)
        host, port = flag(command, "--dist-init-addr").split(":")
        assert host == "127.0.0.1"
        # SGLang's PortArgs takes those from the port itself to the sixth after it.
        blocks.append(set(range(int(port), int(port) + 7)))
    assert not blocks[0] & blocks[1]
    for engine in engines:
        engine.stop()
    assert "--dist-init-addr" not in make_engine(tmp_path)._command(1, 2)


def test_colocated_ranks_do_not_compare_their_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    monkeypatch.delenv(name, raising=False)
    assert make_engine(tmp_path)._environment()[name] == "false"
    monkeypatch.setenv(name, "true")
    assert make_engine(tmp_path)._environment()[name] == "true"


@pytest.mark.parametrize(
    ("algorithm", "sleeps", "pushes_heads", "keeps"),
    [
        ("EAGLE3", True, False, True),
        ("EAGLE", True, True, False),
        ("EAGLE", False, False, False),
        (None, True, False, False),
    ],
)
def test_what_an_engine_drafts_by_outlives_its_sleep(
    tmp_path: Path, algorithm: str | None, sleeps: bool, pushes_heads: bool, keeps: bool
) -> None:
    """SGLang keeps a draft model's weights only when told to, and only what is pushed comes anew."""
    engine = make_engine(tmp_path)
    engine._cuda_devices = ["0"]
    own = {"offload_rollout": sleeps, "sglang_speculative_algorithm": algorithm, "pushes_heads": pushes_heads}
    vars(engine._args).update(own)
    command = engine._command(1, 2)
    assert ("--enable-draft-weights-cpu-backup" in command) == keeps
    assert ("--enable-memory-saver" in command) == sleeps


def test_a_server_knows_that_it_will_be_pushed_float8(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert "SLIME_ENGINE_TAKES_FLOAT8" not in engine._environment()
    engine._args.pushes_float8 = True
    assert engine._environment()["SLIME_ENGINE_TAKES_FLOAT8"] == "1"
