"""What must hold in every run: an error, or a warning that is one under ``--ci-test`` or when asked for."""

from __future__ import annotations

import logging
import math
import sys
from argparse import Namespace

from slime.files.checkpoints import same_place
from slime.options.flags.schema import flag_named
from slime.utils import device
from slime.utils.errors import SlimeError

logger = logging.getLogger(__name__)

_DIFFERENCE = "train/train_rollout_logprob_abs_diff"
_DISTANCE = "train/opd_reverse_kl"
_NEARLY_THE_SAME = (1e-6, 5e-6)
"""How far log-probs in true on-policy mode may be apart, in the mean and at most, where kernels are not the same."""
_OF_ITSELF = 1e-5
"""How far a student may be from a teacher that is itself."""


class TrainingError(SlimeError):
    """Training cannot go on: what went wrong, in which rollout and step."""


def check_finite(args: Namespace, where: str, what: str, value: float) -> None:
    """Raise TrainingError where a value of a step is not finite, unless ``--no-check-for-nan-in-loss-and-grad``."""
    if args.check_for_nan_in_loss_and_grad and not math.isfinite(value):
        raise TrainingError(
            f"{where}: the {what} is {value}. Nothing was saved after it: look at the rollout's rewards and "
            f"log-probs, or resume from the last checkpoint with a lower --lr or --clip-grad"
        )


def check_step(
    args: Namespace, where: str, metrics: dict[str, float], trained_tokens: float, *, is_first: bool, on_policy: bool
) -> None:
    """Check a step's metrics; TrainingError where a check of ``--ci-test`` failed, or with ``--stop-on-mismatch``
    trainer and engine disagree.

    Args:
        trained_tokens: of all ranks; without any the means are 0, and say nothing.
        is_first: the actor's first step of all: on policy, and at the reference.
        on_policy: whether the log-probs that it compares with the engine's are the actor's before the rollout's first
            step.
    """
    if not trained_tokens:
        logger.warning(
            f"{where}: no response has a trained token (every loss_mask is 0, or remove_sample is set): the step's "
            "loss and means are 0, and say nothing of the policy or of a mismatch"
        )
    _check_mismatch(args, where, metrics.get(_DIFFERENCE, 0.0))
    if args.true_on_policy_mode and on_policy:
        _check_same_kernels(where, metrics)
    if not args.ci_test:
        return
    wrong = [
        f"{name} is {metrics[name]}, not {expected}"
        for name, (low, high, expected) in _ranges(args, is_first).items()
        if name in metrics and not low <= metrics[name] <= high
    ]
    ours, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    at_reference = is_first and not (args.ci_disable_kl_checker or args.use_rollout_logprobs)
    bound = _apart_from_itself(args)
    if at_reference and ours is not None and reference is not None and not abs(ours - reference) <= bound:
        wrong.append(f"rollout/log_probs is {ours}, not the rollout/ref_log_probs {reference} of the first step")
    if args.use_opd and "train/pg_loss" in metrics and _DISTANCE not in metrics:
        wrong.append(f"{_DISTANCE} is not logged")
    if wrong:
        raise TrainingError(f"--ci-test: {where}: {'; '.join(wrong)}")


def _ranges(args: Namespace, is_first: bool) -> dict[str, tuple[float, float, str]]:
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    ranges = {
        "rollout/log_probs": (-math.inf, 0.0, "at most 0"),
        "train/entropy_loss": (0.0, math.log(args.vocab_size) * 1.001, "between 0 and log(vocabulary)"),
    }
    if is_first or not args.asynchronous:  # later samples of an asynchronous run may come from other weights
        ranges[_DIFFERENCE] = (0.0, threshold, f"at most {threshold}")
    if is_first and not args.use_rollout_logprobs:
        where = "on the first step, which is on policy"
        ranges |= {"train/ppo_kl": _zero(rounding(args.params_dtype), where), "train/pg_clipfrac": _zero(0.0, where)}
    if args.use_opd:
        ranges[_DISTANCE] = (-sys.float_info.max, sys.float_info.max, "a finite number")
    if is_first and not args.ci_disable_kl_checker and _learns_from_itself(args):
        bound = max(_OF_ITSELF, _apart_from_itself(args))
        ranges[_DISTANCE] = _zero(bound, "on the first step, whose teacher is the student")
    if is_first and not args.ci_disable_kl_checker:
        bound = _apart_from_itself(args, args.kl_loss_type)
        ranges["train/kl_loss"] = _zero(bound, "on the first step, which is at the reference")
    return ranges


