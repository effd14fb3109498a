"""What stands in a sample that a user's function has filled: looked at where another try can still be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.data.sample import Sample, Status

_LISTS = ("tokens", "loss_mask", "rollout_log_probs")
_KINDS: dict[str, type] = {"status": Status, "response": str, "metadata": dict, "response_length": int}


def check_filled(sample: Sample, vocab_size: int | None) -> None:
    """Make lists of arrays and tensors, then raise ValueError where a field is of another kind than it is declared or
    lengths contradict each other; with a ``vocab_size`` also where a token, its mask or its log-prob is nothing that a
    finished sample can be trained on."""
    for name in (*_LISTS, "response_length"):
        value = getattr(sample, name)
        if hasattr(value, "tolist"):
            setattr(sample, name, value.tolist())  # of an array without dimensions a number
    kinds = _KINDS if sample.status is not Status.FAILED else {}
    for name, kind in kinds.items():
        value = getattr(sample, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"sample {sample.index}: {name} is {value!r:.60}, not of type {kind.__name__}")
    for name in _LISTS:
        value = getattr(sample, name)
        if not isinstance(value, list | tuple | range) and (value is not None or name == "tokens"):
            raise ValueError(f"sample {sample.index}: {name} is {value!r:.60}, not a list")
    sample.check()
    if vocab_size is not None and sample.status in (Status.COMPLETED, Status.TRUNCATED):
        _check_tokens(sample, vocab_size)
        check_mask(sample)
        if sample.rollout_log_probs is not None:
            _check_log_probs(sample, sample.rollout_log_probs)


def check_mask(sample: Sample) -> None:
    """ValueError where the loss mask has anything but 0 and 1."""
    mask = sample.loss_mask
    if mask is None or sample.remove_sample:  # of which none is read
        return
    try:
        found = set(mask)
    except TypeError:  # lists in the list
        raise ValueError(f"sample {sample.index}: loss_mask must be of 0 and 1, got {list(mask)!r:.60}") from None
    if not found <= {0, 1}:
        raise ValueError(f"sample {sample.index}: loss_mask must be of 0 and 1, got {sorted(found, key=str)[:5]}")


def _check_tokens(sample: Sample, vocab_size: int) -> None:
    try:
        tokens = np.array(sample.tokens or [0])
    except ValueError:  # lists of several lengths
        tokens = np.array([None])
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        strange = [t for t in sample.tokens if isinstance(t, bool) or not isinstance(t, int | np.integer)]
        found = strange[0] if strange else max(sample.tokens, key=abs)  # which no integer of 64 bits holds
        raise ValueError(f"sample {sample.index}: among its tokens is {found!r:.60}: they are ids, integers")
    if (wrong := tokens[(tokens < 0) | (tokens >= vocab_size)]).size:
        raise ValueError(f"sample {sample.index}: {outside_vocabulary(wrong[0], vocab_size)}")


def _check_log_probs(sample: Sample, log_probs: Sequence[Any]) -> None:
    values = as_log_probs(sample, log_probs)
    if not (finite := np.isfinite(values)).all():
        at = int(np.flatnonzero(~finite)[0])
        is_trained = not sample.remove_sample and (sample.loss_mask is None or bool(sample.loss_mask[at]))
        raise ValueError(f"sample {sample.index}: {no_log_prob(at, log_probs[at], is_trained)}")


def as_log_probs(sample: Sample, log_probs: Sequence[Any]) -> np.ndarray:
    """Of a sample, as float32, NaN for None; ValueError where they are not one number a token."""
    try:
        values = np.array(log_probs, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"sample {sample.index}: rollout_log_probs are not all numbers: {error}") from error
    if values.ndim != 1:
        raise ValueError(f"sample {sample.index}: rollout_log_probs must be a number a token, not {log_probs[0]!r:.60}")
    return values


def outside_vocabulary(token: int, vocab_size: int) -> str:
    """What is wrong with a token that the model does not know."""
    return f"token id {token} is outside the model's vocabulary of {vocab_size}"


def no_log_prob(at: int, given: Any, is_trained: bool) -> str:
    """What is wrong with the log-prob of response token ``at``, which is no finite number."""
    consequence = "is trained on" if is_trained else "is masked: give it 0.0"
    return f"the rollout_log_prob of response token {at} is {given}, which {consequence}"
