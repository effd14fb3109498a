"""Which passes a rollout's steps need, and which of them are compared with the engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from slime.training import trainer as trainer_module
from slime.training.trainer import RolloutTrainer
from tests.algorithm_options import algorithm_options

NUM_GPUS = 0
R2: dict[str, Any] = {"use_routing_replay": True}
R3: dict[str, Any] = R2 | {"use_rollout_routing_replay": True}
OF_ENGINE: dict[str, Any] = {"use_rollout_logprobs": True}


def make_trainer(**options: Any) -> RolloutTrainer:
    made = RolloutTrainer.__new__(RolloutTrainer)
    made.args = algorithm_options(**{"on_bad_step": "stop", **options})
    return made


@pytest.mark.parametrize(
    ("options", "of_one_step", "of_two"),
    [
        ({}, False, True),
        (OF_ENGINE, False, False),
        (R2, False, True),
        (R2 | OF_ENGINE, False, True),
        (R3 | OF_ENGINE, False, False),
        ({"keep_old_actor": True}, True, True),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "m.f"}, True, True),
    ],
)
def test_old_log_probs_have_a_pass_where_routers_or_the_loss_need_it(
    options: dict[str, Any], of_one_step: bool, of_two: bool
) -> None:
    """What later steps replay is recorded in it, whoever's log-probs the ratio compares with."""
    trainer = make_trainer(**options)
    assert [trainer._loss_needs_old_log_probs(steps) for steps in (1, 2)] == [of_one_step, of_two]


class _Learner:
    def forward_backward(self, *_: Any) -> list[Any]:
        return []

    def optimizer_step(self, *_: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("options", "name", "compared"),
    [
        ({}, "actor", [True, True, True]),
        (OF_ENGINE, "actor", [True, False, False]),
        ({}, "critic", [False, False, False]),
    ],
)
def test_a_step_is_held_against_the_engine_where_its_log_probs_are_of_the_same_weights(
    options: dict[str, Any], name: str, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine's in the ratio no pass keeps the trainer's own: later steps have those of weights that moved."""
    seen: list[bool] = []

    def check(*_: Any, on_policy: bool, **__: Any) -> None:
        seen.append(on_policy)

    monkeypatch.setattr(trainer_module, "check_step", check)
    monkeypatch.setattr(trainer_module, "span", lambda _: nullcontext())
    trainer = make_trainer(**options)
    monkeypatch.setattr(trainer, "_step_metrics", lambda *_: {"trained_tokens": 1.0}, raising=False)
    who: Any = (_Learner(), None, name)
    trainer._take_steps(0, [[], [], []], [{}, {}, {}], who)
    assert seen == compared
