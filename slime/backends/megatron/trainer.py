"""One training rank: from a rollout's batch to optimizer steps of the actor, and of the critic where there is one."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron import patches
from slime.data import TrainBatch
from slime.models import family_of, hf_config, weight_shape
from slime.options.checkpoint import checkpoint_directory, find_checkpoint
from slime.options.training import critic_options
from slime.utils import device
from slime.utils.hook_paths import columns_of

patches.install()  # before anything imports megatron.core

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron import base, checkpoint, lora, model_hooks, weights_io  # noqa: E402
from slime.backends.megatron.attention import packed_params  # noqa: E402
from slime.backends.megatron.fit import built_shape  # noqa: E402
from slime.backends.megatron.head import logits  # noqa: E402
from slime.backends.megatron.learner import REFERENCE, TRAINED_TOKENS, Learner, Output  # noqa: E402
from slime.backends.megatron.model import head_weight  # noqa: E402
from slime.backends.megatron.next_tokens import heads_loss  # noqa: E402
from slime.backends.megatron.parallel import initialize_distributed  # noqa: E402
from slime.training import checks  # noqa: E402
from slime.training.loss import hooks  # noqa: E402
from slime.training.loss.advantages import set_advantages  # noqa: E402
from slime.training.loss.log_probs import token_terms  # noqa: E402
from slime.training.loss.token_loss import LOSSES, mismatch_report, reduce_tokens, value_loss  # noqa: E402
from slime.training.memory.log import MemoryLog  # noqa: E402
from slime.training.micro_batch import MicroBatch  # noqa: E402
from slime.training.packing import PackLayout  # noqa: E402
from slime.training.profiling import profiled  # noqa: E402
from slime.training.rollout_data import postprocess, save_train_data, weigh  # noqa: E402

_READS_LOG_PROBS = ("custom_advantage_function_path", "rollout_data_postprocess_path", "save_debug_train_data")
"""Options whose readers want the log-probs before the first step, which otherwise may be its own."""


class MegatronTrainer:
    """A rank of the training group; every method is collective over all ranks.

    Attributes:
        start_rollout_id: the first rollout to train, one after the loaded checkpoint's.
        resumed_from: the checkpoint directory that training continues from, or None.
        dp_rank, dp_size: which `TrainBatch` this rank takes, of how many.
        model_chunks: the actor's bare model, one part a virtual pipeline stage.
        family, shape: how its weights are named in Hugging Face's format.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        initialize_distributed(args)
        model_hooks.after_init(args)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        config = hf_config(args.hf_checkpoint)
        self.family = family_of(config)
        self.shape = built_shape(weight_shape(config, with_heads=args.enable_mtp_training), args)
        found = find_checkpoint(args.load) if args.load else None
        self.start_rollout_id, self.resumed_from = 0, None
        if found is not None:
            self.start_rollout_id, self.resumed_from = found[1] + 1, str(found[0])
        source = args.ref_load or args.hf_checkpoint
        self._memory = MemoryLog()
        self._kept_versions: list[int] = []
        self._gatherers: weights_io.Gatherers = {}
        with self._memory.phase("start"):
            self._actor = Learner(args, "actor", source, found[0] if found else None, self._adapt(source))
            self.model_chunks = self._actor.model_chunks
            self._critic = _make_critic(args, source, found[1] if found else None) if args.use_critic else None
        self._layout = PackLayout(
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_group=parallel_state.get_context_parallel_group(),
            multiple=parallel_state.get_tensor_model_parallel_world_size(),
            per_token_loss=args.calculate_per_token_loss,
            constant_length=args.loss_constant_length,
            device=device.current_device(),
            columns=columns_of(args),
            args=args,
            describe=packed_params,
        )

    def _adapt(self, source: str) -> Callable[[list[Any]], None] | None:
        """What puts the adapters of the options on the actor, whose weights are from ``source``."""
        args = self.args
        if args.lora_rank is None:
            return None
        settings = lora.LoraSettings(args.lora_rank, args.lora_alpha, tuple(args.lora_target_modules), args.seed)
        begins = f"random weights of --seed {args.seed} and the layout" if args.random_weights else source

        def adapt(chunks: list[Any]) -> None:
            base.note(chunks, self.family, self.shape, f"{begins} ({args.params_dtype})")
            lora.attach(chunks, self.family, self.shape, settings)

        return adapt

    # ---- device memory

    def sleep(self, *, keep_weights: bool) -> None:
        """Give back the GPU's memory, but for the actor's weights if they are to stay."""
        with self._memory.phase("sleep"):
            self._actor.sleep(keep_weights=keep_weights)
            if self._critic is not None:
                self._critic.sleep(keep_weights=False)
            if self.args.transformer_impl == "transformer_engine":
                from slime.backends.megatron import te  # the package need not be installed

                te.release_unused()
            device.release_unused()

    def wake(self, *, weights_only: bool) -> device.Memory:
        """Undo `sleep`, or only for the actor's weights; what was in use before."""
        asleep = device.memory()
        with self._memory.phase("wake"):
            self._actor.wake(weights_only=weights_only)
            if self._critic is not None and not weights_only:
                self._critic.wake(weights_only=False)
        return asleep

    # ---- training

    def train(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        """Train on this rank's part of one rollout.

        Returns:
            One dict of metrics an optimizer step, the same on every rank: ``train/*`` and ``rollout/*`` of the step,
            and on the last also ``perf/*`` of the whole call, in seconds.

        Raises:
            TrainingError: a loss or gradient that is not finite, or a check that failed.
        """
        seconds: dict[str, float] = {}
        with profiled(self.args, "train_overall", rollout_id), _timed(seconds, "perf/train_time"):
            with self._span(seconds, "pack"):
                packed = [
                    [MicroBatch(batch, rows, step, self._layout) for rows in step.micro_batches] for step in batch.steps
                ]
            self._prepare(rollout_id, batch, packed, seconds)
            tokens = [sum(sum(m.lengths) for m in micro_batches) for micro_batches in packed]
            steps: list[dict[str, float]] = [{} for _ in packed]
            for learner, loss, name in self._turns(rollout_id):
                with (
                    profiled(self.args, f"train_{name}", rollout_id),
                    self._span(seconds, f"{name}_train"),
                    learner.gathering_parameters(),
                ):
                    first = rollout_id == self.args.num_critic_only_steps
                    for i, micro_batches in enumerate(packed):
                        where = f"rollout {rollout_id}, step {i + 1} of {len(packed)}, {name}"
                        before = model_hooks.before_train_step(learner.args, rollout_id, i)
                        steps[i] |= learner.step(where, micro_batches, loss, tokens[i], before)
                        trained = steps[i].pop(TRAINED_TOKENS)
                        checks.check_step(self.args, where, steps[i], trained, is_first=first and i == 0)
        total = sum(metrics.pop("tokens") for metrics in steps)
        rate = total / seconds[f"perf/{name}_train_time"]
        steps[-1] |= seconds | {f"perf/{name}_train_tok_per_s": rate} | self._memory.peaks()
        return steps

    def _turns(self, rollout_id: int) -> Iterator[tuple[Learner, Output, str]]:
        """Who learns from this rollout, by which loss: the critic, and after its own first rollouts the actor."""
        if self._critic is not None:
            yield self._critic, self._value_loss, "critic"
        if self._trains_actor(rollout_id):
            yield self._actor, self._loss_with_heads, "actor"

    def _trains_actor(self, rollout_id: int) -> bool:
        return rollout_id >= self.args.num_critic_only_steps

    def _prepare(
        self, rollout_id: int, batch: TrainBatch, packed: list[list[MicroBatch]], seconds: dict[str, float]
    ) -> None:
        """Everything that the losses need beside the batch, as a user's function leaves it."""
        args, everything = self.args, [m for micro_batches in packed for m in micro_batches]
        if args.custom_convert_samples_to_train_data_path is not None and parallel_state.is_pipeline_last_stage():
            weigh(batch, everything, parallel_state.get_data_parallel_group())
        if args.loss_type != "sft_loss":
            self._add_log_probs(rollout_id, everything, len(packed), seconds)
            self._add_advantages(batch, everything, seconds)
        if args.rollout_data_postprocess_path is not None and parallel_state.is_pipeline_last_stage():
            with self._span(seconds, "postprocess"):
                group = parallel_state.get_data_parallel_group()
                postprocess(args, rollout_id, batch, everything, group)
        if args.save_debug_train_data is not None:
            with self._span(seconds, "save_debug"):
                save_train_data(args, rollout_id, packed, _ranks())
        for micro_batch in everything:
            micro_batch.unload()

    def _add_log_probs(
        self, rollout_id: int, everything: list[MicroBatch], steps: int, seconds: dict[str, float]
    ) -> None:
        args, trains_actor = self.args, self._trains_actor(rollout_id)
        before_training = args.kl_coef != 0 or any(getattr(args, name) is not None for name in _READS_LOG_PROBS)
        with profiled(args, "train_log_probs", rollout_id):
            if args.needs_reference and (before_training or trains_actor):
                with self._span(seconds, "ref_log_probs"):
                    before = model_hooks.before_log_prob(args, "ref_")
                    self._actor.keep_column(everything, self._log_probs, "ref_log_probs", REFERENCE, before)
            if before_training or (trains_actor and self._loss_needs_old_log_probs(steps)):
                with self._span(seconds, "log_probs"):
                    self._keep_old_log_probs(rollout_id, everything)

    def _add_advantages(self, batch: TrainBatch, everything: list[MicroBatch], seconds: dict[str, float]) -> None:
        """Those of the actor, by the critic's values if there are any."""
        args = self.args
        if self._critic is not None:
            with self._span(seconds, "values"):
                self._critic.keep_column(everything, _values, "values")
        if not args.disable_compute_advantages_and_returns and parallel_state.is_pipeline_last_stage():
            with self._span(seconds, "advantages"):
                set_advantages(args, batch, everything, parallel_state.get_data_parallel_group())

    @contextmanager
    def _span(self, seconds: dict[str, float], name: str) -> Iterator[None]:
        """Note the time of a phase of training, and its memory."""
        with self._memory.phase(name), _timed(seconds, f"perf/{name}_time"):
            yield

    def _keep_version(self, version: int) -> None:
        """Keep the actor's weights while a rollout may have been generated by them that is not too stale."""
        if version in self._kept_versions:  # its push failed and is made again
            return
        self._actor.weights.keep(_version_name(version))
        self._kept_versions.append(version)
        while self._kept_versions[0] < version - self.args.max_weight_staleness:
            self._actor.weights.drop(_version_name(self._kept_versions.pop(0)))

    def _keep_old_log_probs(self, rollout_id: int, micro_batches: list[MicroBatch]) -> None:
        """Log-probs of each token by the weights that generated it, or by the present ones where these are not kept."""
        before_pass = model_hooks.before_log_prob(self.args, "")
        self._actor.keep_column(micro_batches, self._log_probs, "old_log_probs", before=before_pass)
        for version in self._older_versions(rollout_id, micro_batches):
            before = [m.old_log_probs for m in micro_batches]
            name = _version_name(version)
            self._actor.keep_column(micro_batches, self._log_probs, "old_log_probs", name, before_pass)
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
        """Whether they take a pass of their own: otherwise the first step's, which is on policy, are the same."""
        if self.args.loss_type == "custom_loss":
            return True
        return (steps > 1 and not self.args.use_rollout_logprobs) or self.args.keep_old_actor

    # ---- what becomes of the models' outputs

    def _terms(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return token_terms(
            hidden[0],
            head_weight(self._actor.chunks[-1]),
            micro_batch.labels,
            vocab_size=self.shape.vocab_size,
            temperature=self.args.rollout_temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_size=self.args.log_probs_chunk_size,
            wants_entropy_gradient=self.args.entropy_coef != 0 or self.args.loss_type == "custom_loss",
        )

    def _log_probs(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        return self._terms(micro_batch, hidden)[0]

    def _loss(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.args.loss_type == "custom_loss":
            weight = head_weight(self._actor.chunks[-1])
            total, report = hooks.custom_loss(
                self.args,
                micro_batch,
                lambda: logits(hidden[0], weight)[None],
                lambda: self._terms(micro_batch, hidden),
                reached=(hidden, weight),
            )
            return total, mismatch_report(micro_batch) | report
        loss = LOSSES[self.args.loss_type](self.args, micro_batch, *self._terms(micro_batch, hidden))
        return reduce_tokens(loss, micro_batch)

    def _loss_with_heads(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, report = self._loss(micro_batch, hidden)
        if self.shape.next_token_heads:
            model = self.model_chunks[-1]
            more, own = heads_loss(self.args, micro_batch, model, head_weight(model), hidden)
            total, report = total + more, report | own
        return total, report

    def _value_loss(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = value_loss(self.args, micro_batch, _values(micro_batch, output))
        return reduce_tokens(loss, micro_batch, "train/critic-value_loss")

    # ---- weights

    def use_weights(self, name: str) -> None:
        """Put a set of the actor's weights into the model: ``"current"`` or ``"ref"``."""
        self._actor.weights.switch(name)

    def export_buckets(self, version: int, *, own_experts: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """The actor, or its adapters alone, in Hugging Face's names; in buckets of ``--update-weight-buffer-size``.

        Args:
            version: what engines will call these weights.
            own_experts: of the actor without the experts of other expert-parallel ranks.
        """
        if self.args.keep_old_actor:
            self._keep_version(version)
        shape = self.shape if self.args.pushes_heads else replace(self.shape, next_token_heads=0)
        model, size = (self.model_chunks, self.family, shape), self.args.update_weight_buffer_size
        if self.args.lora_sync == "adapter":
            return weights_io.export_adapter_buckets(*model, self.args.lora_target_modules, size, self._gatherers)
        return weights_io.export_hf_buckets(*model, size, own_experts=own_experts, gatherers=self._gatherers)

    def pushing(self) -> AbstractContextManager[None]:
        """What is around a push of `export_buckets`, so that its memory is told of."""
        return self._memory.phase("push")

    def save(self, directory: str) -> None:
        """Write everything that the actor continues from into an existing empty directory."""
        with self._memory.phase("save"):
            self._actor.save(directory)

    def save_critic(self, directory: str) -> None:
        """The same of the critic."""
        assert self._critic is not None
        with self._memory.phase("save"):
            self._critic.save(directory)

    def save_hf(self, directory: str, rollout_id: int) -> None:
        """Write the actor, as it is after a rollout, as a Hugging Face directory, complete or not at all; what is there
        is replaced."""
        unfinished = checkpoint.begin_directory(Path(directory))
        with self._memory.phase("save"):
            weights_io.save_hf(self.model_chunks, unfinished, self.args.hf_checkpoint)
        checkpoint.commit_export(Path(directory), self.args, rollout_id)

    def save_lora(self, directory: str, rollout_id: int) -> None:
        """Write the actor's adapters in the same way, as PEFT reads them."""
        unfinished = checkpoint.begin_directory(Path(directory))
        with self._memory.phase("save"):
            weights_io.save_adapters(self.model_chunks, self.family, self.shape, self.args, unfinished)
        checkpoint.commit_export(Path(directory), self.args, rollout_id)


def _make_critic(args: Namespace, source: str, resumed_rollout: int | None) -> Learner:
    """The critic with its own rate, schedule and checkpoints, resumed at the actor's rollout where that is."""
    own = critic_options(args)
    if resumed_rollout is None:
        return Learner(own, "critic", args.critic_source or source, None)
    return Learner(own, "critic", source, checkpoint_directory(args.critic_load, resumed_rollout))


def _ranks() -> dict[str, int]:
    """This process's, as debug data call them."""
    return {
        "rank": dist.get_rank(),
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "context_parallel_rank": parallel_state.get_context_parallel_rank(),
        "tensor_parallel_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline_parallel_rank": parallel_state.get_pipeline_model_parallel_rank(),
    }


def _version_name(version: int) -> str:
    return f"version {version}"


def _values(micro_batch: MicroBatch, output: Tensor) -> Tensor:
    return output[0, :, 0].float()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Not of what goes on beside: optimizer state that wakes during the first passes."""
    device.finish()
    started = time.perf_counter()
    yield
    device.finish()
    seconds[name] = time.perf_counter() - started
