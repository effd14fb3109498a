"""examples/*/run.sh: a signal to the script reaches train.py, and what the script started ends with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shipped
from tests.recorder import run, write_recorder
from tests.waiting import wait_for

NUM_GPUS = 0
WITH_DATA = ["retool", "multi_agent", "search-r1"]
AGENTS = ["coding_agent_rl", "tau-bench", "strands_sglang", "agent_tool_use"]
"""Whose tiny model's chat template knows tools."""
STANDS_IN = f"""#!{sys.executable} -S
import os, signal, sys, time
what = "train" if sys.argv[1].endswith("/train.py") else "server"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
open(os.path.join(os.environ["PIDS"], what), "w").write(str(os.getpid()))
if what == os.environ.get("ENDS"):
    sys.exit(3)
print("it listens", flush=True)
time.sleep(300)
"""
"""In place of python3: writes its process id down, and stays until it is told to end, but for what ENDS names."""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """The directory of process ids; whoever is left is killed."""
    (tmp_path / "python").write_text(STANDS_IN)
    (tmp_path / "python").chmod(0o755)
    directory = tmp_path / "pids"
    directory.mkdir()
    yield directory
    for file in directory.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def environment_of(pids: Path) -> dict[str, str]:
    python, output = pids.parent / "python", pids.parent
    given = {"PYTHON": str(python), "PIDS": str(pids), "HF_CHECKPOINT": "model", "OUTPUT_DIR": str(output)}
    return given | {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize("name", [*WITH_DATA, *AGENTS, "reproducibility", "train_infer_mismatch_helper"])
def test_a_dry_run_checks_warm_up_and_run_and_starts_nothing(name: str, tmp_path: Path) -> None:
    write_recorder(tmp_path)
    script = shipped.ROOT / "examples" / name / "run.sh"
    ran, commands = run(str(script), tmp_path, tmp_path / "record", "--lr", "1", DRY_RUN="1", OUTPUT_DIR="out")
    assert ran.returncode == 0, ran.stderr
    made, data, warm_up, grpo = commands
    tools = ["--tools"] if name in AGENTS else []
    assert made == ["tools/make_tiny_model.py", "out/model", "--overwrite", "--seed", "0", *tools]
    maker = ["-m", f"examples.{name}.make_data"] if name in [*WITH_DATA, *AGENTS] else ["tools/make_arithmetic_data.py"]
    assert data == [*maker, "out/data", "--seed", "0"]
    driver = "train_async.py" if name == "train_infer_mismatch_helper" else "train.py"
    for command, run_dir, program in ((warm_up, "out/sft", "train.py"), (grpo, "out/grpo", driver)):
        assert command[:3] == [f"{shipped.ROOT}/{program}", "--hf-checkpoint", "out/model"]
        assert command[command.index("--run-dir") + 1] == run_dir
    assert warm_up[-1] == grpo[-1] == "--dry-run"
    further = len(grpo) - 1 - grpo[::-1].index("--lr")
    assert grpo[further : further + 2] == ["--lr", "1"], "what is given last wins"
    assert name == "reproducibility" or grpo[further + 2 :] == ["--dry-run"]


def test_the_control_is_the_same_run_with_random_rewards(tmp_path: Path) -> None:
    write_recorder(tmp_path)
    script, record = shipped.ROOT / "examples" / "agent_tool_use" / "run.sh", tmp_path / "record"
    runs = []
    for value in ("0", "1"):
        ran, commands = run(
            str(script), tmp_path, record, HF_CHECKPOINT="model", OUTPUT_DIR="out", RANDOM_REWARDS=value
        )
        assert ran.returncode == 0, ran.stderr
        runs.append(commands[-1])
    true, control = runs
    hook = ["--custom-reward-post-process-path", "examples.agent_tool_use.agent.random_rewards"]
    where = control.index(hook[0])
    assert control == [*true[:where], *hook, *true[where:]]


def command_of(name: str) -> list[str]:
    return ["bash", str(shipped.ROOT / "examples" / name / "run.sh")]


@pytest.mark.parametrize("name", [*WITH_DATA, "reproducibility", "coding_agent_rl", "tau-bench"])
def test_the_script_becomes_the_run_and_leaves_nobody(name: str, pids: Path) -> None:
    script = subprocess.Popen(command_of(name), env=environment_of(pids))
    parts = ["train", "server"] if name == "search-r1" else ["train"]
    wait_for(lambda: all((pids / part).exists() and (pids / part).read_text() for part in parts), "the start")
    script.terminate()
    assert script.wait(60) == 7, "train.py's own status"
    wait_for(lambda: not any(is_alive(int((pids / part).read_text())) for part in parts), "the end")


def test_without_its_package_the_agents_script_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no module >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    given = {"PYTHON": str(tmp_path / "python"), "PATH": os.environ["PATH"], "OUTPUT_DIR": str(tmp_path / "out")}
    ended = subprocess.run(command_of("strands_sglang"), env=given, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch(r"launch: error: .*python has no strands-agents: .*README.md says .*\n", ended.stderr)
    assert not (tmp_path / "out").exists()


def test_without_its_search_server_there_is_no_run(pids: Path) -> None:
    environment = environment_of(pids) | {"ENDS": "server", "SEARCH_PORT": "18765"}
    ended = subprocess.run(command_of("search-r1"), env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(r"launch: error: the search server did not come up on port 18765 .*\n", ended.stderr)
    assert not (pids / "train").exists()
