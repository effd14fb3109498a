"""slime.rollout.batches.reward_log: a rollout from whose rewards nothing can be learned is told of, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.driver import rollout_manager
from slime.rollout.batches.reward_log import RewardLog
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.runtime import RolloutRuntime
from tests.small_fleet import bare_manager
from tests.unit.test_train_data import make_args, make_samples

NUM_GPUS = 0
SHOWN: dict[str, Any] = {"save_debug_rollout_data": None, "hf_checkpoint": "my model"}

DISTILLED: dict[str, Any] = {"use_opd": True, "custom_rm_path": "slime.rollout.on_policy_distillation.reward_func"}

Rollout = Callable[..., None]


@pytest.fixture
def rollout() -> Rollout:
    """Takes rewards, a list a group, of the next rollout; keyword arguments are options."""
    log, number = RewardLog(), iter(range(100))

    def take(*groups: list[float], change: Callable[[list[Sample]], None] | None = None, **options: Any) -> None:
        rewards = [reward for group in groups for reward in group]
        samples = make_samples(groups=1, per_group=len(rewards))
        numbers = [number for number, group in enumerate(groups) for _ in group]
        for sample, reward, group in zip(samples, rewards, numbers, strict=True):
            sample.reward, sample.group_index = reward, group
        if change:
            change(samples)
        num_rollouts = len({sample.rollout_id for sample in samples})
        given = {"global_batch_size": num_rollouts, "custom_rm_path": None, **SHOWN, **options}
        args = make_args(**given)
        log.check(args, next(number), samples, *to_train_batches(args, samples, dp_size=2))

    return take


@pytest.mark.parametrize(
    "options",
    [
        *({"advantage_estimator": estimator} for estimator in ("grpo", "gspo", "cispo", "rloo")),
        {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
        {"disable_grpo_std_normalization": True},
    ],
)
def test_equal_rewards_are_told_of(options: dict[str, Any], rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout([0.1] * 4, [0.1] * 3, **options)
    assert [text.splitlines()[0] for text in caplog.messages] == [
        "rollout 0: in each of its 2 groups all responses have the same reward (0.1): the rewards teach nothing; "
        "check --rm-type and --label-key, or take easier or harder prompts"
    ]


@pytest.mark.parametrize(
    ("rewards", "told"),
    [([0, 1, 0, 0], "(0 in 3, 1 in 1)"), ([1, 2, 2, 3, 3, 3, 4], "(3 in 3, 2 in 2, 1 in 1, ...)")],
)
def test_which_rewards_it_were(
    rewards: list[float], told: str, rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    rollout(*([reward] * 2 for reward in rewards), custom_rm_path="my.py:reward")
    assert f"in each of its {len(rewards)} groups all responses have the same reward {told}: " in caplog.messages[0]
    assert "check --custom-rm-path and --label-key" in caplog.messages[0]


@pytest.mark.parametrize(
    ("rewards", "options"),
    [
        (([0, 0, 0], [0, 0, 1]), {}),
        (([0, 0, 0], [0]), {}),  # what has nothing to be compared with keeps its reward
        (([1], [1]), {"disable_rewards_normalization": True, "n_samples_per_prompt": 1}),
        (([0], [0]), {"debug_rollout_only": True, "n_samples_per_prompt": 1}),
        (([0, 0], [0, 0]), {"disable_rewards_normalization": True}),
        (([0, 0], [0, 0]), {"advantage_estimator": "ppo"}),
        (([0, 0], [0, 0]), {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}),
        (([0, 0], [0, 0]), {"loss_type": "sft_loss"}),
        (([0, 0], [0, 0]), {"loss_type": "custom_loss", "custom_loss_function_path": "f.py:loss"}),
        (([0, 0], [0, 0]), {"custom_advantage_function_path": "f.py:advantages"}),
        (([0, 0], [0, 0]), {"rollout_data_postprocess_path": "f.py:change"}),
        (([0, 0], [0, 0]), DISTILLED | {"rm_type": None}),
    ],
)
def test_other_rollouts_are_not(
    rewards: tuple[list[float], ...], options: dict[str, Any], rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    rollout(*rewards, **options)
    assert not caplog.messages


@pytest.mark.parametrize("options", [{"rm_type": "math"}, {"rm_type": None, "custom_rm_path": "my.py:reward"}])
def test_rewards_of_a_task_beside_a_teacher_are_told_of(
    options: dict[str, Any], rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    rollout([0, 0], [0, 0], **DISTILLED | options)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("flag", "body"),
    [
        ("custom_reward_post_process_path", "return [0.0] * len(samples), [0.0] * len(samples)"),
        (
            "custom_convert_samples_to_train_data_path",
            "return {'tokens': [s.tokens for s in samples], 'response_lengths': [s.response_length for s in samples],\n"
            "            'rewards': [0.0] * len(samples), 'raw_reward': [0.0] * len(samples),\n"
            "            'truncated': [0] * len(samples),\n"
            "            'loss_masks': [[1] * s.response_length for s in samples],\n"
            "            'sample_indices': [s.index for s in samples]}",
        ),
    ],
)
def test_functions_that_make_rewards_are_not_second_guessed(
    flag: str, body: str, rollout: Rollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "f.py").write_text(f"def make(args, samples):\n    {body}\n")
    rollout([0, 0], [0, 0], **{flag: f"{tmp_path}/f.py:make"})
    assert not caplog.messages


def test_parts_of_a_response_may_differ_where_responses_do_not(
    rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    def in_two(samples: list[Sample]) -> None:
        for first, last in zip(samples[::2], samples[1::2], strict=True):
            last.rollout_id = first.rollout_id

    rollout([0, 1, 0, 1], change=in_two)
    assert not caplog.messages
    rollout([1, 1, 1, 1], change=in_two)
    assert len(caplog.messages) == 1


def test_rewards_that_read_alike_are_counted_together(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout([1234567.25] * 2, [1234567.5] * 2)
    assert "in each of its 2 groups all responses have the same reward (1.23457e+06): " in caplog.messages[0]


def test_many_such_rollouts_do_not_flood_the_console(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(9):
        rollout([0, 0], [1, 1])
        rollout([0, 1], [1, 1])
    assert [text.split(":")[0] for text in caplog.messages] == [f"rollout {n}" for n in (0, 2, 6, 14)]
    assert caplog.messages[-1].splitlines()[0].endswith("or harder prompts (8 rollouts so by now)")


def test_one_is_shown_and_where_the_others_are(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    def answer(samples: list[Sample]) -> None:
        for sample in samples:
            sample.label, sample.response = "12", "so " * 100 + "\\boxed{12}\x1b[2J"

    rollout([0, 0], [0, 0], change=answer)
    _, one, where = caplog.messages[0].splitlines()
    assert one.startswith("  one of them: sample 0, reward 0, label '12', response '...")
    assert one.endswith("so \\\\boxed{12}\\x1b[2J'")
    assert len(one) < 240
    view = "python3 tools/view_samples.py {} --hf-checkpoint 'my model'"
    assert where.endswith("'DIR/{rollout_id}.pt', then: " + view.format("DIR"))
    rollout([0, 0], [0, 0], save_debug_rollout_data="out/samples/{rollout_id}.pt")
    assert caplog.messages[1].splitlines()[2] == "  to read all of them: " + view.format("out/samples/1.pt")


def test_the_rollout_manager_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runtime: RolloutRuntime
) -> None:
    monkeypatch.setattr(rollout_manager.ray, "put", lambda batch: batch)
    tracking = dict.fromkeys(("log_passrate", "log_multi_turn", "log_reward_category", "log_correct_samples"))
    given = {"custom_rollout_log_function_path": None, "custom_rm_path": None, "rollout_prefix_warmup": False}
    args = make_args(**tracking, **SHOWN, **given)
    samples = make_samples(groups=2)
    for sample in samples:
        sample.reward = 0.0
    manager = bare_manager(args, runtime)
    monkeypatch.setattr(manager, "_samples", lambda rollout_id: (samples, {}))
    manager.generate(5, 1, 0)
    assert [text.split(" (")[0] for text in caplog.messages] == [
        "rollout 5: in each of its 2 groups all responses have the same reward"
    ]
