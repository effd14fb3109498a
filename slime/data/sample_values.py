"""What stands in a sample that a user's function has filled: looked at where another try can still be made."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.data.sample import Sample, Status

_LISTS = ("tokens", "loss_mask", "rollout_log_probs")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "response": str,
    "metadata": dict,
    "status": Status,
    "response_length": (int, np.integer),
}


def check_filled(sample: Sample, vocab_size: int) -> None:
    """Make lists of arrays and tensors, then raise ValueError where a field is of another kind than it is declared,
    lengths contradict each other, or a token, its mask or its log-prob is nothing that can be trained on."""
    for name in _LISTS:
        value = getattr(sample, name)
        if hasattr(value, "tolist"):
            setattr(sample, name, value.tolist())
    for name, kind in _KINDS.items():
        value = getattr(sample, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = kind.__name__ if isinstance(kind, type) else "int"
            raise ValueError(f"sample {sample.index}: {name} is {value!r:.60}, not of type {wanted}")
    sample.check()
    _check_tokens(sample, vocab_size)
    check_mask(sample)
    if sample.rollout_log_probs is not None:
        _check_log_probs(sample, sample.rollout_log_probs)


def check_mask(sample: Sample) -> None:
    """ValueError where the loss mask has anything but 0 and 1."""
    if sample.loss_mask is not None and not set(sample.loss_mask) <= {0, 1}:
        found = sorted(set(sample.loss_mask), key=str)[:5]
        raise ValueError(f"sample {sample.index}: loss_mask must be of 0 and 1, got {found}")


def _check_tokens(sample: Sample, vocab_size: int) -> None:
    tokens = np.array(sample.tokens or [0])
    if tokens.dtype.kind not in "iu":
        found = next((t for t in sample.tokens if not isinstance(t, int | np.integer)), tokens.dtype)
        raise ValueError(f"sample {sample.index}: among its tokens is {found!r:.60}: they are ids, integers")
    if (wrong := tokens[(tokens < 0) | (tokens >= vocab_size)]).size:
        raise ValueError(f"sample {sample.index}: {outside_vocabulary(wrong[0], vocab_size)}")


def _check_log_probs(sample: Sample, log_probs: list[Any]) -> None:
    try:
        finite = np.isfinite(np.array(log_probs, dtype=np.float64))  # None is none
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample {sample.index}: rollout_log_probs are not all numbers: {error}") from error
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        is_trained = not sample.remove_sample and (sample.loss_mask is None or bool(sample.loss_mask[at]))
        raise ValueError(f"sample {sample.index}: {no_log_prob(at, log_probs[at], is_trained)}")


def outside_vocabulary(token: int, vocab_size: int) -> str:
    """What is wrong with a token that the model does not know."""
    return f"token id {token} is outside the model's vocabulary of {vocab_size}"


def no_log_prob(at: int, given: Any, is_trained: bool) -> str:
    """What is wrong with the log-prob of response token ``at``, which is no finite number."""
    consequence = "is trained on" if is_trained else "is masked: give it 0.0"
    return f"the rollout_log_prob of response token {at} is {given}, which {consequence}"
