"""What stops a run under --ci-test, and what warns."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.training import checks
from slime.training.checks import TrainingError
from slime.utils import device
from tests.algorithm_options import algorithm_options

NUM_GPUS = 0
GOOD = {
    "train/train_rollout_logprob_abs_diff": 0.01,
    "rollout/log_probs": -1.5,
    "train/entropy_loss": 1.2,
    "train/ppo_kl": 0.0,
    "train/pg_clipfrac": 0.0,
    "train/kl_loss": 0.0,
    "train/loss": 0.3,
}
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def check_step(args: Namespace, where: str, metrics: dict[str, float], *, is_first: bool) -> None:
    checks.check_step(args, where, metrics, 5, is_first=is_first, on_policy=True)


def options(**changes: Any) -> Namespace:
    return algorithm_options(**{"ci_test": True, "vocab_size": 300, "params_dtype": "float32", **changes})


@pytest.mark.parametrize("is_first", [True, False])
def test_a_right_step_passes(is_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    check_step(options(), "here", GOOD, is_first=is_first)
    check_step(options(), "here", {}, is_first=is_first)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (DIFFERENCE, 0.11, f"{DIFFERENCE} is 0.11, not at most 0.1"),
        (DIFFERENCE, math.nan, f"{DIFFERENCE} is nan"),
        ("rollout/log_probs", 0.01, "rollout/log_probs is 0.01, not at most 0"),
        ("rollout/log_probs", math.nan, "rollout/log_probs is nan"),
        ("train/entropy_loss", -0.1, "train/entropy_loss is -0.1, not between 0 and log(vocabulary)"),
        ("train/entropy_loss", 5.8, "train/entropy_loss is 5.8"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_wrong_in_any_step(name: str, value: float, expected: str, is_first: bool) -> None:
    with pytest.raises(TrainingError) as error:
        check_step(options(mismatch_threshold=9.0), "rollout 3, step 1 of 2", GOOD | {name: value}, is_first=is_first)
    assert str(error.value).startswith("--ci-test: rollout 3, step 1 of 2: ")
    assert expected in str(error.value)
    check_step(options(ci_test=False, mismatch_threshold=9.0), "here", GOOD | {name: value}, is_first=is_first)


@pytest.mark.parametrize("name", ["train/ppo_kl", "train/pg_clipfrac", "train/kl_loss"])
@pytest.mark.parametrize("value", [1e-30, -1e-30])
def test_what_is_exactly_0_on_the_first_step(name: str, value: float) -> None:
    metrics = GOOD | {name: value}
    with pytest.raises(TrainingError, match=f"{name} is {value}, not exactly 0 on the first step"):
        check_step(options(), "here", metrics, is_first=True)
    check_step(options(), "here", metrics, is_first=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "rounded", "wrong", "changes"),
    [
        ("train/ppo_kl", -1e-4, -6e-4, {}),
        ("train/kl_loss", 4e-7, 8e-6, {"kl_loss_type": "low_var_kl"}),
        ("train/kl_loss", 4e-7, 8e-6, {"kl_loss_type": "k2"}),
        ("train/kl_loss", 1e-4, 6e-4, {"kl_loss_type": "k1"}),
        ("train/kl_loss", 4e-7, math.nan, {"kl_loss_type": "k3"}),
        ("rollout/ref_log_probs", -1.5001, -1.5006, {}),
        ("rollout/ref_log_probs", -1.5001, math.nan, {}),
        ("train/pg_clipfrac", 0.0, 1e-4, {}),
    ],
)
def test_single_tokens_may_round_otherwise_in_16_bits_on_gpus(
    dtype: str, name: str, rounded: float, wrong: float, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    args = options(params_dtype=dtype, **changes)
    check_step(args, "here", GOOD | {name: rounded}, is_first=True)
    with pytest.raises(TrainingError, match=name):
        check_step(args, "here", GOOD | {name: wrong}, is_first=True)


@pytest.mark.parametrize(
    ("name", "rounded", "wrong"),
    [
        ("train/ppo_kl", -1e-7, -2e-6),
        ("train/kl_loss", -3.4e-11, -2e-8),
        ("rollout/ref_log_probs", -1.5000001, -1.500002),
    ],
)
def test_and_in_float32_by_far_less(name: str, rounded: float, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    args = options(params_dtype="float32", kl_loss_type="low_var_kl")
    check_step(args, "here", GOOD | {name: rounded}, is_first=True)
    with pytest.raises(TrainingError, match=name):
        check_step(args, "here", GOOD | {name: wrong}, is_first=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["train/ppo_kl", "train/kl_loss", "rollout/ref_log_probs"])
def test_elsewhere_no_token_may(dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: False)
    args = options(params_dtype=dtype)
    right = GOOD | {"rollout/ref_log_probs": GOOD["rollout/log_probs"]}
    check_step(args, "here", right, is_first=True)
    with pytest.raises(TrainingError, match=name):
        check_step(args, "here", right | {name: right[name] - 1e-12}, is_first=True)


def test_the_engines_log_probs_as_behaviour_are_not_on_policy() -> None:
    args = options(use_rollout_logprobs=True)
    check_step(args, "here", GOOD | {"train/ppo_kl": 0.01, "train/pg_clipfrac": 0.1}, is_first=True)
    with pytest.raises(TrainingError, match="train/kl_loss"):
        check_step(args, "here", GOOD | {"train/kl_loss": 0.01}, is_first=True)


def test_the_first_step_is_at_a_reference_that_no_kl_loss_measures() -> None:
    """As where ``--kl-coef`` alone has it."""
    metrics = {name: value for name, value in GOOD.items() if name != "train/kl_loss"}
    check_step(options(), "here", metrics | {"rollout/ref_log_probs": -1.5}, is_first=True)
    for wrong in (-1.5000001, math.nan):
        off = metrics | {"rollout/ref_log_probs": wrong}
        with pytest.raises(TrainingError, match=r"rollout/log_probs is -1\.5, not the rollout/ref_log_probs"):
            check_step(options(), "here", off, is_first=True)
        check_step(options(), "here", off, is_first=False)
        for other in ("ci_disable_kl_checker", "use_rollout_logprobs"):
            check_step(options(**{other: True}), "here", off, is_first=True)


@pytest.mark.parametrize(
    ("name", "near", "far"),
    [
        ("train/kl_loss", 0.01, 0.2),
        ("rollout/ref_log_probs", -1.51, -1.8),
        (DIFFERENCE, 0.01, 0.2),
        ("train/ppo_kl", 0.0, 0.01),
    ],
)
def test_with_the_engines_routes_a_reference_is_as_near_as_the_engine(name: str, near: float, far: float) -> None:
    """It chooses its experts; the policy takes the same in all of its passes."""
    args = options(use_rollout_routing_replay=True, mismatch_threshold=9.0)
    check_step(args, "here", GOOD | {name: near}, is_first=True)
    with pytest.raises(TrainingError, match=name):
        check_step(args, "here", GOOD | {name: far}, is_first=True)


def test_every_wrong_metric_is_named() -> None:
    with pytest.raises(TrainingError, match=r"train/entropy_loss is -1, .*train/ppo_kl is 1, .*train/kl_loss is 1"):
        check_step(options(), "here", {"train/entropy_loss": -1, "train/ppo_kl": 1, "train/kl_loss": 1}, is_first=True)


def test_the_reference_may_be_another_model() -> None:
    check_step(options(ci_disable_kl_checker=True), "here", GOOD | {"train/kl_loss": 0.5}, is_first=True)
    with pytest.raises(TrainingError, match="train/ppo_kl"):
        check_step(options(ci_disable_kl_checker=True), "here", GOOD | {"train/ppo_kl": 0.5}, is_first=True)


def test_threshold_of_the_difference() -> None:
    check_step(
        options(ci_train_rollout_logprob_abs_diff_threshold=0.5, mismatch_threshold=1.0),
        "here",
        GOOD | {DIFFERENCE: 0.4},
        is_first=False,
    )


def test_older_weights_may_have_made_the_samples_of_an_asynchronous_run(caplog: pytest.LogCaptureFixture) -> None:
    metrics = GOOD | {DIFFERENCE: 0.11}
    check_step(options(asynchronous=True), "here", metrics, is_first=False)
    assert "0.11 in the mean (--mismatch-threshold 0.1): lower --max-weight-staleness" in caplog.messages[0]
    with pytest.raises(TrainingError, match=r"0\.11, not at most 0\.1"):
        check_step(options(asynchronous=True), "here", metrics, is_first=True)
    for name in ("train/ppo_kl", "train/kl_loss"):
        with pytest.raises(TrainingError, match=f"{name} is 0.1, not exactly 0"):
            check_step(options(asynchronous=True), "here", GOOD | {name: 0.1}, is_first=True)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, "kernels, or correct for it by --use-tis"),
        ({"use_tis": True}, "kernels, or raise --mismatch-threshold, as --use-tis corrects for this"),
        ({"use_rollout_logprobs": True}, "or raise --mismatch-threshold, as --use-rollout-logprobs corrects for this"),
    ],
)
def test_a_mismatch_advises_what_is_not_given_yet(
    given: dict[str, bool], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_step(options(ci_test=False, **given), "here", {DIFFERENCE: 9.0}, is_first=False)
    assert caplog.messages[0].endswith(advice)


def test_a_mismatch_may_be_of_what_a_users_function_has_filled(caplog: pytest.LogCaptureFixture) -> None:
    args = options(ci_test=False, custom_generate_function_path="my.py:generate")
    check_step(args, "here", {DIFFERENCE: 9.0}, is_first=False)
    assert ": where the probe of the pushes agrees, look at what --custom-generate-function-path" in caplog.messages[0]
    assert "needs a loss_mask of 0" in caplog.messages[0]


@pytest.mark.parametrize("difference", [0.21, math.nan])
def test_a_mismatch_warns_and_stops_where_asked(difference: float, caplog: pytest.LogCaptureFixture) -> None:
    quiet = {"ci_test": False, "mismatch_threshold": 0.2}
    with caplog.at_level(logging.WARNING):
        check_step(options(**quiet), "rollout 7, step 1 of 1", {DIFFERENCE: 0.2}, is_first=False)
        assert not caplog.records
        check_step(options(**quiet), "rollout 7, step 1 of 1", {DIFFERENCE: difference}, is_first=False)
    assert caplog.messages[0].startswith("rollout 7, step 1 of 1: the trainer's and the engine's log-probs")
    assert f"differ by {difference:.4g} in the mean (--mismatch-threshold 0.2)" in caplog.messages[0]
    with pytest.raises(TrainingError, match=r"--mismatch-threshold 0\.2"):
        check_step(options(stop_on_mismatch=True, **quiet), "here", {DIFFERENCE: difference}, is_first=False)


def test_a_step_without_trained_tokens_says_so(caplog: pytest.LogCaptureFixture) -> None:
    zeros = dict.fromkeys(GOOD, 0.0)
    checks.check_step(options(), "rollout 7, step 1 of 1, actor", zeros, 0, is_first=True, on_policy=True)
    assert [record.getMessage() for record in caplog.records] == [
        "rollout 7, step 1 of 1, actor: no response has a trained token (every loss_mask is 0, or remove_sample is "
        "set): the step's loss and means are 0, and say nothing of the policy or of a mismatch"
    ]


def test_the_distance_to_a_teacher(tmp_path: Path) -> None:
    """It is logged and finite; on the first step it is nothing where the teacher is the student."""
    name, of = "train/opd_reverse_kl", {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(tmp_path)}
    places = {"hf_checkpoint": "/elsewhere", "ref_load": f"{tmp_path}/../{tmp_path.name}", "random_weights": False}
    itself, another = options(**of, **places), options(**of, **places | {"ref_load": None})
    step = GOOD | {"train/pg_loss": 0.1}
    for first in (True, False):
        for value in (math.nan, math.inf):
            with pytest.raises(TrainingError, match=f"{name} is {value}, not a finite number"):
                check_step(another, "here", step | {name: value}, is_first=first)
        with pytest.raises(TrainingError, match=f"{name} is not logged"):
            check_step(another, "here", step, is_first=first)
        check_step(another, "here", step | {name: 0.7}, is_first=first)
        check_step(itself, "here", step | {name: -1e-5}, is_first=first)
    with pytest.raises(TrainingError, match=f"{name} is 2e-05, not within 1e-05 of 0 on the first step, whose teacher"):
        check_step(itself, "here", step | {name: 2e-5}, is_first=True)
    check_step(itself, "here", step | {name: 2e-5}, is_first=False)
    check_step(options(ci_test=False, **of, **places), "here", step, is_first=True)
