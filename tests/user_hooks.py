"""Functions that a user might give by a path: the built-in ones written anew, and some with a mistake."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Any]

# ---- --custom-advantage-function-path


def growing_rewards(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Keeps what it was given in ``args.seen``."""
    args.seen = dict(rollout_data)
    rows = zip(*(rollout_data[name] for name in ("rewards", "loss_masks", "response_lengths")), strict=True)
    rollout_data["advantages"] = [reward * (torch.arange(n) + 1) * mask for reward, mask, n in rows]
    if args.use_critic:
        rollout_data["returns"] = [
            a + v for a, v in zip(rollout_data["advantages"], rollout_data["values"], strict=True)
        ]


def sets_nothing(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Forgets the advantages."""


def sets_too_few(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """One token of the third sample is missing."""
    rollout_data["advantages"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]
    rollout_data["advantages"][2] = rollout_data["advantages"][2][1:]


def sets_numbers(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """One number a sample instead of a tensor."""
    rollout_data["advantages"] = [torch.tensor(1.0) for _ in rollout_data["response_lengths"]]


def sets_lists(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Lists of numbers, which do as well."""
    rollout_data["advantages"] = [[2.0] * n for n in rollout_data["response_lengths"]]


def sets_no_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Forgets the critic."""
    rollout_data["advantages"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]


# ---- --custom-loss-function-path


def grpo(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Metrics]:
    """The clipped loss with a KL term (k3) and an entropy bonus."""
    present, entropy = (torch.cat(rows) for rows in batch["log_probs_and_entropy"]())
    advantages, old, ref = (torch.cat(batch[name]) for name in ("advantages", "log_probs", "ref_log_probs"))
    ratio = (present - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    policy = sum_of_sample_mean(torch.maximum(-ratio * advantages, -clipped * advantages))
    kl = sum_of_sample_mean((ref - present).exp() - 1 - (ref - present))
    bonus = sum_of_sample_mean(entropy)
    loss = policy + args.kl_loss_coef * kl - args.entropy_coef * bonus
    return loss, {"pg_loss": policy, "kl_loss": kl.detach(), "entropy_loss": bonus}


grpo.needs_logits = False  # type: ignore[attr-defined]


def imitates_the_better(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of what has a positive advantage; no part of the model where nothing has."""
    better = torch.cat(batch["advantages"]) > 0
    if not better.any():
        return torch.zeros(()), {"pg_loss": 0.0}
    present = torch.cat(batch["log_probs_and_entropy"]()[0])
    loss = sum_of_sample_mean(torch.where(better, -present, 0.0))
    return loss, {"pg_loss": loss}


def pairwise(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Metrics]:
    """Depends on every pair of samples and tokens, so on all of what context-parallel ranks hold."""
    log_probs, entropies = batch["log_probs_and_entropy"]()
    scores = torch.stack([(row * mask).sum() for row, mask in zip(log_probs, batch["loss_masks"], strict=True)])
    spread = (scores[:, None] - scores[None, :]).square().mean() / 100
    loss = spread + sum_of_sample_mean(torch.cat(entropies).square())
    return loss, {"spread_max": spread, "samples": len(scores)}


def not_a_scalar(*_: Any) -> tuple[Tensor, Metrics]:
    """A loss of two entries."""
    return torch.zeros(2, requires_grad=True), {}


def wrong_metric(*_: Any) -> tuple[Tensor, Metrics]:
    """A metric of two entries."""
    return torch.zeros((), requires_grad=True), {"pair": torch.zeros(2)}


class Shy:
    """Raises when it is asked for what it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, *given: Any) -> tuple[Tensor, Metrics]:
        return torch.zeros(()), {}


shy = Shy()


def reduces_too_few(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Metrics]:
    """Forgets the last token."""
    return sum_of_sample_mean(torch.zeros(sum(batch["response_lengths"]) - 1)), {}


# ---- --custom-pg-loss-reducer-function-path


def default_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """The sum over samples of their means, or over tokens."""
    assert all(total > response for total, response in zip(total_lengths, response_lengths, strict=True))

    def reduce(values: Tensor) -> Tensor:
        total = torch.zeros(())
        for row, mask in zip(values.split(response_lengths), loss_masks, strict=True):
            total = total + (row * mask).sum() / (1.0 if calculate_per_token_loss else mask.sum().clamp(min=1))
        return total

    return reduce


def squared_means(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Not linear in the tokens."""
    reduce = default_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)
    return lambda values: reduce(values).square() + reduce(values.square())


