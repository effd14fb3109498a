"""tools/validate_model.py without its runs: what it prints of them, and how it takes bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_launcher import FakeLauncher, write_steps
from tests.shipped import CONFIGS
from tools import validate_model
from tools.validation import climb
from tools.validation.report import Status
from tools.validation.setting import Setting

NUM_GPUS = 0


def test_a_level_whose_files_are_missing_fails_and_the_next_is_climbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(climb, "Launcher", lambda output, limit_s: FakeLauncher(output))
    words = [
        "--config",
        str(CONFIGS / "qwen3-4B"),
        "--tiny",
        "--levels",
        "0",
        "3",
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert validate_model.main(words) == 1
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "report.txt").read_text()
    assert "  - what the runs wrote: Fail - FileNotFoundError: " in printed
    assert "- Level 3, FSDP variant: Skipped" in printed
    assert "- Level 1, save/resume: Not requested" in printed
    assert f"- Log capture: Pass - {tmp_path / 'out'}: a log for each of 2 runs" in printed
    assert "- Command: python3 tools/validate_model.py --config" in printed
    assert "  - level_0_loop: ok, 1 s\n" in printed


def test_the_key_line_is_of_the_last_step_or_the_cause_of_a_bad_end(tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path, ["level_2_loop"], write_steps)
    words = ["--num-rollout", "2"]
    good, bad = launcher.run("level_2_onerank", "train.py", words), launcher.run("level_2_loop", "train.py", words)
    figures = "train/step 1, train/loss 2, train/grad_norm 0.5, train/train_rollout_logprob_abs_diff 1e-06"
    assert good.key_line() == f"ok, 1 s; {figures}"
    assert bad.key_line() == "status 1: train.py: error: level_2_loop has no kernel, 1 s"


@pytest.mark.parametrize("left", [None, "", "$ train.py\n"])
def test_a_log_is_captured_only_if_the_run_printed_into_it(left: str | None, tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path)
    ladder = Setting(CONFIGS / "qwen3-4B", True, "float32", False, 2, 0, [], launcher)
    runs = [launcher.run(name, "train.py", []) for name in ("level_0_loop", "level_5_sft")]
    assert climb._log_capture(ladder).status is Status.PASS
    if left is None:
        runs[1].log.unlink()
    else:
        runs[1].log.write_text(left)
    item = climb._log_capture(ladder)
    assert (item.status, item.text) == (Status.FAIL, f"{tmp_path}: nothing printed is in the log of level_5_sft")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere"], "there is no"),
        (["--config", str(CONFIGS / "qwen3-4B"), "--tiny", "--output-dir", "OUTPUT"], "is not empty"),
        (["--config", str(CONFIGS), "--tiny"], f"{CONFIGS}: there is no config.json in it"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert validate_model.main([str(tmp_path) if word == "OUTPUT" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
