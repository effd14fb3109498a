"""examples/agent_tool_use/compare.py: what is run once, and what its figures come to."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from examples.agent_tool_use import compare
from tools.quickstart import Phases

NUM_GPUS = 0


class Commands:
    """In place of `Phases.run`: makes what run.sh would make; the control stays where it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, learnt: float = 0.9) -> None:
        self.begun: list[tuple[str, str, bool]] = []
        self._learnt = learnt
        monkeypatch.setattr(Phases, "run", lambda phases, *words, **named: self._run(*words))

    def _run(self, command: list[str], env: dict[str, str]) -> str:
        output, warms_up = Path(env["OUTPUT_DIR"]), command[-1] == "--dry-run"
        self.begun.append((env["SEED"], env.get("RANDOM_REWARDS", ""), warms_up))
        if warms_up:
            (output / "sft" / "hf").mkdir(parents=True)
            return ""
        assert Path(env["HF_CHECKPOINT"]).is_dir()
        assert env["EVAL_DATA"] == str(output.parent / "data" / "eval.jsonl")
        (output / "grpo").mkdir()
        after = 0.4 if env["RANDOM_REWARDS"] == "1" else self._learnt
        lines = [{"eval/step": 0, "eval/agent_tool_use": 0.4}, {"rollout/step": 0}]
        lines += [{"eval/step": 10, "eval/agent_tool_use": after}]
        (output / "grpo" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return ""


def main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    before = signal.getsignal(signal.SIGTERM)
    try:
        compare.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_each_seed_is_warmed_up_once_and_no_run_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, words = Commands(monkeypatch), ["--output-dir", str(tmp_path), "--seeds", "3", "5", "--jobs", "2"]
    main(monkeypatch, *words)
    expected = [(seed, *what) for seed in "35" for what in (("", True), ("0", False), ("1", False))]
    assert sorted(commands.begun) == sorted(expected)
    told = capsys.readouterr().out
    assert "| rewards | 0.400 -> 0.900 | 0.400 -> 0.900 |" in told
    assert "| random rewards | 0.400 -> 0.400 | 0.400 -> 0.400 |" in told
    assert "| above the control | +0.500 | +0.500 |" in told
    commands.begun.clear()
    main(monkeypatch, *words, "--plot", str(tmp_path / "curves.png"))
    assert not commands.begun
    assert (tmp_path / "curves.png").stat().st_size > 1000
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"run": "random rewards", "seed": 5, "rollouts": 10, "success": 0.4}
    assert len(lines) == 8
    main(monkeypatch, "--output-dir", str(tmp_path), "--no-runs")
    assert "| above the control | +0.500 | +0.500 |" in capsys.readouterr().out


def test_success_that_is_not_far_above_the_control_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Commands(monkeypatch, learnt=0.59)
    with pytest.raises(SystemExit, match=r"less than \+0\.20 above the control: seed 3: \+0\.190"):
        main(monkeypatch, "--output-dir", str(tmp_path), "--seeds", "3")
