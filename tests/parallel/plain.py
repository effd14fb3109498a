"""A rollout's optimizer steps in plain PyTorch on Hugging Face models: row by row, nothing packed, nothing split.

The formulas are written anew from their papers, with loops where those have sums over time, in float64 from the logits
on; none of `slime.algorithms` is used.
"""

from __future__ import annotations

import copy
import math
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.data import TrainBatch
from tests.parallel.outcome import CRITIC, VALUE_HEAD, Outcome, Tensors

_INIT_STD = 0.02
_LOSSES = {"train/loss", "train/pg_loss", "train/kl_loss", "train/critic-value_loss"}
"""Metrics that are reduced as the loss is, where that is not a mean."""


class Learner:
    """A model, its optimizer, and what they came to."""

    def __init__(self, args: Namespace, model_dir: Path, *, is_critic: bool = False) -> None:
        self.args, self.prefix = args, CRITIC if is_critic else ""
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        parameters = [p for n, p in self.model.named_parameters() if not is_critic or n != "lm_head.weight"]
        self.head: Tensor | None = None
        if is_critic:
            size, generator = self.model.config.hidden_size, torch.Generator().manual_seed(args.seed)
            self.head = torch.empty(1, size).normal_(0.0, _INIT_STD, generator=generator).requires_grad_()
            parameters.append(self.head)
        self.parameters = parameters
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if args.optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, args.adam_beta2), eps=args.adam_eps)

    def policy_terms(self, rows: TrainBatch, row: int) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every response token, float64."""
        every = self.distributions(rows, row)
        labels = torch.tensor(rows.tokens[row][-len(every) :], dtype=torch.long)
        return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def distributions(self, rows: TrainBatch, row: int) -> Tensor:
        """Log-probs of all ids in the place of every response token, float64."""
        tokens = torch.tensor(rows.tokens[row], dtype=torch.long)
        logits = self.model(tokens[None]).logits[0, :-1].double() / self.args.rollout_temperature
        return torch.log_softmax(logits, dim=-1)[len(logits) - len(rows.loss_mask[row]) :]

    def values(self, rows: TrainBatch, row: int) -> Tensor:
        """The value before every response token, float64."""
        tokens = torch.tensor(rows.tokens[row], dtype=torch.long)
        assert self.head is not None
        before = (self.model.model(tokens[None]).last_hidden_state[0, :-1] @ self.head[0]).double()
        return before[len(before) - len(rows.loss_mask[row]) :]

    def step(self, loss: Tensor, rate: float) -> tuple[dict[str, float], Tensors]:
        """Its metrics, and its gradients before they are clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss.backward()
        gradients = self.named([p.grad for p in self.parameters])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.args.clip_grad)
        self.optimizer.step()
        prefix = self.prefix.replace(".", "-")
        return {f"train/{prefix}grad_norm": float(norm), f"train/{prefix}lr-pg_0": rate}, gradients

    def named(self, tensors: list[Tensor | None]) -> Tensors:
        """Tensors in the shape of the parameters under the names that a Hugging Face directory has."""
        scratch = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in scratch.parameters():
                parameter.zero_()
            own = {id(mine): other for mine, other in zip(self.model.parameters(), scratch.parameters(), strict=True)}
            for parameter, tensor in zip(self.parameters, tensors, strict=True):
                if id(parameter) in own and tensor is not None:
                    own[id(parameter)].copy_(tensor)
        with tempfile.TemporaryDirectory() as directory:
            scratch.save_pretrained(directory)
            named = {self.prefix + n: t.clone() for n, t in load_file(Path(directory, "model.safetensors")).items()}
        if self.head is not None:
            del named[self.prefix + "lm_head.weight"]
            assert tensors[-1] is not None
            named[VALUE_HEAD] = tensors[-1].detach().clone()
        return named


