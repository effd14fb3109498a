"""What tools/validate_model.py makes of how its runs end, and of flags with which none would begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import shipped
from tools import quickstart, validate_model
from tools.validation.launches import Launcher, Run

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["ValueError: no kernel"], "ValueError: no kernel"),
        (["ValueError: no kernel", "going down"], "ValueError: no kernel"),
        (
            ["    assert scaling is not None", "    ^^^^", "AssertionError"],
            "AssertionError of `assert scaling is not None`",
        ),
        (["going down"], None),
    ],
)
def test_the_cause_is_the_error_and_the_exception_behind_it(tmp_path: Path, lines: list[str], why: str | None) -> None:
    error = "train.py: error: engine 0 ended with status 1"
    (tmp_path / "log").write_text("\n".join(["$ x", error, "last lines of engine_0.log:", *lines, ""]))
    found = Run("x", tmp_path, tmp_path / "log", 1, 1.0).why()
    assert found == ": ".join(["status 1", error, *filter(None, [why])])


def test_a_run_at_its_deadline_is_ended_and_names_the_flag(tmp_path: Path) -> None:
    run = Launcher(tmp_path, 0.5).run("slow", "-c", ["import time; print('going', flush=True); time.sleep(60)"])
    assert run.status is None
    assert run.seconds < 30
    assert "--launch-timeout" in run.why()
    assert run.log.read_text().startswith("$ ")


def test_a_child_that_does_not_end_when_told_is_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "_STOP_S", 0.5)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        quickstart.end(process)
        assert process.returncode == -9


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--x 1", "train.py: error: unknown flag --x"),
        ("--seed one", "train.py: error: argument --seed: invalid int value: 'one'"),
        ("--seed '1", "error: --flags=--seed '1: No closing quotation"),
    ],
)
def test_flags_that_train_py_refuses_end_it_before_it_writes(
    flags: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(shipped.CONFIGS / "qwen3-4B"), "--tiny", "--output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as done:
        validate_model.main([*words, f"--flags={flags}"])
    assert done.value.code == 2
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
