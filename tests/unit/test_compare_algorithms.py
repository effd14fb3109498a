"""tools/compare_algorithms.py stopped, and called again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import shipped
from tests.waiting import wait_for
from tools import compare_algorithms, quickstart

NUM_GPUS = 0
STOPS: list[BaseException] = [KeyboardInterrupt(), SystemExit(143), quickstart.QuickstartError("late")]


class Commands:
    """In place of `Phases.run`: makes what the commands would make, but for those in which it is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
        self.stops: dict[str, BaseException] = {}
        self.begun: list[str] = []
        self._output = output
        monkeypatch.setattr(quickstart.Phases, "run", lambda phases, command, *_, **__: self._run(command))

    def _run(self, command: list[str]) -> str:
        tool = Path(command[1]).stem
        self.begun.append(tool)
        if tool == "score_arithmetic":
            return f'{{"model": "{self._output}/sft/hf_3", "accuracy": 0.4, "well_formed": 1.0}}'
        names = {"make_tiny_model": "model", "make_arithmetic_data": "data", "run-quickstart-sft": "sft/hf_3"}
        made = self._output / names[tool]
        made.mkdir(parents=True)
        (made / "config.json").write_text("whole")
        if tool in self.stops:
            raise self.stops.pop(tool)
        return ""


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("tool", ["make_arithmetic_data", "run-quickstart-sft"])
def test_a_warm_up_that_was_stopped_begins_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, stop: BaseException
) -> None:
    commands = Commands(monkeypatch, tmp_path)
    commands.stops[tool] = stop
    with pytest.raises(type(stop)):
        compare_algorithms.warm_up(tmp_path, 0)
    commands.begun.clear()
    compare_algorithms.warm_up(tmp_path, 0)
    assert commands.begun == ["make_tiny_model", "make_arithmetic_data", "run-quickstart-sft", "score_arithmetic"]
    assert (tmp_path / "sft" / "hf" / "config.json").read_text() == "whole"
    commands.begun.clear()
    compare_algorithms.warm_up(tmp_path, 0)
    assert not commands.begun, "it is there"


def test_a_warm_up_stopped_while_it_copies_is_not_taken_for_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = Commands(monkeypatch, tmp_path)

    def cut(source: Any, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("wh")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", cut)
        with pytest.raises(KeyboardInterrupt):
            compare_algorithms.warm_up(tmp_path, 0)
    commands.begun.clear()
    compare_algorithms.warm_up(tmp_path, 0)
    assert commands.begun
    assert (tmp_path / "sft" / "hf" / "config.json").read_text() == "whole"


def test_what_is_the_users_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands(monkeypatch, tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(quickstart.QuickstartError, match=r"thesis\.tex"):
        compare_algorithms.warm_up(tmp_path, 0)
    assert not commands.begun
    assert (tmp_path / "thesis.tex").read_text() == "mine"


STOPPED = """
import sys
from pathlib import Path
from tools import compare_algorithms
from tools.quickstart import Phases

def train(output, name, *_):
    note = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
    Phases(600).run([sys.executable, "-c", note, str(output.parent / name)])

compare_algorithms.warm_up = lambda output, seed: None
compare_algorithms.train = train
compare_algorithms.main()
"""


def test_a_signal_ends_the_runs_under_way_and_begins_no_other(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path), "--algorithms", "grpo", "gspo", "rloo", "--seeds", "0", "--jobs", "2"]
    program = subprocess.Popen([sys.executable, "-c", STOPPED, *words], cwd=shipped.ROOT, stderr=subprocess.DEVNULL)
    try:
        pids = [tmp_path / "grpo", tmp_path / "gspo"]
        wait_for(lambda: all(file.exists() and file.read_text() for file in pids), "the runs")
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM
        for file in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(int(file.read_text()), 0)
        assert not (tmp_path / "rloo").exists()
    finally:
        program.kill()
        program.wait(60)