class AdaptedLearner(Learner):
    """A model with adapters of PEFT's, which alone are trained."""

    def __init__(self, args: Namespace, model_dir: Path, adapters: Tensors) -> None:
        super().__init__(args, model_dir)
        config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules)
        self.model = get_peft_model(self.model, config)
        own = dict(self.model.named_parameters())
        self._names = sorted(adapters)
        self.parameters = [own[name.replace(".weight", ".default.weight")] for name in self._names]
        with torch.no_grad():
            for name, parameter in zip(self._names, self.parameters, strict=True):
                parameter.copy_(adapters[name])
        assert {id(p) for p in self.parameters} == {id(p) for p in self.model.parameters() if p.requires_grad}
        betas = (0.9, args.adam_beta2)
        decay = args.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=betas, eps=args.adam_eps, weight_decay=decay)

    def named(self, tensors: list[Tensor | None]) -> Tensors:
        return {name: t.detach().clone() for name, t in zip(self._names, tensors, strict=True) if t is not None}


def log_probs(args: Namespace, model_dir: Path, rows: TrainBatch) -> list[Any]:
    """Of every row's response by the model of a directory, as numpy arrays."""
    learner = Learner(args, model_dir)
    with torch.no_grad():
        return [learner.policy_terms(rows, row)[0].numpy() for row in range(len(rows))]


def train(
    args: Namespace,
    model_dir: Path,
    rollouts: list[tuple[TrainBatch, int]],
    rates: list[float] | None = None,
    adapters: Tensors | None = None,
) -> Outcome:
    """Train on rollouts, each in a number of steps; ``rates`` is the learning rate of each, or `args.lr` throughout.

    Args:
        adapters: to train in place of all weights, by PEFT's names.
    """
    actor = Learner(args, model_dir) if adapters is None else AdaptedLearner(args, model_dir, adapters)
    critic = Learner(args, model_dir, is_critic=True) if args.use_critic else None
    reference = Learner(args, model_dir)
    teacher = Learner(args, Path(args.opd_teacher_load)) if args.use_opd else None
    outcome = Outcome()
    remaining = iter(rates or [])
    for rows, steps in rollouts:
        known = Known(args, rows, actor, reference, critic, teacher)
        ids = list(dict.fromkeys(rows.rollout_ids.tolist()))
        size = len(ids) // steps
        parts = [[i for i in range(len(rows)) if rows.rollout_ids[i] in ids[s * size : (s + 1) * size]]
                 for s in range(steps)]  # fmt: skip
        for part in parts:
            outcome.metrics.append({})
            outcome.gradients.append({})
            for learner in (critic, actor):
                if learner is None:
                    continue
                loss, metrics = _loss(args, rows, part, learner, known)
                rate = next(remaining) if rates else args.lr if learner is actor else args.critic_lr or args.lr
                more, gradients = learner.step(loss, rate)
                outcome.metrics[-1] |= metrics | more
                outcome.gradients[-1] |= gradients
        outcome.nearest = min(outcome.nearest, known.nearest)
    for learner in (critic, actor):
        if learner is not None:
            outcome.weights |= learner.named([p.detach() for p in learner.parameters])
    return outcome


