"""Users' functions in the trainer, called by slime's own code on a small batch of random numbers, without a model."""

from __future__ import annotations

from typing import Any

from tests.plugin_contracts.contract import Subject

VOCABULARY = 11


def _batch(subject: Subject) -> tuple[Any, list[Any]]:
    """A rank's rows, and their micro-batches with every column that a trainer may have made by then."""
    import numpy as np

    from tests.micro_batches import engine_rows, fresh_rows, near, numbers, packed, put

    batch = fresh_rows(seed=1)
    generator = np.random.default_rng(1)
    old = near(engine_rows(batch), 0.5, generator)
    columns = {
        "old_log_probs": old,
        "ref_log_probs": near(old, 0.5, generator),
        "values": numbers(batch, -1, 1, generator),
        "advantages": numbers(batch, -2, 2, generator),
        "returns": numbers(batch, -2, 2, generator),
    }
    micro_batches = packed(batch, seed=1, per_token_loss=subject.args.calculate_per_token_loss)
    for micro_batch in micro_batches:
        for name, rows in columns.items():
            setattr(micro_batch, name, put(batch, micro_batch, rows))
    return batch, micro_batches


def check_advantages(subject: Subject) -> None:
    """It sets advantages, one tensor a sample, one value a response token"""
    from slime.training.loss.advantages import set_advantages

    batch, micro_batches = _batch(subject)
    for micro_batch in micro_batches:
        micro_batch.advantages = micro_batch.returns = None
    set_advantages(subject.args, batch, micro_batches, None)
    _must_be_finite(subject, "advantages", [m.advantages for m in micro_batches])


def check_loss(subject: Subject) -> None:
    """It returns a scalar with a gradient, and metrics that are scalars"""
    import torch

    from slime.training.loss.hooks import custom_loss

    _, micro_batches = _batch(subject)
    for micro_batch in micro_batches:
        logits = torch.randn(1, len(micro_batch.mask), VOCABULARY).requires_grad_()

        def terms(logits: Any = logits) -> tuple[Any, Any]:
            every = logits[0].log_softmax(-1)
            return every[:, 0], -(every.exp() * every).sum(-1)

        loss, metrics = custom_loss(subject.args, micro_batch, lambda logits=logits: logits, terms, (logits,))
        loss.backward()
        _must_be_finite(subject, "the loss, its metrics or its gradient", [loss, *metrics.values(), logits.grad])
    if logits.grad is None or not logits.grad.any():
        subject.notes.append("the gradient of its loss is 0 on random data")


def check_correction(subject: Subject) -> None:
    """It returns the loss and the masks of all response tokens, and metrics by token"""
    import torch

    from slime.training.loss.hooks import custom_tis

    _, micro_batches = _batch(subject)
    for micro_batch in micro_batches:
        loss = torch.randn(micro_batch.mask.shape).requires_grad_()
        corrected, metrics = custom_tis(subject.args, micro_batch, loss, micro_batch.old_log_probs)
        corrected.sum().backward()
        _must_be_finite(subject, "the loss, its metrics or its gradient", [corrected, *metrics.values(), loss.grad])


def check_reduction(subject: Subject) -> None:
    """It returns a function from the loss of all response tokens to a scalar"""
    import torch

    from slime.training.loss.hooks import reduce_policy_loss

    _, micro_batches = _batch(subject)
    for micro_batch in micro_batches:
        loss = torch.randn(micro_batch.mask.shape).requires_grad_()
        total = reduce_policy_loss(subject.args, micro_batch, loss)
        subject.must(total.requires_grad, "its scalar has no gradient", "compute it of the tokens by torch alone")
        total.backward()
        _must_be_finite(subject, "the loss or its gradient", [total, loss.grad])


def check_postprocess(subject: Subject) -> None:
    """It may change advantages, returns, log-probs and masks, and nothing else"""
    from slime.training.rollout_data import postprocess

    batch, micro_batches = _batch(subject)
    postprocess(subject.args, 0, batch, micro_batches, group=None)
    _must_be_finite(subject, "advantages", [m.advantages for m in micro_batches])


def check_initialisation(subject: Subject) -> None:
    """It runs on a training rank"""
    subject.function(subject.args)


def _must_be_finite(subject: Subject, what: str, tensors: list[Any]) -> None:
    subject.must(
        all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None),
        f"{what} has values that are not finite",
        "look for logarithms of 0 and for divisions by sums of masks that are 0: a sample may be masked out as a whole",
    )
