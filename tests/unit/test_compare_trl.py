"""tools/compare_trl.py: what it reads of two frameworks' steps, and when it says that they do not compare."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools import compare_trl
from tools.benchmarks import trl_grpo
from tools.compare_trl import Step

NUM_GPUS = 0


def _run(rewards: list[float], *, seconds: float = 1.0, responses: int = 256, length: float = 6.0) -> list[Step]:
    return [Step(seconds, {"generation": 0.5, "training": 0.25}, reward, responses, length) for reward in rewards]


LEARNS = [0.2] * 10 + [0.6] * 10


def test_steps_of_slime_are_whole() -> None:
    """From the end of one to the end of the next, whatever lies between the parts that it times."""
    lines: list[dict[str, Any]] = []
    for step, ended in enumerate((10.0, 11.5, 13.5)):
        lines.append(
            {"rollout/step": step, "time": ended - 0.5, "perf/rollout_time": 0.5 + step, "perf/train_time": 0.2}
        )
        lines.append({"rollout/num_samples": 256.0, "rollout/response_len/mean": 5.5, "rollout/raw_reward": step / 10})
        lines.append({"perf/update_weights_time": 0.05, "time": ended, "perf/step_time": 0.1})
        lines.append({"rollout/push_probe_abs_diff": 0.0, "time": ended + 0.1})
    assert compare_trl.steps_of_slime(map(json.dumps, lines)) == [
        Step(1.5, {"generation": 1.5, "training": 0.2, "push": 0.05}, 0.1, 256, 5.5),
        Step(2.0, {"generation": 2.5, "training": 0.2, "push": 0.05}, 0.2, 256, 5.5),
    ]


def test_steps_of_trl_are_those_after_the_first() -> None:
    told = [{"seconds": n + 0.75, "generation": 0.25, "reward": n / 10, "length": 6.5, "threads": 2} for n in range(3)]
    lines = ["Loading", *(trl_grpo.MARK + json.dumps(step) for step in told), "{'loss': 1}"]
    assert compare_trl.steps_of_trl(lines, 256) == [
        Step(1.75, {"generation": 0.25, "training": 1.5}, 0.1, 256, 6.5),
        Step(2.75, {"generation": 0.25, "training": 2.5}, 0.2, 256, 6.5),
    ]


def test_a_median_is_of_all_turns_after_their_warm_up() -> None:
    slow = _run([0.0] * 5, seconds=9.0)
    runs = [slow + _run([0.0] * 2, seconds=1.0), slow + _run([0.0], seconds=3.0)]
    assert compare_trl.seconds(runs) == {"step": 1.0, "generation": 0.5, "training": 0.25}


def test_the_table_has_the_ratio() -> None:
    rows = compare_trl.table({"step": 0.9, "push": 0.1}, {"step": 0.3}).splitlines()
    assert [row.split()[-4:] for row in rows[1:]] == [["step", "0.900", "0.300", "3.00"], ["push", "0.100", "-", "-"]]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (_run(LEARNS, length=6.3), None),
        (_run(LEARNS, responses=64), "steps of {256} responses by slime, of {64} by TRL"),
        (_run(LEARNS, length=12.0), "responses of 6.00 tokens by slime, of 12.00 by TRL"),
        (_run([0.2] * 20), "TRL has not learnt: its reward rose by +0.000, not +0.03"),
    ],
)
def test_runs_that_do_not_compare_are_told(other: list[Step], problem: str | None) -> None:
    assert compare_trl.problems([_run(LEARNS)], [other]) == ([] if problem is None else [problem])


def test_trls_reward_is_the_quickstarts() -> None:
    answers = ["\\boxed{12}", "\\boxed{13}", "12", "\\boxed{1} \\boxed{12}", "\\boxed{-12}", "\\boxed{}"]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert trl_grpo.reward(completions, label=["12"] * 6) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_both_are_given_the_same(tmp_path: Any) -> None:
    """What TRL is told is in the script that slime is run by."""
    script = (compare_trl.ROOT / "scripts" / "run-quickstart-grpo.sh").read_text()
    told = compare_trl.settings_of(tmp_path, tmp_path, 60)
    flags = {
        "--global-batch-size": told.responses,
        "--n-samples-per-prompt": told.samples_per_prompt,
        "--rollout-batch-size": told.responses // told.samples_per_prompt,
        "--rollout-max-response-len": told.max_new_tokens,
        "--lr-warmup-iters": told.warmup_steps,
        "--eps-clip": told.eps_clip,
        "--eps-clip-high": told.eps_clip_high,
        "--adam-beta1": told.betas[0],
        "--adam-beta2": told.betas[1],
    }
    assert all(f"{flag} {value}\n" in script for flag, value in flags.items())
    assert f"--lr {told.lr:.0e}\n".replace("e-0", "e-") in script
