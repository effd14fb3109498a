"""The report of tools/validate_model.py claims no more than ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.validation.levels import LEVELS
from tools.validation.report import EXIT, Check, Item, LevelResult, Report, Status, checked

NUM_GPUS = 0

PASS, FAIL, SKIPPED, BLOCKED = Status


def report(tmp_path: Path, *levels: tuple[int, list[Item]], requested: Sequence[int] | None = None) -> Report:
    titles = {number: level.title for number, level in LEVELS.items()}
    made = Report("a model", tuple(requested or [number for number, _ in levels]), tmp_path, titles)
    made.levels = [LevelResult(number, tuple(items)) for number, items in levels]
    return made


@pytest.mark.parametrize(
    ("levels", "requested", "result"),
    [
        ([(0, [Item("loop", PASS, "")])], [0], PASS),
        ([(2, [Item("tensor 2", PASS, ""), Item("expert 2", SKIPPED, "no experts")])], [2], PASS),
        ([(0, [Item("loop", PASS, "")])], [0, 1], BLOCKED),
        ([(0, [Item("loop", PASS, "")]), (3, [Item("FSDP", SKIPPED, "none")])], [0, 3], BLOCKED),
        ([(0, [Item("loop", BLOCKED, ""), Item("training", PASS, "")])], [0], BLOCKED),
        ([(0, [Item("loop", BLOCKED, ""), Item("training", FAIL, "")])], [0], FAIL),
        ([], [0], BLOCKED),
    ],
)
def test_the_result_is_pass_only_if_every_level_passed(
    tmp_path: Path, levels: list[tuple[int, list[Item]]], requested: list[int], result: Status
) -> None:
    made = report(tmp_path, *levels, requested=requested)
    assert made.result is result
    assert made.text().startswith(f"Result: {result.value} - ")
    assert EXIT[result] == {PASS: 0, FAIL: 1, BLOCKED: 3}[result]


def test_what_did_not_fit_here_is_not_said_to_have_passed(tmp_path: Path) -> None:
    def sentence(left_out: bool) -> str:
        skipped = Item("pipeline 2", SKIPPED, "takes 2", left_out=left_out)
        made = report(tmp_path, (2, [Item("tensor 2", PASS, ""), skipped]))
        assert made.result is PASS
        return made.text()

    assert sentence(False).startswith("Result: Pass - every part that applies passed: level 2, tensor 2\n")
    text = sentence(True)
    assert text.startswith(
        "Result: Pass - passed: level 2, tensor 2; not checked here, though it applies: level 2, pipeline 2\n"
    )
    assert "  - pipeline 2: Skipped - does not fit here: takes 2\n" in text
    assert text.endswith("Follow-ups:\n- run where it fits: level 2, pipeline 2\n")


def test_what_is_of_no_level_fails_the_whole(tmp_path: Path) -> None:
    made = report(tmp_path, (0, [Item("loop", PASS, "")]))
    made.preliminary.append(Item("Local checkout import", FAIL, "slime is elsewhere"))
    assert made.result is FAIL
    made.preliminary, made.log_capture = [], Item("Log capture", FAIL, "no log")
    text = made.text()
    assert text.startswith("Result: Fail - failed: Log capture; passed: level 0, loop\n")
    assert text.endswith("Follow-ups:\n- Log capture: find the cause, run again\n")


def test_a_level_that_did_not_run_says_why(tmp_path: Path) -> None:
    made = report(tmp_path, (1, [Item("loop", PASS, "")]), requested=[1, 5])
    lines = made.text().splitlines()
    assert lines[0] == "Result: Blocked - not run: level 5; passed: level 1, loop"
    assert [line for line in lines if line.startswith("- Level ")] == [
        "- Level 0, LoRA + DDP smoke: Not requested",
        "- Level 1, save/resume: Pass",
        "- Level 2, parallel stress: Not requested",
        "- Level 3, FSDP variant: Not requested",
        "- Level 4, architecture-specific: Not requested",
        "- Level 5, learning signal: Skipped - the program had not come to it",
    ]


def test_the_text_has_every_part_with_its_reason_and_its_log(tmp_path: Path) -> None:
    items = [Item("loop", BLOCKED, "no engine", tmp_path / "a" / "log"), Item("training", PASS, "1 step")]
    made = report(tmp_path, (0, items), (3, [Item("FSDP", SKIPPED, "there is none")]))
    made.evidence, made.limitations = [("Command", "x")], ["toy data"]
    made.log_capture, made.key_lines = Item("Log capture", PASS, "out: a log"), [("level_0_loop", "ok, 3 s")]
    lines = made.text().splitlines()
    assert lines[0].startswith(
        "Result: Blocked - could not run here, which is not evidence against the model's support: level 0"
    )
    assert lines[0].endswith("; not run: level 3; passed: level 0, training")
    assert lines[1:4] == ["Requested coverage: Level 0/3", "Model: a model", "Deliverables:"]
    assert lines[4:] == [
        "- Level 0, LoRA + DDP smoke: Blocked",
        "  - loop: Blocked - no engine [a/log]",
        "  - training: Pass - 1 step",
        "- Level 1, save/resume: Not requested",
        "- Level 2, parallel stress: Not requested",
        "- Level 3, FSDP variant: Skipped",
        "  - FSDP: Skipped - there is none",
        "- Level 4, architecture-specific: Not requested",
        "- Level 5, learning signal: Not requested",
        "- Log capture: Pass - out: a log",
        "Evidence:",
        "- Command: x",
        "- Key lines:",
        "  - level_0_loop: ok, 3 s",
        "Limitations:",
        "- toy data",
        "Follow-ups:",
        "- level 0, loop: run where nothing blocks it",
    ]


def test_one_wrong_figure_fails_a_part() -> None:
    item = checked("x", [Check("a is 1", True), Check("b is 3", False)], None)
    assert (item.status, item.text) == (FAIL, "not so: b is 3")
