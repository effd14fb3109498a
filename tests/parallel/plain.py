"""A rollout's optimizer steps in plain PyTorch on a Hugging Face model: row by row, nothing packed, nothing split."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.utils.types import TrainBatch


def train(
    args: Namespace, model_dir: Path, rollouts: list[TrainBatch], steps: int, rates: list[float]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of every step over all rollouts, with the learning rates ``rates``, and the final weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    reference = copy.deepcopy(model).requires_grad_(False)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, args.adam_beta2), eps=args.adam_eps)
    remaining = iter(rates)
    metrics = []
    for rows in rollouts:
        with torch.no_grad():
            ref = [_terms(args, reference, rows, row)[0] for row in range(len(rows))]
            old = [_terms(args, model, rows, row)[0] for row in range(len(rows))]
        size = len(rows) // steps
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = next(remaining) if group is optimizer.param_groups[0] else optimizer.param_groups[0]["lr"]
            chosen = range(step * size, (step + 1) * size)
            metrics.append(_step(args, model, optimizer, rows, chosen, old, ref))
    return metrics, {name: p.detach() for name, p in model.named_parameters()}


def _terms(args: Namespace, model: torch.nn.Module, rows: TrainBatch, row: int) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token."""
    tokens = torch.tensor(rows.tokens[row], dtype=torch.long)
    logits = model(tokens[None]).logits[0, :-1] / args.rollout_temperature
    every = torch.log_softmax(logits, dim=-1)
    own = every.gather(1, tokens[1:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    response = len(rows.loss_mask[row])
    return own[len(own) - response :], entropy[len(own) - response :]


def _step(
    args: Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: TrainBatch,
    chosen: range,
    old: list[Tensor],
    ref: list[Tensor],
) -> dict[str, float]:
    loss_tokens = sum(int(rows.loss_mask[row].sum()) for row in chosen)
    total = torch.zeros(())
    metrics: dict[str, float] = {}
    for row in chosen:
        mask = torch.tensor(rows.loss_mask[row], dtype=torch.float32)
        weights = mask / loss_tokens if args.calculate_per_token_loss else mask / mask.sum().clamp(min=1) / len(chosen)
        log_probs, entropy = _terms(args, model, rows, row)
        loss, report = _losses(args, rows, row, log_probs, entropy, old[row], ref[row])
        total = total + (loss * weights).sum()
        for name, value in report.items():
            metrics[name] = metrics.get(name, 0.0) + float((value * weights).sum().detach())
        if "train/train_rollout_logprob_abs_diff" in report:
            largest = float((report["train/train_rollout_logprob_abs_diff"] * mask).max())
            name = "train/train_rollout_logprob_abs_diff_max"
            metrics[name] = max(metrics.get(name, 0.0), largest)
    optimizer.zero_grad()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    optimizer.step()
    return metrics | {
        "train/grad_norm": float(norm),
        "train/lr-pg_0": optimizer.param_groups[0]["lr"],
        "train/lr-pg_1": optimizer.param_groups[0]["lr"],
    }


def _losses(
    args: Namespace, rows: TrainBatch, row: int, log_probs: Tensor, entropy: Tensor, old: Tensor, ref: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    if args.loss_type == "sft_loss":
        return -log_probs, {"train/loss": -log_probs, "train/entropy_loss": entropy}
    advantage = float(rows.rewards[row])
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 1 - args.eps_clip, 1 + args.eps_clip_high)
    pg = torch.maximum(-ratio * advantage, -clipped * advantage)
    if args.eps_clip_c is not None and advantage < 0:
        pg = torch.clamp(pg, max=-args.eps_clip_c * advantage)
    difference = log_probs - ref
    kl = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "low_var_kl": (torch.exp(-difference) - 1 + difference).clamp(-10, 10),
    }[args.kl_loss_type]
    loss = pg - args.entropy_coef * entropy + args.kl_loss_coef * kl
    report = {
        "train/loss": loss,
        "train/pg_loss": pg,
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": (-clipped * advantage > -ratio * advantage).float(),
        "train/ppo_kl": old - log_probs,
        "train/kl_loss": kl,
        "rollout/log_probs": old,
        "rollout/ref_log_probs": ref,
        "rollout/advantages": torch.full_like(old, advantage),
    }
    if rows.rollout_log_probs is not None:
        engine = torch.tensor(rows.rollout_log_probs[row])
        report["rollout/rollout_log_probs"] = engine
        report["train/train_rollout_logprob_abs_diff"] = (old - engine).abs()
    return loss, report
