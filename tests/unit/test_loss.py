"""Token losses and their reduction."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron.attention import packed_params
from slime.backends.megatron.batch import MicroBatch
from slime.backends.megatron.loss import LOSSES, TokenLoss, grpo_loss, reduce_tokens, sft_loss

TOKENS = 50


def arguments(**options: Any) -> Namespace:
    defaults = {
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
    }
    return Namespace(**{**defaults, **options})


def micro_batch(**columns: Tensor | None) -> MicroBatch:
    weights = torch.rand(TOKENS) * (torch.rand(TOKENS) < 0.7)
    made = {
        "tokens": torch.zeros(1, TOKENS, dtype=torch.long),
        "position_ids": torch.arange(TOKENS)[None],
        "packed_seq_params": packed_params([TOKENS]),
        "labels": torch.zeros(TOKENS, dtype=torch.long),
        "weights": weights,
        "advantages": torch.randn(TOKENS),
        "rollout_log_probs": None,
    }
    return MicroBatch(**{**made, **columns})  # type: ignore[arg-type]


def policy() -> tuple[Tensor, Tensor]:
    return (-3 * torch.rand(TOKENS)).requires_grad_(), torch.rand(TOKENS).requires_grad_()


def test_first_step_has_ratio_one_and_the_policy_gradient() -> None:
    log_probs, entropy = policy()
    batch = micro_batch()
    loss = grpo_loss(arguments(), batch, log_probs, entropy)
    assert torch.equal(loss.loss, -batch.advantages)
    assert torch.equal(loss.means["train/ppo_kl"], torch.zeros(TOKENS))
    assert not loss.means["train/pg_clipfrac"].any()
    loss.loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -batch.advantages)
    assert set(loss.means) == {
        "train/loss",
        "train/pg_loss",
        "train/entropy_loss",
        "train/pg_clipfrac",
        "train/ppo_kl",
        "rollout/log_probs",
        "rollout/advantages",
    }


def test_clipped_tokens_have_no_gradient() -> None:
    log_probs, entropy = policy()
    old = log_probs.detach() - torch.where(torch.arange(TOKENS) % 2 == 0, 0.5, 0.1)
    batch = micro_batch(old_log_probs=old, advantages=torch.ones(TOKENS))
    loss = grpo_loss(arguments(eps_clip=0.2, eps_clip_high=0.3), batch, log_probs, entropy)
    loss.loss.sum().backward()
    assert log_probs.grad is not None
    assert not log_probs.grad[::2].any()
    torch.testing.assert_close(log_probs.grad[1::2], -torch.tensor(0.1).exp().expand(TOKENS // 2))
    assert loss.means["train/pg_clipfrac"].tolist() == [1.0, 0.0] * (TOKENS // 2)
    torch.testing.assert_close(loss.means["train/ppo_kl"].detach(), old - log_probs.detach())


def test_kl_and_entropy_are_added_with_their_weights() -> None:
    log_probs, entropy = policy()
    ref = log_probs.detach() + 0.3 * torch.randn(TOKENS)
    batch = micro_batch(ref_log_probs=ref)
    loss = grpo_loss(arguments(entropy_coef=0.02, kl_loss_coef=0.5, kl_loss_type="k2"), batch, log_probs, entropy)
    kl = (log_probs - ref).square() / 2
    torch.testing.assert_close(loss.loss, -batch.advantages - 0.02 * entropy + 0.5 * kl)
    torch.testing.assert_close(loss.means["train/kl_loss"], kl)
    assert torch.equal(loss.means["rollout/ref_log_probs"], ref)
    same = grpo_loss(arguments(), micro_batch(ref_log_probs=log_probs.detach()), log_probs, entropy)
    assert not same.means["train/kl_loss"].any()


def test_difference_to_the_engine_is_that_of_counted_tokens() -> None:
    log_probs, entropy = policy()
    engine = log_probs.detach() + 0.01
    batch = micro_batch(rollout_log_probs=engine)
    ignored, counted = int((batch.weights == 0).nonzero()[0]), int((batch.weights > 0).nonzero()[0])
    engine[ignored] += 100.0
    engine[counted] += 0.5
    _, report = reduce_tokens(grpo_loss(arguments(), batch, log_probs, entropy), batch.weights)
    assert float(report["train/train_rollout_logprob_abs_diff_max"]) == pytest.approx(0.51, rel=1e-4)
    wanted = 0.01 * float(batch.weights.sum()) + 0.5 * float(batch.weights[counted])
    assert float(report["train/train_rollout_logprob_abs_diff"]) == pytest.approx(wanted, rel=1e-3)


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    log_probs, entropy = policy()
    batch = micro_batch()
    total, report = reduce_tokens(sft_loss(arguments(), batch, log_probs, entropy), batch.weights)
    torch.testing.assert_close(total, -(log_probs * batch.weights).sum())
    assert set(report) == {"train/loss", "train/entropy_loss"}
    total.backward()
    torch.testing.assert_close(log_probs.grad, -batch.weights)


def test_sums_do_not_depend_on_where_the_stream_is_cut() -> None:
    weights, values = torch.rand(TOKENS), torch.randn(TOKENS)

    def report(part: slice) -> dict[str, Tensor]:
        loss = TokenLoss(values[part], {"mean": values[part]}, {"largest": values[part].abs()})
        return reduce_tokens(loss, weights[part])[1]

    whole = report(slice(None))
    parts = [report(slice(0, 13)), report(slice(13, 40)), report(slice(40, TOKENS))]
    torch.testing.assert_close(whole["mean"], sum(part["mean"] for part in parts))
    assert whole["largest_max"] == max(part["largest_max"] for part in parts)


def test_every_loss_type_has_a_function() -> None:
    assert set(LOSSES) == {"policy_loss", "sft_loss"}
