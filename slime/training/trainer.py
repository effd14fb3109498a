"""Training on rollouts, whatever the backend: optimizer steps of the actor, and of the critic where there is one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from slime.data import TrainBatch, text_batch
from slime.data.columns import TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from slime.files.checkpoints import find_checkpoint
from slime.files.storage import writing
from slime.observability.trace import span
from slime.options.checks.hook_paths import columns_of
from slime.options.training import micro_batch_multiple
from slime.training.bad_steps import BAD_STEPS, bad_loss
from slime.training.checks import check_finite, check_step
from slime.training.loss import divergence, hooks
from slime.training.loss.advantages import set_advantages
from slime.training.loss.log_probs import logits, token_terms
from slime.training.loss.token_loss import (
    LOSSES,
    add_distillation,
    mismatch_report,
    reduce_tokens,
    step_metrics,
    value_loss,
)
from slime.training.memory.log import MemoryLog
from slime.training.memory.recorder import MemoryRecorder
from slime.training.memory.weight_sets import REFERENCE, TEACHER
from slime.training.micro_batch import MicroBatch
from slime.training.packing import PackLayout
from slime.training.parallel import Parallel
from slime.training.protocol import Learner, LossOf, Report
from slime.training.rollout_data import postprocess, save_train_data, weigh
from slime.utils import device

_READS_LOG_PROBS = ("custom_advantage_function_path", "rollout_data_postprocess_path", "save_debug_train_data")
"""Options whose readers want the log-probs before the first step, which otherwise may be its own."""
_SCORES = "<scores>"
"""A name that no column has."""
_TRAINED_TOKENS = "trained_tokens"
"""What a step counts beside its metrics, of all ranks: response tokens that are in the loss."""


class RolloutTrainer:
    """What trainers of all backends share of `slime.training.protocol.Trainer`.

    A backend's own joins the ranks, makes the learners, and adds how weights are exported and saved for others.

    Attributes:
        parallel: this rank's neighbours.
    """

    _actor: Learner
    _critic: Learner | None

    def __init__(self, args: Namespace, parallel: Parallel, describe: Callable[[Sequence[int]], Any]) -> None:
        """``describe`` is `PackLayout.describe`."""
        self.args, self.parallel = args, parallel
        self.dp_rank, self.dp_size = parallel.dp.rank, parallel.dp.size
        self._found = find_checkpoint(args.load, args.ckpt_step) if args.load else None
        self.start_rollout_id, self.resumed_from = 0, None
        if self._found is not None:
            self.start_rollout_id, self.resumed_from = self._found[1] + 1, str(self._found[0])
        self._recorder = MemoryRecorder(args, dist.get_rank())
        self._memory, self._seconds = MemoryLog(self._recorder), dict[str, float]()
        self._kept_versions: list[int] = []
        self._layout = PackLayout(parallel, device.current_device(), columns_of(args), args, describe)

    # ---- device memory

    def sleep(self, *, keep_weights: bool) -> None:
        with self._memory.phase("sleep"):
            budget = self._actor.sleep(keep_weights=keep_weights, budget=int(self.args.offload_budget_gib * 2**30))
            if self._critic is not None:
                self._critic.sleep(keep_weights=False, budget=budget)
            device.release_unused()

    def wake(self, *, weights_only: bool) -> device.Memory:
        asleep = device.memory()
        with self._memory.phase("wake"):
            self._actor.wake(weights_only=weights_only)
            if self._critic is not None and not weights_only:
                self._critic.wake(weights_only=False)
        return asleep

    # ---- a text

    def score(self, tokens: Sequence[int]) -> list[float] | None:
        if any(column.model_input is not None or column.load is not None for column in self._layout.columns):
            return None
        batch = text_batch(tokens)
        (step,), count = batch.steps, micro_batch_multiple(self.args)
        micro_batches = [MicroBatch(batch, step.micro_batches[0], step, self._layout) for _ in range(count)]
        self._actor.compute_column(micro_batches, _SCORES, self._scores)
        scores = micro_batches[0].get(_SCORES)
        if scores is None:
            return None
        log_probs: list[float] = micro_batches[0].responses.rows(scores)[0].tolist()
        return log_probs

    def _scores(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        return self._terms(micro_batch, hidden, temperature=1.0)[0]

    # ---- training

    def train(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        args, seconds = self.args, self._seconds
        seconds.clear()
        device.synchronize_stream()
        with _profiled(args, "train_overall", rollout_id), span("train/rollout", rollout=rollout_id) as whole:
            with self._span("pack"):
                packed = [
                    [MicroBatch(batch, rows, step, self._layout) for rows in step.micro_batches] for step in batch.steps
                ]
            everything = [m for micro_batches in packed for m in micro_batches]
            if args.custom_convert_samples_to_train_data_path is not None and self.parallel.is_last_stage:
                weigh(batch, everything, self.parallel.dp.group)
            if args.loss_type != "sft_loss":
                self._compute_log_probs(rollout_id, everything, len(packed))
                self._compute_advantages(batch, everything)
            self._show(rollout_id, batch, packed, everything)
            steps: list[dict[str, float]] = [{} for _ in packed]
            for learner, loss, name in self._training_order(rollout_id):
                with (
                    _profiled(args, f"train_{name}", rollout_id),
                    self._span(f"{name}_train"),
                    learner.gathering_parameters(),
                ):
                    trained, goes_on = self._take_steps(rollout_id, packed, steps, (learner, loss, name))
                if not goes_on:
                    break
            if args.ref_update_interval is not None and (rollout_id + 1) % args.ref_update_interval == 0:
                with self._span("ref_model_update"):
                    self._actor.renew_reference()
        steps = [metrics for metrics in steps if metrics]
        total = sum(metrics.pop("tokens") for metrics in steps)
        rate = total / seconds[f"perf/{name}_train_time"]
        seconds["perf/train_time"] = whole.seconds
        numbers = {f"perf/{name}_train_tok_per_s": rate, "perf/trained_tokens": trained}
        steps[-1] |= seconds | numbers | self._memory.peaks()
        self._recorder.after_rollout(rollout_id)
        return steps

    def _take_steps(
        self,
        rollout_id: int,
        packed: list[list[MicroBatch]],
        steps: list[dict[str, float]],
        who: tuple[Learner, LossOf, str],
    ) -> tuple[float, bool]:
        """Have one model learn, and add the metrics to those of ``steps``; the response tokens in the loss of the steps
        that were taken, and whether training goes on: a bad step may be the last of its rollout."""
        args, (learner, loss, name), total = self.args, who, 0.0
        for i, micro_batches in enumerate(packed):
            where = f"rollout {rollout_id}, step {i + 1} of {len(packed)}, {name}"
            with span("train/forward_backward"):
                reports = learner.forward_backward(micro_batches, loss, rollout_id, i)
            metrics = self._step_metrics(where, micro_batches, reports)
            with span("train/optimizer"):
                metrics |= learner.optimizer_step(where, bad_loss(args, metrics))
            trained = metrics.pop(_TRAINED_TOKENS)
            steps[i] |= metrics
            if any(key.endswith(BAD_STEPS) for key in metrics):
                if args.on_bad_step == "restore":
                    return total, False
                continue
            total += trained
            is_first = rollout_id == args.num_critic_only_steps and i == 0
            on_policy = name == "actor" and (i == 0 or not args.use_rollout_logprobs)
            check_step(args, where, steps[i], trained, is_first=is_first, on_policy=on_policy)
        return total, True

    def _compute_log_probs(self, rollout_id: int, everything: list[MicroBatch], steps: int) -> None:
        """Those of the reference and those before the first step, where anything needs them."""
        args, trains_actor = self.args, self._trains_actor(rollout_id)
        before_training = args.kl_coef != 0 or any(getattr(args, name) is not None for name in _READS_LOG_PROBS)
        before_training |= args.use_opd and not args.use_rollout_logprobs and not args.opd_top_k
        with _profiled(args, "train_log_probs", rollout_id):
            if args.needs_reference and (before_training or trains_actor):
                with self._span("ref_log_probs"):
                    self._actor.compute_column(everything, "ref_log_probs", self._log_probs, REFERENCE)
            if args.opd_type == "megatron":
                with self._span("teacher_log_probs"):
                    name, column_of = TEACHER_LOG_PROBS, self._log_probs
                    if args.opd_top_k:
                        name, column_of = TEACHER_TOP_LOG_PROBS, self._top_log_probs
                    self._actor.compute_column(everything, name, column_of, TEACHER)
            if before_training or (trains_actor and self._loss_needs_old_log_probs(steps)):
                with self._span("log_probs"):
                    self._compute_old_log_probs(rollout_id, everything)

    def _compute_advantages(self, batch: TrainBatch, everything: list[MicroBatch]) -> None:
        if self._critic is not None:
            with self._span("values"):
                self._critic.compute_column(everything, "values", _values)
        if not self.args.disable_compute_advantages_and_returns and self.parallel.is_last_stage:
            with self._span("advantages"):
                set_advantages(self.args, batch, everything, self.parallel.dp.group)

    def _show(
        self, rollout_id: int, batch: TrainBatch, packed: list[list[MicroBatch]], everything: list[MicroBatch]
    ) -> None:
        """Let a user's function change what is trained on, and whoever wants to debug it read it."""
        args = self.args
        if args.rollout_data_postprocess_path is not None and self.parallel.is_last_stage:
            with self._span("postprocess"):
                postprocess(args, rollout_id, batch, everything, self.parallel.dp.group)
        if args.save_debug_train_data is not None:
            with self._span("save_debug"):
                save_train_data(args, rollout_id, packed, self.parallel.named())
        for micro_batch in everything:
            micro_batch.unload()

    def _training_order(self, rollout_id: int) -> Iterator[tuple[Learner, LossOf, str]]:
        """Who learns from this rollout, by which loss: the critic, and after its own first rollouts the actor."""
        if self._critic is not None:
            yield self._critic, self._value_loss, "critic"
        if self._trains_actor(rollout_id):
            yield self._actor, self._loss, "actor"

    def _trains_actor(self, rollout_id: int) -> bool:
        return rollout_id >= self.args.num_critic_only_steps

    def _step_metrics(self, where: str, micro_batches: list[MicroBatch], reports: list[Report]) -> dict[str, float]:
        tokens, trained = sum(sum(m.lengths) for m in micro_batches), sum(m.num_trained for m in micro_batches)
        metrics = step_metrics(reports, {"tokens": tokens, _TRAINED_TOKENS: trained}, self.parallel)
        for name, value in metrics.items():
            if name.endswith("loss") and self.args.on_bad_step == "stop":
                check_finite(self.args, where, name, value)
        return metrics

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        device.synchronize_stream()  # not the side stream: optimizer state wakes on it during the first passes
        with self._memory.phase(name) as timed:
            yield
            device.synchronize_stream()
        self._seconds[f"perf/{name}_time"] = timed.seconds

    # ---- log-probs of older weights

    def _keep_version(self, version: int) -> None:
        """Keep the actor's weights while a rollout may have been generated by them that is not too stale."""
        if version in self._kept_versions:  # its push failed and is made again
            return
        while self._kept_versions and self._kept_versions[0] < version - self.args.max_weight_staleness:
            self._actor.weights.drop(_version_name(self._kept_versions.pop(0)))
        self._actor.weights.keep(_version_name(version))
        self._kept_versions.append(version)

    def _compute_old_log_probs(self, rollout_id: int, micro_batches: list[MicroBatch]) -> None:
        """Log-probs of each token by the weights that generated it, or by the present ones where these are not kept."""
        self._actor.compute_column(micro_batches, "old_log_probs", self._log_probs)
        for version in self._older_versions(rollout_id, micro_batches):
            before = [m.old_log_probs for m in micro_batches]
            self._actor.compute_column(micro_batches, "old_log_probs", self._log_probs, _version_name(version))
            for m, other in zip(micro_batches, before, strict=True):
                if other is not None and m.old_log_probs is not None and m.weight_versions is not None:
                    m.old_log_probs = torch.where(m.weight_versions == version, m.old_log_probs, other)

    def _older_versions(self, rollout_id: int, micro_batches: list[MicroBatch]) -> list[int]:
        """Kept versions, other than the present one, that made tokens of any rank; the same on every rank."""
        kept = [version for version in self._kept_versions if version != rollout_id]
        versions = [m.weight_versions for m in micro_batches if m.weight_versions is not None]
        if not kept or not versions:
            return []
        made = torch.cat(versions)
        used = torch.stack([(made == version).any() for version in kept]).int()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        return [version for version, is_used in zip(kept, used.tolist(), strict=True) if is_used]

    def _loss_needs_old_log_probs(self, steps: int) -> bool:
        """Whether they take a pass of their own: otherwise the first step's, which is on policy, are the same. In that
        pass routers say what they replay, where engines do not."""
        args = self.args
        if args.loss_type == "custom_loss" or args.keep_old_actor:
            return True
        records = args.use_routing_replay and not args.use_rollout_routing_replay
        return steps > 1 and (records or not args.use_rollout_logprobs)

    # ---- what becomes of the models' outputs

    def _terms(
        self, micro_batch: MicroBatch, hidden: Tensor, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        return token_terms(
            hidden[0],
            self._actor.head_weight(),
            micro_batch.labels,
            **self._vocabulary() | ({} if temperature is None else {"temperature": temperature}),
            wants_entropy_gradient=self.args.entropy_coef != 0 or self.args.loss_type == "custom_loss",
            as_engines=self.args.true_on_policy_mode,
        )

    def _log_probs(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        return self._terms(micro_batch, hidden)[0]

    def _top_log_probs(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Those of the likeliest ids, which become a column, too."""
        weight, settings = self._actor.head_weight(), self._vocabulary()
        ids, log_probs = divergence.top_log_probs(hidden[0], weight, self.args.opd_top_k, **settings)
        micro_batch.put(TEACHER_TOP_IDS, ids)
        return log_probs

    def _vocabulary(self) -> dict[str, Any]:
        """How every pass computes with logits."""
        return {
            "vocab_size": self.args.vocab_size,
            "temperature": self.args.rollout_temperature,
            "group": self.parallel.tp.group,
            "chunk_size": self.args.log_probs_chunk_size,
        }

    def _loss(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        if self.args.loss_type == "custom_loss":
            weight = self._actor.head_weight()
            total, report = hooks.custom_loss(
                self.args,
                micro_batch,
                lambda: logits(hidden[0], weight)[None],
                lambda: self._terms(micro_batch, hidden),
                reached=(hidden, weight),
            )
            return total, mismatch_report(micro_batch) | report
        loss = LOSSES[self.args.loss_type](self.args, micro_batch, *self._terms(micro_batch, hidden))
        if self.args.opd_top_k:
            ids, teacher = (micro_batch.get(name) for name in (TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS))
            assert ids is not None
            assert teacher is not None
            weight, settings = self._actor.head_weight(), self._vocabulary()
            add_distillation(self.args, loss, divergence.reverse_kl(hidden[0], weight, ids, teacher, **settings))
        return reduce_tokens(loss, micro_batch)

    def _value_loss(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Report]:
        loss = value_loss(self.args, micro_batch, _values(micro_batch, output))
        return reduce_tokens(loss, micro_batch, "train/critic-value_loss")

    # ---- weights

    def pushing(self, version: int) -> AbstractContextManager[span]:
        return self._memory.phase("push", version=version)

    def save(self, directory: str) -> None:
        with self._memory.phase("save"):
            self._actor.save(directory)

    def save_critic(self, directory: str) -> None:
        assert self._critic is not None
        with self._memory.phase("save"):
            self._critic.save(directory)

    def go_back(self, directory: str, critic_directory: str | None) -> None:
        with self._memory.phase("start"):
            self._actor.load(directory)
            if self._critic is not None and critic_directory is not None:
                self._critic.load(critic_directory)


def _version_name(version: int) -> str:
    return f"version {version}"


def _values(micro_batch: MicroBatch, output: Tensor) -> Tensor:
    return output[0, :, 0].float()


@contextmanager
def _profiled(args: Namespace, target: str, rollout_id: int) -> Iterator[None]:
    """Within: record, where ``--profile-target`` has ``target`` for this rollout; after: ``traces`` has the file."""
    if target not in (args.profile_target or ()) or not args.profile_step_start <= rollout_id < args.profile_step_end:
        yield
        return
    with profile(record_shapes=True) as recorded:
        yield
        device.synchronize()
    directory = Path(args.run_dir, "traces")
    with writing("--profile-target, in --run-dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(directory / f"{target}_{rollout_id}_rank{dist.get_rank()}.json.gz"))