class Known:
    """What is known of a rollout's rows before its first step; and how near its steps come to any bound."""

    @torch.no_grad()
    def __init__(
        self,
        args: Namespace,
        rows: TrainBatch,
        actor: Learner,
        reference: Learner,
        critic: Learner | None,
        teacher: Learner | None,
    ) -> None:
        self.nearest = math.inf
        every = range(len(rows))
        self.masks = [torch.tensor(rows.loss_mask[row], dtype=torch.float64) for row in every]
        self.engine = None
        if rows.rollout_log_probs is not None:
            self.engine = [torch.tensor(rows.rollout_log_probs[row], dtype=torch.float64) for row in every]
        if args.loss_type == "sft_loss":
            return
        self.trainer = [actor.policy_terms(rows, row)[0] for row in every]
        self.reference = [reference.policy_terms(rows, row)[0] for row in every] if args.needs_reference else None
        self.values = [critic.values(rows, row) for row in every] if critic else None
        penalties = [torch.zeros_like(mask) for mask in self.masks]
        if args.kl_coef:
            assert self.reference is not None
            penalties = [-args.kl_coef * _kl(args, self.trainer[row], self.reference[row]) for row in every]
        self.advantages, self.returns = [], []
        for row in every:
            reward = float(rows.rewards[row])
            if self.values is None:
                self.advantages.append((reward + penalties[row]) * self.masks[row])
            else:
                advantages, returns = _gae(args, reward, penalties[row], self.values[row], self.masks[row])
                self.advantages.append(advantages)
                self.returns.append(returns)
        self.reverse_kl = self.taught = None
        if teacher is not None and args.opd_top_k:
            self.taught = [teacher.distributions(rows, row) for row in every]
        elif teacher is not None:
            self.reverse_kl = [self.trainer[row] - teacher.policy_terms(rows, row)[0] for row in every]
            for row in every:
                self.advantages[row] = self.advantages[row] - args.opd_kl_coef * self.reverse_kl[row] * self.masks[row]
        if args.normalize_advantages:
            trained = torch.cat([a[m > 0] for a, m in zip(self.advantages, self.masks, strict=True)])
            mean, deviation = trained.mean(), (trained.var() + 1e-8).sqrt()
            self.advantages = [(a - mean) / deviation * m for a, m in zip(self.advantages, self.masks, strict=True)]

    def note(self, row: int, x: Tensor, *bounds: float) -> None:
        """Values of a row's tokens, and where they would count as others."""
        trained = x.detach()[self.masks[row] > 0]
        for bound in bounds if len(trained) else ():
            self.nearest = min(self.nearest, float((trained - bound).abs().min()))


def _gae(args: Namespace, reward: float, penalty: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) over the trained tokens, from the last to the first."""
    advantages, returns = torch.zeros_like(mask), torch.zeros_like(mask)
    following, carried, terminal = 0.0, 0.0, reward
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = float(penalty[t]) + terminal + args.gamma * following - float(values[t])
            carried = delta + args.gamma * args.lambd * carried
            following, terminal = float(values[t]), 0.0
            advantages[t], returns[t] = carried, carried + following
    return advantages, returns


def _kl(args: Namespace, log_probs: Tensor, base: Tensor) -> Tensor:
    d = log_probs - base
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d, "low_var_kl": (torch.exp(-d) - 1 + d)}[
        args.kl_loss_type
    ]


def _loss(
    args: Namespace, rows: TrainBatch, part: list[int], learner: Learner, known: Known
) -> tuple[Tensor, dict[str, float]]:
    """A step's loss and metrics: every token's, weighted. Fully masked rollouts count in the loss and in no mean."""
    rollouts = {int(rows.rollout_ids[row]) for row in part}
    trained = dict.fromkeys(rollouts, 0.0)
    for row in part:
        trained[int(rows.rollout_ids[row])] += float(known.masks[row].sum())
    total = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, float] = {}
    for row in part:
        mask = known.masks[row]
        share = mask / max(trained[int(rows.rollout_ids[row])], 1.0)
        weights, in_loss = share / sum(count > 0 for count in trained.values()), share / len(rollouts)
        if args.calculate_per_token_loss:
            weights = in_loss = mask / sum(trained.values())
        if args.loss_constant_length is not None:  # arXiv:2503.20783
            in_loss = mask / args.loss_constant_length / len(rollouts)
        loss, report = _token_loss(args, rows, row, learner, known)
        total = total + (loss * in_loss).sum()
        for name, value in report.items():
            if name.endswith("_max"):
                metrics[name] = max(metrics.get(name, 0.0), float((value * mask).max()))
            else:
                is_users = args.loss_type == "custom_loss" and "rollout" not in name
                own = in_loss if name in _LOSSES or is_users else weights
                metrics[name] = metrics.get(name, 0.0) + float((value * own).sum().detach())
    return total, metrics


def _token_loss(
    args: Namespace, rows: TrainBatch, row: int, learner: Learner, known: Known
) -> tuple[Tensor, dict[str, Tensor]]:
    if learner.head is not None:
        return _value_loss(args, learner.values(rows, row), row, known)
    log_probs, entropy = learner.policy_terms(rows, row)
    if args.loss_type == "sft_loss":
        return -log_probs, {"train/loss": -log_probs, "train/entropy_loss": entropy}
    if args.loss_type == "custom_loss":
        return _custom_loss(args, row, log_probs, entropy, known)
    loss, report = _policy_loss(args, row, log_probs, entropy, known)
    if known.taught is not None:
        kl = _binned_kl(learner.distributions(rows, row), known.taught[row], args.opd_top_k)
        loss = loss + args.opd_kl_coef * kl
        report |= {"train/loss": loss, "train/opd_reverse_kl": kl}
    return loss, report


def _binned_kl(ours: Tensor, theirs: Tensor, count: int) -> Tensor:
    """KL(student || teacher), of the teacher's likeliest ids and of all others as one."""
    top = theirs.topk(count).indices
    bins = [torch.cat([e, (1 - e.sum(-1, keepdim=True)).clamp(min=1e-4)], -1)
            for e in (ours.exp().gather(1, top), theirs.exp().gather(1, top))]  # fmt: skip
    return (bins[0] * (bins[0] / bins[1]).log()).sum(-1)


