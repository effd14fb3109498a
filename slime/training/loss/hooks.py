"""Users' functions inside the loss. They see whole responses, whatever the layout, and their gradients are right.

Under context parallelism every rank gathers the whole responses and calls the function; what it returns as a scalar
counts on the first of them only.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slime.data.columns import LOSS_MASK, TOKENS
from slime.training.micro_batch import MicroBatch
from slime.training.rollout_data import known_columns
from slime.utils.misc import attribute_of, load_function
from slime.utils.user_functions import call_user_function


def reduce_policy_loss(args: Namespace, batch: MicroBatch, pg_loss: Tensor) -> Tensor:
    """The scalar that ``--custom-pg-loss-reducer-function-path`` makes of the policy loss's tokens, over the step.

    Its function gets lengths and masks of the micro-batch's samples, and returns one that takes the loss of all their
    response tokens, one after the other, to the *sum* over samples (over tokens with ``--calculate-per-token-loss``).
    It does not know of rollouts: one that is cut into several samples counts as many times.
    """
    flag, path = "--custom-pg-loss-reducer-function-path", args.custom_pg_loss_reducer_function_path
    described = _described(batch)
    values = {name: described[name] for name in ("total_lengths", "response_lengths", "loss_masks")}
    reducer = call_user_function(flag, path, values | {"calculate_per_token_loss": args.calculate_per_token_loss})
    total = reducer(batch.responses.gather(pg_loss))
    return _scalar(total, f"{flag} {path}: its reducer") / _denominator(args, batch) * batch.counts_scalars


def custom_tis(
    args: Namespace, batch: MicroBatch, pg_loss: Tensor, train_log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of ``--custom-tis-function-path``; the denominators stay those of the original masks."""
    flag, path = "--custom-tis-function-path", args.custom_tis_function_path
    responses = batch.responses
    assert batch.rollout_log_probs is not None
    described = _described(batch)
    columns = {
        "pg_loss": responses.gather(pg_loss),
        "train_log_probs": responses.rows(train_log_probs),
        "rollout_log_probs": responses.rows(batch.rollout_log_probs),
    }
    pg_loss, loss_masks, metrics = call_user_function(flag, path, {"args": args}, columns | described)
    returned = {"the loss": pg_loss, "loss_masks": loss_masks} | {f"metric {k}": v for k, v in metrics.items()}
    vectors = {what: _response_vector(batch, value, f"{flag} {path}: {what}") for what, value in returned.items()}
    means = {f"train/{name}": responses.scatter(vectors[f"metric {name}"].detach()) for name in metrics}
    return responses.scatter(vectors["the loss"] * vectors["loss_masks"]), means


def custom_loss(
    args: Namespace,
    batch: MicroBatch,
    logits: Callable[[], Tensor],
    terms: Callable[[], tuple[Tensor, Tensor]],
    reached: Iterable[Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss of ``--custom-loss-function-path``, and of its metrics.

    The function gets ``(args, batch, logits, sum_of_sample_mean)``: a dict with what is known of the samples, the
    logits of this rank's part of the packed stream, float32 [1, T, V / tp], and the reduction of a loss: a function
    that takes the values of all response tokens, one sample after the other, to the sum over samples of the mean over
    its trained tokens. ``batch["log_probs_and_entropy"]()`` gives two lists with a tensor for every sample's response,
    with gradient. It returns the loss, so reduced, and a dict of scalars, likewise, in which what is missing counts as
    0. A loss that is a constant is not a mistake: where nothing is left to learn from, there is no gradient. A function
    whose attribute ``needs_logits`` is False gets None for them, and they are not computed.

    Args:
        reached: tensors that the backward pass arrives at from any loss, whatever it depends on.
    """
    flag, path = "--custom-loss-function-path", args.custom_loss_function_path
    data: dict[str, Any] = known_columns([batch], without=(LOSS_MASK, TOKENS)) | _described(batch)
    data["tokens"] = batch.tokens
    data["log_probs_and_entropy"] = lambda: tuple(batch.responses.rows(column) for column in terms())
    function = load_function(path, flag=flag)
    every = logits() if attribute_of(function, "needs_logits", True, f"{flag} {path}") else None
    given = {"args": args, "batch": data, "logits": every, "sum_of_sample_mean": _sum_of_sample_mean(batch, args)}
    loss, metrics = call_user_function(flag, path, given)
    share = batch.counts_scalars / _denominator(args, batch)
    # Every rank's backward pass has to reach the collectives of every other's, also from a loss that does not depend on
    # the model: by sums of no elements, which are 0 even where 0 times an element is not.
    total = _scalar(loss, f"{flag} {path}: the loss") * share + sum(tensor[:0].sum() for tensor in reached)
    values = {name: torch.as_tensor(value, device=total.device).detach() for name, value in metrics.items()}
    report = {f"train/{name}": _scalar(value.float(), f"{flag} {path}: {name}") for name, value in values.items()}
    return total, {name: value * share for name, value in report.items()} | {"train/loss": total.detach()}


def _described(batch: MicroBatch) -> dict[str, Any]:
    return {
        "total_lengths": batch.lengths,
        "response_lengths": batch.response_lengths,
        "loss_masks": batch.responses.rows(batch.mask),
    }


def _sum_of_sample_mean(batch: MicroBatch, args: Namespace) -> Callable[[Tensor], Tensor]:
    """With the whole step's denominators: weights times the step's count."""
    weights = batch.responses.gather(batch.weights) * _denominator(args, batch)

    def reduce(values: Tensor) -> Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"sum_of_sample_mean takes {len(weights)} response tokens, not {tuple(values.shape)}")
        return (values * weights).sum()

    return reduce


def _denominator(args: Namespace, batch: MicroBatch) -> int:
    return max(batch.step.num_tokens, 1) if args.calculate_per_token_loss else batch.step.num_rollouts


def _scalar(value: Tensor, what: str) -> Tensor:
    if value.numel() != 1:
        raise ValueError(f"{what} must be a scalar, not of shape {tuple(value.shape)}")
    return value.reshape(())


def _response_vector(batch: MicroBatch, value: Any, what: str) -> Tensor:
    """One tensor, or a list with one a sample, as a float response vector."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    tensors = [torch.as_tensor(part, device=batch.mask.device).float() for part in parts]
    count = len(batch.responses.positions)
    if any(tensor.dim() != 1 for tensor in tensors) or sum(len(tensor) for tensor in tensors) != count:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:8])
        raise ValueError(f"{what} must have a value for each of the {count} response tokens, not shapes {shapes}")
    return torch.cat(tensors)