def keeps_tokens(*_: Any) -> Callable[[Tensor], Tensor]:
    """No reduction at all."""
    return lambda values: values


# ---- --custom-tis-function-path


def clipped_ratio(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[Tensor, list[Tensor], Metrics]:
    """Token-level importance sampling, limited to the bounds."""
    assert [len(mask) for mask in loss_masks] == response_lengths
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).detach().exp()
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    metrics = {
        "tis": weight,
        "tis_clipfrac": (weight != ratio).float(),
        "tis_abs": list((weight - 1).abs().split(response_lengths)),
    }
    return pg_loss * weight, loss_masks, metrics


def drops_and_mixes(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[Tensor, list[Tensor], Metrics]:
    """Masks tokens out whose ratio is above 1.2, and multiplies the others' loss by its sample's mean."""
    kept, means = [], []
    for mask, mine, engine, loss in zip(
        loss_masks, train_log_probs, rollout_log_probs, pg_loss.split(response_lengths), strict=True
    ):
        kept.append(mask * ((mine - engine).exp() <= 1.2))
        means.append((loss * mask).mean().expand(len(mask)))
    return pg_loss * torch.cat(means), kept, {"kept": torch.cat(kept)}


def forgets_a_token(args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> tuple[Any, ...]:
    """The last mask is too short."""
    return pg_loss, [*loss_masks[:-1], loss_masks[-1][1:]], {}


def returns_no_masks(args: Namespace, *, pg_loss: Tensor, **_: Any) -> tuple[Any, ...]:
    """Forgets all of them."""
    return pg_loss, [], {}


def averages_a_metric(args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> tuple[Any, ...]:
    """A number where tokens belong."""
    return pg_loss, loss_masks, {"mean": 0.5}


def reduces_the_loss(args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> tuple[Any, ...]:
    """A sum where tokens belong."""
    return pg_loss.sum(), loss_masks, {}


# ---- around the model; each notes in ``args.calls`` what it was called with


def megatron_init(args: Namespace) -> None:
    """Megatron's groups are there."""
    from megatron.core import parallel_state

    assert parallel_state.model_parallel_is_initialized()
    args.calls = ["init"]


def model_provider(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, *, args: Namespace, config: Any
) -> Any:
    """slime's own stage."""
    from slime.backends.megatron.model import default_stage

    args.calls.append(("stage", pre_process, post_process, vp_stage))
    return default_stage(args, config, pre_process, post_process, vp_stage)


def no_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """Forgets to return it."""


def before_log_prob(args: Namespace, model: list[Any], store_prefix: str) -> None:
    """Notes which weights are in the model, by a sum over them."""
    total = sum(float(p.detach().double().sum()) for chunk in model for p in chunk.parameters())
    args.calls.append(("log_prob", store_prefix, total))


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """The gradients are zero, and the schedule has made as many steps as there were."""
    assert not any(p.main_grad.any() for chunk in model for p in chunk.parameters())
    assert optimizer.param_groups
    args.calls.append(("step", rollout_id, step_id, opt_param_scheduler.num_steps))


def only_looks(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Log-probs are there before the first step."""
    assert rollout_data["log_probs"][0].shape == rollout_data["advantages"][0].shape
    args.calls.append(("postprocess", rollout_id))


def doubles_advantages(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """In place."""
    for row in rollout_data["advantages"]:
        row.mul_(2)