def _custom_loss(
    args: Namespace, row: int, log_probs: Tensor, entropy: Tensor, known: Known
) -> tuple[Tensor, dict[str, Tensor]]:
    """Those of `tests.user_hooks`, which report what they compute; the mismatch is reported besides."""
    assert known.engine is not None
    mismatch = _mismatch(args, log_probs, known.trainer[row], known.engine[row])
    if args.custom_loss_function_path.endswith(":imitates_the_better"):
        loss = torch.where(known.advantages[row] > 0, -log_probs, 0.0)
        return loss, mismatch | {"train/loss": loss, "train/pg_loss": loss}
    loss, report = _policy_loss(args, row, log_probs, entropy, known)
    names = ("train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss")
    return loss, mismatch | {name: report[name] for name in names}


def _value_loss(args: Namespace, values: Tensor, row: int, known: Known) -> tuple[Tensor, dict[str, Tensor]]:
    """The larger of the squared errors of the value and of the value within its range."""
    assert known.values is not None
    old, returns = known.values[row], known.returns[row]
    known.note(row, values - old, -args.value_clip, args.value_clip)
    within = torch.minimum(torch.maximum(values, old - args.value_clip), old + args.value_clip)
    loss = torch.maximum((values - returns) ** 2, (within - returns) ** 2)
    return loss, {
        "train/critic-value_loss": loss,
        "train/critic-value_clipfrac": ((values - old).abs() > args.value_clip).double(),
        "rollout/values": old,
        "rollout/returns": returns,
    }


def _policy_loss(
    args: Namespace, row: int, log_probs: Tensor, entropy: Tensor, known: Known
) -> tuple[Tensor, dict[str, Tensor]]:
    old, mask, advantages = known.trainer[row], known.masks[row], known.advantages[row]
    if args.use_rollout_logprobs:
        assert known.engine is not None
        old = known.engine[row]
    ratio = torch.exp(log_probs - old)
    if args.advantage_estimator == "gspo":
        ratio = torch.exp(_row_mean(log_probs - old, mask)).expand(len(mask))
    known.note(row, ratio, 1 - args.eps_clip, 1 + args.eps_clip_high)
    pg, clipped = _surrogate(args, log_probs, ratio, advantages)
    report = {
        "train/ois": torch.exp(log_probs - old),
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": clipped.double(),
        "train/ppo_kl": old - log_probs,
        "rollout/log_probs": old,
        "rollout/advantages": advantages,
    }
    if known.reverse_kl is not None:
        report["train/opd_reverse_kl"] = known.reverse_kl[row]
    if args.use_opsm:
        drift = _row_mean((old - log_probs).detach(), mask)
        known.note(row, drift.expand(len(mask)), args.opsm_delta)
        dropped = (advantages < 0) & (drift > args.opsm_delta)
        pg = torch.where(dropped, 0.0, pg)
        report["train/opsm_clipfrac"] = dropped.double()
    if known.engine is not None:
        pg, more = _corrected(args, row, pg, known)
        report |= more | _mismatch(args, log_probs, known.trainer[row], known.engine[row])
    loss = pg - args.entropy_coef * entropy
    if known.reference is not None:
        report["rollout/ref_log_probs"] = known.reference[row]
        if args.kl_coef:
            report["rollout/kl"] = _kl(args, known.trainer[row], known.reference[row])
        if args.use_kl_loss:
            kl = _kl(args, log_probs, known.reference[row])
            if args.use_unbiased_kl:
                kl = kl * torch.exp(log_probs - old)
            if args.kl_loss_type == "low_var_kl":
                kl = kl.clamp(-10, 10)
            report["train/kl_loss"] = kl
            loss = loss + args.kl_loss_coef * kl
    return loss, report | {"train/loss": loss, "train/pg_loss": pg}


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1)


