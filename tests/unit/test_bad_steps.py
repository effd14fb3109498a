"""Which optimizer steps are bad, and what is made of them."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.driver import recovery
from slime.fleet.train_group import Checkpoint
from slime.observability import events
from slime.training.bad_steps import NormGuard, bad_loss, guards_steps, leave_out
from slime.training.checks import TrainingError
from tests.unit.test_recovery import make_recovery

NUM_GPUS = 0


def test_a_norm_is_bad_when_it_is_not_finite_or_far_above_the_median_of_recent_ones() -> None:
    guard = NormGuard(Namespace(bad_step_factor=4.0))
    assert guard.why_bad(math.nan) == "the gradient norm is nan"
    assert guard.why_bad(math.inf) == "the gradient norm is inf"
    assert [guard.why_bad(norm) for norm in (1.0, 900.0, *[1.0] * 6)] == [None] * 8, "too few to compare with"
    assert guard.why_bad(4.0) is None
    assert guard.why_bad(4.1) == "the gradient norm is 4.1, of recent steps 1 (--bad-step-factor 4)"
    assert guard.why_bad(4.1) is not None, "a bad one does not count"
    for _ in range(32):
        assert guard.why_bad(3.0) is None
    assert guard.why_bad(11.9) is None, "the median moves on"
    plain = NormGuard(Namespace(bad_step_factor=None))
    assert [plain.why_bad(norm) for norm in (*[1.0] * 9, 1e30)] == [None] * 10


@pytest.mark.parametrize(
    ("what", "factor", "guards"),
    [("stop", None, False), ("stop", 3.0, True), ("skip", None, True), ("restore", None, True)],
)
def test_norms_are_judged_before_a_step_only_where_that_is_asked_for(
    what: str, factor: float | None, guards: bool
) -> None:
    args = Namespace(on_bad_step=what, bad_step_factor=factor)
    assert guards_steps(args) is guards
    metrics = {"train/loss": math.nan, "train/entropy_loss": 1.0}
    assert bad_loss(args, metrics) == (None if what == "stop" else "train/loss is nan")
    assert bad_loss(args, {"train/loss": 1.0, "train/ppo_kl": math.nan}) is None
    if what == "stop":
        with pytest.raises(
            TrainingError, match=r"^rollout 7, step 1 of 2, actor: the norm is 9\. The step was not taken"
        ):
            leave_out(args, "rollout 7, step 1 of 2, actor", "the norm is 9")
    else:
        leave_out(args, "rollout 7, step 1 of 2, actor", "the norm is 9")


STEPS = [{"train/loss": 0.5, "train/grad_norm": 2.0}, {"train/loss": math.nan, "train/bad_steps": 1.0}]


def test_a_run_tells_of_steps_that_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery.events, "add", lambda kind, subject, **fields: told.append((kind, fields["action"])))
        log: list[tuple[Any, ...]] = []
        assert make_recovery(log, on_bad_step="skip").leave_out(5, STEPS[:1]) is None
        assert not told
        assert make_recovery(log, on_bad_step="skip").leave_out(5, STEPS) is None
        assert not log
    assert told == [("bad_step", "left out")]
    warning = "warning: train on rollout 5: 1 bad steps: train/loss nan: left out (--on-bad-step skip)\n"
    assert capsys.readouterr().err.endswith(warning)
    assert events._log is None


def test_trainers_go_back_to_the_newest_checkpoint_after_a_bad_step() -> None:
    log: list[tuple[Any, ...]] = []
    newest = Checkpoint("kept", "kept/critic", 3)
    assert make_recovery(log, on_bad_step="restore", newest=newest).leave_out(5, STEPS) == 3
    phase, method, _, *values = log[-1][1:]
    assert (phase, method, values) == ("go back after a bad step", "go_back", [3, "kept", None])
    assert make_recovery(log, on_bad_step="restore", newest=newest, use_critic=True).leave_out(5, STEPS) == 3
    assert log[-1][-1] == "kept/critic"
    log.clear()
    assert make_recovery(log, on_bad_step="restore", newest=None).leave_out(5, STEPS) is None
    assert log == [("saver.newest",)], "the step was not taken, so that the weights are good"
