"""pass@k, turns, categories and the statistics of correct samples, by hand."""

from __future__ import annotations

import itertools
import math
import random
from argparse import Namespace
from typing import Any

import pytest

from slime.data import Sample
from slime.rollout.batches.metrics import num_turns, pass_at_k, pass_rates, sample_metrics
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std

NUM_GPUS = 0


def flags(**given: Any) -> Namespace:
    names = ("log_passrate", "log_multi_turn", "log_reward_category", "log_correct_samples", "reward_key")
    return Namespace(**dict.fromkeys(names) | given)


def sample(group: int, rollout_id: int, reward: Any, mask: list[int] | None = None, **more: Any) -> Sample:
    length = more.pop("length", len(mask or [1]))
    return Sample(
        group_index=group,
        rollout_id=rollout_id,
        reward=reward,
        loss_mask=mask,
        response_length=length,
        tokens=[0] * length,
        **more,
    )


def test_pass_at_k_is_the_exact_probability() -> None:
    for _ in range(20):
        n = random.randrange(1, 8)
        outcomes = [random.random() < 0.4 for _ in range(n)]
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            assert math.isclose(pass_at_k(n, sum(outcomes), k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


def test_pass_rates_of_uneven_prompts_and_missing_rewards() -> None:
    rates = pass_rates([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, None], [0.0, None]])
    assert set(rates) == {1, 2, 4, 6}, "3 and 5 are no powers of two, and nobody has more than 6"
    assert rates[1] == pytest.approx((1 / 6 + 1 + 0) / 3)
    assert rates[2] == pytest.approx((1 - 10 / 15 + 1) / 2)
    assert rates[4] == pytest.approx(1 - 5 / 15)
    assert rates[6] == 1.0
    assert pass_rates([]) == {}
    assert pass_rates([[None], []]) == {}


def test_passrate_of_training_groups_counts_a_cut_response_once() -> None:
    args = flags(log_passrate=True, reward_key="score")
    rewards = [({"score": 1.0}, 0), ({"score": 1.0}, 0), ({"score": 0.5}, 1), (None, 2)]
    samples = [sample(0, rollout_id, reward) for reward, rollout_id in rewards]
    samples += [sample(1, 3, {"score": 0.0})]
    assert sample_metrics(args, samples) == {
        "passrate/pass@1": pytest.approx((1 / 2 + 0) / 2),
        "passrate/pass@2": 1.0,
    }


@pytest.mark.parametrize("parts", [(0.0, 0.0, 1.0), (1.0, 1.0, 1.0)])
def test_a_reward_on_the_last_part_or_on_each_makes_no_difference(parts: tuple[float, ...]) -> None:
    right = [sample(0, 0, reward) for reward in parts]
    wrong = [sample(0, 1, 0.0) for _ in parts]
    args = flags(log_passrate=True)
    assert sample_metrics(args, right + wrong) == {"passrate/pass@1": 0.5, "passrate/pass@2": 1.0}
    assert check_reward_nonzero_std(args, right + wrong).keep
    both = right + [sample(0, 1, reward) for reward in parts]
    assert sample_metrics(args, both) == {"passrate/pass@1": 1.0, "passrate/pass@2": 1.0}
    output = check_reward_nonzero_std(args, both)
    assert (output.keep, output.reason) == (False, "zero_std_1")


@pytest.mark.parametrize(
    ("mask", "turns"), [(None, 1), ([1, 1], 1), ([0, 1, 1, 0, 0, 1], 2), ([1, 0, 1, 0, 1], 3), ([0, 0], 0), ([], 0)]
)
def test_a_turn_is_a_span_that_is_trained_on(mask: list[int] | None, turns: int) -> None:
    assert num_turns(Sample(loss_mask=mask, response_length=2 if mask is None else len(mask))) == turns


def test_multi_turn_lengths_with_and_without_tools() -> None:
    samples = [sample(0, 0, 1.0, [1, 0, 0, 1]), sample(0, 1, 1.0, [1, 1]), sample(0, 2, 1.0, None, length=3)]
    metrics = sample_metrics(flags(log_multi_turn=True), samples)
    assert metrics["multi_turn/turns/mean"] == pytest.approx(4 / 3)
    assert (metrics["multi_turn/turns/min"], metrics["multi_turn/turns/max"]) == (1.0, 2.0)
    assert metrics["multi_turn/response_len/mean"] == pytest.approx(3)
    assert metrics["multi_turn/response_len_without_tools/mean"] == pytest.approx(7 / 3)


def test_reward_categories_are_shares_of_all_samples() -> None:
    rewards = [{"cat": "format"}, {"cat": "format"}, {"cat": 3}, {}, 1.0, None]
    samples = [sample(0, i, reward) for i, reward in enumerate(rewards)]
    metrics = sample_metrics(flags(log_reward_category="cat"), samples)
    assert metrics == {
        "rollout/error_cat/format": pytest.approx(2 / 6),
        "rollout/error_cat/3": pytest.approx(1 / 6),
        "rollout/error_cat/missing": pytest.approx(3 / 6),
    }


def test_correct_samples() -> None:
    samples = [
        sample(0, 0, 1.0, [1, 0, 1], rollout_log_probs=[-1.0, -50.0, -2.0]),
        sample(0, 1, 1.0, None, length=7),
        sample(0, 2, 0.5, [1], rollout_log_probs=[-9.0]),
        sample(0, 3, None),
    ]
    metrics = sample_metrics(flags(log_correct_samples=True), samples)
    removed = sample(0, 4, 1.0, None, length=2, rollout_log_probs=[-70.0, -80.0])
    removed.remove_sample = True  # it has no trained token
    with_removed = sample_metrics(flags(log_correct_samples=True), [*samples, removed])
    assert with_removed["rollout/correct_samples/log_probs"] == metrics["rollout/correct_samples/log_probs"]
    assert metrics["rollout/correct_samples/ratio"] == 0.5
    assert metrics["rollout/correct_samples/response_len/mean"] == 5.0
    assert metrics["rollout/correct_samples/log_probs"] == pytest.approx(-1.5)
    assert sample_metrics(flags(log_correct_samples=True), samples[2:]) == {"rollout/correct_samples/ratio": 0.0}


def test_nothing_is_logged_without_a_flag_or_a_sample() -> None:
    assert sample_metrics(flags(), [sample(0, 0, 1.0)]) == {}
    every = flags(log_passrate=True, log_multi_turn=True, log_reward_category="cat", log_correct_samples=True)
    assert sample_metrics(every, []) == {}
