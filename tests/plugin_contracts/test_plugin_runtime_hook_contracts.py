"""Contracts of what slime calls between rollout and optimizer step; as a program it checks yours.

python tests/plugin_contracts/test_plugin_runtime_hook_contracts.py --custom-rollout-log-function-path my_log.py:log
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.user.hooks import logs_evaluation, logs_rollout
from slime.utils.types import Sample
from tests.plugin_contracts.contract import Contract, Subject
from tests.plugin_contracts.running import cases, main, run_case, words_of
from tests.plugin_contracts.setting import finished_groups
from tests.plugin_contracts.training import (
    check_advantages,
    check_correction,
    check_initialisation,
    check_loss,
    check_postprocess,
    check_reduction,
)

NUM_GPUS = 0

_REWARDS = ([0.0, 1.0, 1.0], [0.5, 0.25, 0.0])
_EXAMPLES = "tests.plugin_contracts.plugins."
_BESIDES = "times, the training batch and where prompts went"
"""What slime logs of a rollout that a function has logged."""


def _samples(subject: Subject) -> list[Sample]:
    key = subject.args.reward_key
    rewards = [[reward if key is None else {key: reward} for reward in group] for group in _REWARDS]
    samples = flatten_samples(finished_groups(subject.args, rewards))
    subject.args.global_batch_size = len(samples)
    return samples


def _note_answer(subject: Subject, logged: bool, besides: str) -> None:
    what = f"True: slime then logs only {besides} besides" if logged else "False: slime then logs as usual"
    subject.notes.append(f"it returned {what}")


def check_rollout_log(subject: Subject) -> None:
    """It takes the samples and metrics of a rollout, and says whether it has logged them"""
    metrics = {"rollout/surplus_groups": 0.0, "perf/rollout_time": 1.5}
    _note_answer(subject, logs_rollout(subject.args, 0, _samples(subject), metrics, 1.5), _BESIDES)


def check_evaluation_log(subject: Subject) -> None:
    """It takes the results of an evaluation, of samples without a reward too, and says whether it has logged them"""
    samples = _samples(subject)
    rewards: list[float | None] = [reward for group in _REWARDS for reward in group]
    rewards[-1] = None
    result = {"rewards": rewards, "truncated": [False] * len(samples), "samples": samples}
    _note_answer(subject, logs_evaluation(subject.args, 0, {"contract": result}, {"perf/eval_time": 1.5}), "times")


def check_rewards(subject: Subject) -> None:
    """It returns raw rewards and rewards, a finite number each a sample, in their order"""
    to_train_batches(subject.args, _samples(subject), dp_size=1)


def check_conversion(subject: Subject) -> None:
    """Its dict has every column that is needed, of one length, and slime can train on it"""
    samples = _samples(subject)
    samples[1].loss_mask = [0] + [1] * (samples[1].response_length - 1)
    samples[2].remove_sample = True
    (batch,), _ = to_train_batches(subject.args, samples, dp_size=1)
    if len(batch) != len(samples):
        subject.notes.append(f"it made {len(batch)} rows of {len(samples)} samples")
    row = {int(index): i for i, index in enumerate(batch.sample_indices)}.get(samples[2].index or 0)
    if row is not None and batch.loss_mask[row].any():
        subject.notes.append("it trains on a sample that has remove_sample set")


CONTRACTS = (
    Contract(
        "--custom-rollout-log-function-path",
        (_EXAMPLES + "log_rollout_data",),
        f"log what you like, and return True where slime is to log only {_BESIDES} besides, else False",
        (check_rollout_log,),
    ),
    Contract(
        "--custom-eval-rollout-log-function-path",
        (_EXAMPLES + "log_eval_rollout_data",),
        "log what you like of data[name]['rewards'], ['truncated'] and ['samples'], and return True where slime is to "
        "log only times besides, else False",
        (check_evaluation_log,),
    ),
    Contract(
        "--custom-reward-post-process-path",
        (_EXAMPLES + "post_process_rewards",),
        "return two lists of numbers, the raw rewards (they are logged) and those to train on, one a sample in order",
        (check_rewards,),
    ),
    Contract(
        "--custom-convert-samples-to-train-data-path",
        (_EXAMPLES + "convert_samples_to_train_data",),
        "return {tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, loss_masks}, lists with one "
        "entry a row",
        (check_conversion,),
    ),
    Contract(
        "--rollout-data-postprocess-path",
        (_EXAMPLES + "rollout_data_postprocess",),
        "change rollout_data's advantages, returns, loss_masks or log-probs, in place or by new lists of the same "
        "lengths",
        (check_postprocess,),
    ),
    Contract(
        "--custom-advantage-function-path",
        (_EXAMPLES + "compute_advantages",),
        "set rollout_data['advantages'] and ['returns'], lists with one tensor a sample of its response's length",
        (check_advantages,),
    ),
    Contract(
        "--custom-loss-function-path",
        ("tests.user_hooks.grpo", "tests.user_hooks.imitates_the_better"),
        "return (loss, metrics): a scalar made of the tokens' values by sum_of_sample_mean, and a dict of scalars",
        (check_loss,),
    ),
    Contract(
        "--custom-tis-function-path",
        ("tests.user_hooks.clipped_ratio",),
        "return (pg_loss, loss_masks, metrics), each with a value for every response token, one sample after the other",
        (check_correction,),
    ),
    Contract(
        "--custom-pg-loss-reducer-function-path",
        ("tests.user_hooks.default_reducer",),
        "return a function that takes the loss of all response tokens, one sample after the other, to a scalar",
        (check_reduction,),
    ),
    Contract(
        "--custom-megatron-init-path",
        (_EXAMPLES + "megatron_init",),
        "do what has to be done once on every training rank; what you return is not used",
        (check_initialisation,),
    ),
    # These need a model, or the files of one: only their signatures are checked here.
    Contract("--custom-model-provider-path", (_EXAMPLES + "model_provider",), "return a GPTModel", ()),
    Contract("--custom-megatron-before-log-prob-hook-path", (_EXAMPLES + "before_log_prob",), "return nothing", ()),
    Contract("--custom-megatron-before-train-step-hook-path", (_EXAMPLES + "before_train_step",), "return nothing", ()),
    Contract("--custom-update-weight-post-write-path", (_EXAMPLES + "post_write",), "return nothing", ()),
)


def pytest_generate_tests(metafunc: Any) -> None:
    metafunc.parametrize("case", cases(CONTRACTS, words_of(os.environ)), ids=str)


def test_contract(case: Any) -> None:
    run_case(case)


if __name__ == "__main__":
    main(CONTRACTS)