def _apart_from_itself(args: Namespace, kl_type: str = "k1") -> float:
    """How far a mean over tokens of the policy may be from that of a reference or teacher with its weights. Where the
    policy has the engine's experts these choose their own: they may be as far apart as trainer and engine."""
    bound = rounding(args.params_dtype, kl_type)
    return args.ci_train_rollout_logprob_abs_diff_threshold if args.use_rollout_routing_replay else bound


def _learns_from_itself(args: Namespace) -> bool:
    """Whether the teacher in the trainers has the weights that the student starts from."""
    if args.opd_type != "megatron" or args.random_weights or args.use_rollout_logprobs:
        return False
    return same_place(args.opd_teacher_load, args.ref_load or args.hf_checkpoint)


def _zero(bound: float, where: str) -> tuple[float, float, str]:
    return -bound, bound, f"within {bound} of 0 {where}" if bound else f"exactly 0 {where}"


def _check_mismatch(args: Namespace, where: str, difference: float) -> None:
    if difference <= args.mismatch_threshold:
        return
    advice = ["lower --max-weight-staleness" if args.asynchronous else "look at their precision and kernels"]
    paths = {name: getattr(args, name, None) for name in ("custom_generate_function_path", "rollout_sample_hook_path")}
    if filling := [name for name, path in paths.items() if path and not str(path).startswith("slime.")]:
        of_user = (
            f"where the probe of the pushes agrees, look at what {flag_named(filling[0])} has trained on: what the "
            "engine did not generate, as the words of a tool, needs a loss_mask of 0 (docs/customize.md, 'Check a "
            "function')"
        )
        advice.insert(0, of_user)
    given = [name for name in ("use_tis", "use_rs", "use_rollout_logprobs") if getattr(args, name)]
    if given:
        advice.append(f"raise --mismatch-threshold, as {flag_named(given[0])} corrects for this")
    else:
        advice.append("correct for it by --use-tis")
    message = (
        f"{where}: the trainer's and the engine's log-probs of the same tokens differ by {difference:.4g} in the mean "
        f"(--mismatch-threshold {args.mismatch_threshold}): {', or '.join(advice)}"
    )
    if args.stop_on_mismatch:
        raise TrainingError(message)
    logger.warning(message)


def _check_same_kernels(where: str, metrics: dict[str, float]) -> None:
    names = (_DIFFERENCE, f"{_DIFFERENCE}_max")
    if missing := [name for name in names if name not in metrics]:
        raise TrainingError(
            f"{where}: --true-on-policy-mode: there is no {missing[0]}: nothing was compared with the engine"
        )
    mean, largest = (metrics[name] for name in names)
    if mean > _NEARLY_THE_SAME[0] or largest > _NEARLY_THE_SAME[1]:
        raise TrainingError(
            f"{where}: --true-on-policy-mode: the trainer's and the engine's log-probs of the same tokens differ by "
            f"{mean:.2g} in the mean and {largest:.2g} at most, and may by {_NEARLY_THE_SAME[0]} and "
            f"{_NEARLY_THE_SAME[1]} on a host whose kernels are not the same for all shapes: "
            "tools/compare_log_probs.py says where they part"
        )


def rounding(dtype: str, kl_type: str = "k1") -> float:
    """How far single tokens that round otherwise in one of two passes may move a mean over tokens.

    On GPUs four of some 200 first steps had such tokens: in 16 bits their log-probs were apart by 0.006 to 0.008, in
    float32 by some 1e-7 (docs/performance.md). On CPUs nothing was ever seen to differ, and nothing may.

    Args:
        dtype: in which the model computes.
        kl_type: whose mean it is, an estimate as of ``--kl-loss-type``; ``k1`` is a difference of log-probs, the others
            are of the square of one. All tokens of 16 bits rounded otherwise make these 8e-6; of float32, whose squares
            are nothing, they are what is lost where the estimate adds 1.
    """
    if not device.is_cuda():
        return 0.0
    of_difference, of_square = (1e-6, 1e-8) if dtype == "float32" else (5e-4, 2e-6)
    return of_difference if kl_type == "k1" else of_square
