"""How often what has died is made anew, and what of the training survives."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.driver.data_side import MANAGER
from slime.driver.restarts import Goodput, Restarts
from slime.ray.supervision import RunError

NUM_GPUS = 0


def test_parts_are_made_anew_so_often_in_an_hour() -> None:
    now = [0.0]
    restarts = Restarts(Namespace(trainer_restart_limit=2), lambda: now[0])
    for phase in ("train on rollout 1", "push weights of version 2"):
        restarts.allow("the trainers", phase, "gone")
    with pytest.raises(
        RunError, match=r"^gone\nthe trainers: made anew 2 times within an hour already \(--trainer-rest"
    ):
        restarts.allow("the trainers", "save after rollout 2", "gone")
    restarts.allow(MANAGER, "save after rollout 2", "has a budget of its own")
    now[0] = 3601.0
    restarts.allow("the trainers", "save after rollout 3", "gone")


def test_what_fails_again_in_the_same_way_is_not_tried_a_third_time() -> None:
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    restarts.allow("the trainers", "train on rollout 1", "gone")
    with pytest.raises(RunError, match=r"^gone\nthe trainers: failed in the same way when made anew"):
        restarts.allow("the trainers", "train on rollout 1", "gone")
    restarts.allow("the trainers", "start trainers", "gone")
    restarts.step_is_complete(0)
    restarts.allow("the trainers", "start trainers", "gone")


@pytest.mark.parametrize("phase", ["train on rollout 2", "put the trainers to sleep"])
def test_steps_that_are_made_again_put_no_failure_behind_the_run(phase: str) -> None:
    """Of a run whose third rollout fails each time, and that goes back to its beginning each time."""
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    for rollout_id in range(2):
        restarts.step_is_complete(rollout_id)
    restarts.allow("the trainers", phase, "gone")
    for rollout_id in range(2):
        restarts.step_is_complete(rollout_id)
    with pytest.raises(RunError, match="failed in the same way when made anew"):
        restarts.allow("the trainers", phase, "gone")


def test_the_same_phase_of_other_rollouts_is_another_failure() -> None:
    """On the way back to where it failed first, too."""
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    for rollout_id in (39, 34, 39):
        restarts.step_is_complete(rollout_id)
        restarts.allow("the trainers", "put the trainers to sleep", "gone")


def test_goodput_counts_what_survives() -> None:
    now = [10.0]
    goodput = Goodput(lambda: now[0])
    for rollout_id in range(4):
        goodput.add(rollout_id, 100.0)
    now[0] = 20.0
    assert goodput.rate() == 40.0
    goodput.go_back(2)
    assert goodput.rate() == 20.0
    goodput.add(2, 50.0)
    assert goodput.rate() == 25.0