def _surrogate(args: Namespace, log_probs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """The policy loss and where it is clipped: PPO (arXiv:1707.06347), GSPO (arXiv:2507.18071, eq. 5 and 7), CISPO
    (arXiv:2506.13585, eq. 4), dual clip (arXiv:1912.09729)."""
    low, high = 1 - args.eps_clip, 1 + args.eps_clip_high
    if args.advantage_estimator == "cispo":
        weight = ratio.detach().clamp(low, high)
        return -weight * advantages * log_probs, (ratio < low) | (ratio > high)
    gain, limited = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(gain, limited)
    if args.eps_clip_c is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, args.eps_clip_c * advantages), objective)
    return -objective, limited < gain


def _level(kind: str, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The trainer's probabilities over the engine's: a token's, the row's, or the row's geometric mean."""
    if kind == "token":
        return torch.exp(log_ratio)
    whole = float((log_ratio * mask).sum())
    exponent = whole if kind == "sequence" else whole / max(float(mask.sum()), 1.0)
    return torch.full_like(log_ratio, math.exp(exponent))


def _corrected(args: Namespace, row: int, pg: Tensor, known: Known) -> tuple[Tensor, dict[str, Tensor]]:
    assert known.engine is not None
    log_ratio, mask = known.trainer[row] - known.engine[row], known.masks[row]
    report = {}
    if args.use_tis:
        ratio = _level(args.tis_level, log_ratio, mask)
        known.note(row, ratio, args.tis_clip_low, args.tis_clip)
        below, above = ratio < args.tis_clip_low, ratio > args.tis_clip
        limited = torch.where(above, args.tis_clip, ratio)
        if args.tis_mode == "clip":
            limited = torch.where(below, args.tis_clip_low, limited)
        elif args.tis_mode == "mask":
            limited = torch.where(below | above, 0.0, ratio)
        pg = pg * limited
        report = {
            "train/tis": limited,
            "train/tis_clipfrac": (limited != ratio).double(),
            "train/tis_abs": (limited - 1).abs(),
        }
    if args.use_rs:
        ratio = _level(args.rs_level, log_ratio, mask)
        known.note(row, ratio, args.rs_lower_bound, args.rs_upper_bound)
        dropped = (ratio < args.rs_lower_bound) | (ratio > args.rs_upper_bound)
        if args.rs_veto_threshold is not None and mask.any():
            known.note(row, log_ratio, math.log(args.rs_veto_threshold))
            dropped = dropped | (log_ratio[mask > 0].min() < math.log(args.rs_veto_threshold))
        pg = torch.where(dropped, 0.0, pg)
        report["train/rs_dropfrac"] = dropped.double()
    return pg, report


def _mismatch(args: Namespace, present: Tensor, trainer: Tensor, engine: Tensor) -> dict[str, Tensor]:
    mine = present.detach() if args.use_rollout_logprobs else trainer
    return {
        "rollout/rollout_log_probs": engine,
        "train/train_rollout_logprob_abs_diff": (mine - engine).abs(),
        "train/train_rollout_logprob_abs_diff_max": (mine - engine).abs(),
        "train/train_rollout_kl": torch.exp(mine - engine) - 1 + engine - mine,
    }
