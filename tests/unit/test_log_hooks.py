"""A user's own logging: what it gets, what its answer means, and how it fails; called as the rollout manager does."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.files.safe_dump import load_safe
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.user.hooks import HookError, logs_evaluation, logs_rollout
from slime.utils.errors import DeadlineError
from tests.fake_client import hook_file
from tests.small_fleet import bare_manager
from tools.samples.rollouts import Query, list_samples, read_rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]

_HOOKS = """
import asyncio, time
seen = []

def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    seen.append((rollout_id, len(samples), rollout_extra_metrics, rollout_time))
    return True

async def log_eval_rollout_data(rollout_id, args, data, extra_metrics):
    await asyncio.sleep(0)
    seen.append((rollout_id, sorted(data), extra_metrics))
    return args.answer

def other_names(step, options, *rest):
    pass

def raises(*values):
    raise KeyError("no such board")

def says_how_many(*values):
    return 3

async def hangs(*values):
    await asyncio.sleep(60)
"""

ROLLOUT = "custom_rollout_log_function_path"
EVAL = "custom_eval_rollout_log_function_path"


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    return hook_file(tmp_path, _HOOKS)


def test_a_rollout_is_logged_by_whoever_says_so(rollout_args: Args, hooks: Path) -> None:
    from slime.utils.misc import load_function

    samples = [Sample(), Sample()]
    assert not logs_rollout(rollout_args(), 3, samples, {}, 1.5)
    args = rollout_args(**{ROLLOUT: f"{hooks}:log_rollout_data"})
    assert logs_rollout(args, 3, samples, {"x": 1}, 1.5) is True
    seen = load_function(f"{hooks}:log_rollout_data").__globals__["seen"]
    assert seen == [(3, 2, {"x": 1}, 1.5)]
    args = rollout_args(**{ROLLOUT: f"{hooks}:other_names"})
    assert logs_rollout(args, 3, samples, {}, 1.5) is False, "None is no: the names of parameters are the user's"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raises", r"raised KeyError: 'no such board'[\s\S]*in raises"),
        ("says_how_many", r"must return True .* or False, not 3"),
    ],
)
def test_a_failure_names_flag_and_path(rollout_args: Args, hooks: Path, name: str, expected: str) -> None:
    args = rollout_args(**{EVAL: f"{hooks}:{name}"})
    with pytest.raises(
        HookError, match=re.escape(f"--custom-eval-rollout-log-function-path {hooks}:{name} ") + expected
    ):
        logs_evaluation(args, 3, {}, {})


def test_one_that_hangs_ends_at_its_deadline(rollout_args: Args, hooks: Path) -> None:
    args = rollout_args(**{EVAL: f"{hooks}:hangs", "rollout_timeout": 0.2})
    with pytest.raises(DeadlineError, match=r"hangs took longer than 0\.2 s \(--rollout-timeout\)"):
        logs_evaluation(args, 3, {}, {})


@pytest.mark.parametrize("answer", [True, False])
def test_what_the_manager_then_hands_on_of_an_evaluation(
    rollout_args: Args, hooks: Path, answer: bool, runtime: RolloutRuntime
) -> None:
    def evaluate(args: Namespace, rollout_id: int, source: Any, evaluation: bool) -> dict[str, Any]:
        return {"sums": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": []}}

    manager = bare_manager(rollout_args(**{EVAL: str(hooks)}), runtime, evaluate=evaluate)
    manager._args.custom_eval_rollout_log_function_path += ":log_eval_rollout_data"
    manager._args.answer = answer
    metrics = manager.evaluate(5, 0)
    assert metrics.pop("perf/eval_time") >= 0
    assert metrics.get("eval/sums") == (None if answer else 0.5)
    assert bool(metrics) != answer


def test_the_manager_saves_the_samples_of_evaluations(
    rollout_args: Args, tmp_path: Path, runtime: RolloutRuntime
) -> None:
    """As upstream: `eval_` and the number, in the form that the template wants; the viewer takes them."""

    def evaluate(args: Namespace, rollout_id: int, source: Any, evaluation: bool) -> dict[str, Any]:
        made = [Sample(index=i, group_index=i // 2, tokens=[1, i], response_length=1, reward=1.0) for i in range(4)]
        made[3].metadata = None  # type: ignore[assignment]
        return {name: {"rewards": [1.0] * 4, "samples": made} for name in ("sums", "words")} | {"none": {"rewards": []}}

    args = rollout_args(save_debug_rollout_data=str(tmp_path / "x" / "{rollout_id:03d}.pt"))
    bare_manager(args, runtime, evaluate=evaluate).evaluate(5, 0)
    rollout = read_rollout(tmp_path / "x" / "eval_005.pt")
    assert rollout.rollout_id == "eval_5"
    assert [sample.group_index for sample in rollout.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sample.metadata["eval_dataset"] for sample in rollout.samples] == ["sums"] * 4 + ["words"] * 4
    listed = list_samples(rollout, Query.parse({}))
    assert (listed["groups"], listed["rollout_id"], listed["matched"]) == (4, "eval_5", 8)
    assert load_safe(tmp_path / "x" / "eval_005.pt", "")["samples"][7]["tokens"] == [1, 3]


@pytest.mark.parametrize("custom", [True, False])
def test_what_the_manager_then_hands_on_of_a_rollout(
    make_args: Args, hooks: Path, custom: bool, monkeypatch: pytest.MonkeyPatch, runtime: RolloutRuntime
) -> None:
    from slime.driver import rollout_manager

    monkeypatch.setattr(rollout_manager.ray, "put", lambda batch: batch)
    monkeypatch.setattr(
        rollout_manager, "to_train_batches", lambda args, samples, dp: ([], {"rollout/raw_reward": 0.5})
    )
    monkeypatch.setattr(rollout_manager, "operations", lambda args, batches: {})
    args = make_args(log_multi_turn=True, rollout_function_path="own.fn")
    args.asynchronous = False
    args.reward_baseline = None
    args.custom_rollout_log_function_path = f"{hooks}:log_rollout_data" if custom else None
    samples = [[Sample(response_length=2, tokens=[1, 2, 3], reward=1.0)]]
    metrics = bare_manager(args, runtime, rollout=lambda *_: samples).generate(2, 1, 0)[0]
    assert metrics["rollout/raw_reward"] == 0.5, "what the training batch says is logged anyway"
    assert metrics["perf/rollout_time"] >= 0
    assert ("multi_turn/turns/mean" in metrics) != custom
