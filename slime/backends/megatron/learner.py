"""One model that learns: its weights, optimizer and schedule, and the passes of micro-batches through it."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from slime.backends.megatron import model_hooks
from slime.backends.megatron.frozen import freeze
from slime.backends.megatron.layers.mtp import embedding_at_hand, heads_loss
from slime.backends.megatron.model import build_model, head_weight, wrap
from slime.backends.megatron.optimizer import (
    gradient_buffers,
    make_optimizer,
    make_scheduler,
    state_tensors,
    wrap_data_parallel,
)
from slime.backends.megatron.replay import Routing, RoutingReplay
from slime.backends.megatron.weights import checkpoint, weights_io
from slime.data.columns import ROUTES
from slime.files.model_directory import stored_weights
from slime.options.learning.algorithm import trained_names
from slime.training.bad_steps import BAD_STEPS, leave_out
from slime.training.checks import check_finite
from slime.training.memory.sleep import SleepingTensors
from slime.training.memory.weight_sets import CURRENT, REFERENCE, TEACHER, WeightSets
from slime.training.micro_batch import MicroBatch, Pass
from slime.training.protocol import ColumnOf, LossOf, Report
from slime.utils import device

logger = logging.getLogger(__name__)

_OLD_LOG_PROBS = "old_log_probs"
_OF_TOKENS = dict.fromkeys(("probs", "routing_map", "reversed_local_input_permutation_mapping"))
"""What of Megatron's all-to-all dispatcher has a row for each token."""
_Output = Callable[..., Any]
"""(micro-batch, output of the model, ...) -> column or loss: Megatron's schedules call each in a way of its own."""


class MegatronLearner:
    """The actor, or the critic, as `slime.training.protocol.Learner`; every method is collective over all ranks.

    Attributes:
        model_chunks: the bare model, one part a virtual pipeline stage.
        chunks: the same, wrapped for mixed precision and data parallelism.
        weights: the sets of weights that take turns in the model.
    """

    def __init__(
        self,
        args: Namespace,
        role: Literal["actor", "critic"],
        source: str,
        resume_from: Path | None,
        adapt: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """
        Args:
            args: with the role's own learning rate and schedule.
            source: a Hugging Face directory, torch_dist checkpoint or directory of them to take initial weights from.
            resume_from: the checkpoint to continue from; the initial weights are then those of the reference only, and
                of what is frozen.
            adapt: puts adapters on the model and freezes the rest.
        """
        self.args = args
        self.prefix = "" if role == "actor" else "critic-"
        self.model_chunks = build_model(args, role)
        self.weights = WeightSets(self.model_chunks, CURRENT, only_trained=adapt is not None)
        keeps_reference = role == "actor" and args.needs_reference
        if (resume_from is None or keeps_reference or adapt) and not args.random_weights:
            load_weights(self.model_chunks, source)
        if adapt:
            adapt(self.model_chunks)
        freeze(args, self.model_chunks, is_critic=role == "critic")
        self._saves_reference = keeps_reference and args.ref_update_interval is not None
        if keeps_reference:
            self.weights.keep(REFERENCE)
        if role == "actor" and args.opd_type == "megatron":
            self.weights.keep_loaded(TEACHER, partial(load_weights, self.model_chunks, args.opd_teacher_load))
        # Not a critic's: its experts are others.
        self._replay = RoutingReplay(args, self.model_chunks) if role == "actor" else None
        self.chunks = wrap_data_parallel(args, wrap(self.model_chunks))
        self._optimizer = make_optimizer(args, self.chunks)
        self._scheduler = make_scheduler(args, self._optimizer)
        self._connect_schedule()
        if resume_from is not None:
            self._load(resume_from)
        self._sleeping_weights = SleepingTensors(self.weights.on_device, keep=True)
        self._sleeping_gradients = SleepingTensors(partial(gradient_buffers, self.chunks), keep=False)
        self._sleeping_state = SleepingTensors(self._optimizer_state, keep=True)

    # ---- device memory

    def sleep(self, *, keep_weights: bool, budget: int) -> int:
        """As `Learner`. Weights are the first that stay: they would be copied while nothing else goes on, out and back,
        optimizer state out only. Gradients never do: they are not copied at all."""
        self._sleeping_gradients.sleep()
        weights = self._sleeping_weights.fitting(budget)
        budget -= weights + self._sleeping_state.sleep(budget - weights)
        if not keep_weights:
            self._sleeping_weights.sleep(weights)
        if self.args.transformer_impl == "transformer_engine":
            from slime.backends.megatron.layers import te  # the package need not be installed

            te.release_unused()
        return budget

    def wake(self, *, weights_only: bool) -> None:
        """As `Learner`; gradients are undefined, as they are between steps."""
        self._sleeping_weights.wake()
        if not weights_only:
            self._sleeping_gradients.wake()
            # The first to need it is the optimizer's step: forward and backward passes hide the copying.
            self._sleeping_state.wake(on_side_stream=True)

    def _optimizer_state(self) -> Iterator[Tensor]:
        """Tensors that the optimizer alone has: master weights and moments, not the weights themselves."""
        own = {tensor.untyped_storage()._cdata for tensor in self.weights.on_device()}
        for tensor in state_tensors(self._optimizer):
            if tensor.untyped_storage()._cdata not in own:
                yield tensor

    def save(self, directory: str) -> None:
        device.wait_side_stream()
        checkpoint.save_state(directory, self.model_chunks, self._optimizer, self._scheduler, trained_names(self.args))
        if self._saves_reference:
            with self.weights.switched(REFERENCE):
                checkpoint.save_weights(Path(directory, REFERENCE), self.model_chunks)

    def load(self, directory: str) -> None:
        device.wait_side_stream()
        self._load(Path(directory))

    def renew_reference(self) -> None:
        self.weights.keep(REFERENCE)

    def _load(self, directory: Path) -> None:
        checkpoint.load_state(directory, self.model_chunks, self._optimizer, self._scheduler)
        reference = directory / REFERENCE
        if self.weights.has(REFERENCE) and reference.is_dir():
            self._saves_reference = True  # it is no longer that of --ref-load
            self.weights.keep_loaded(REFERENCE, partial(checkpoint.load_weights, reference, self.model_chunks))

    # ---- passes over micro-batches

    @torch.no_grad()
    def compute_column(
        self, micro_batches: list[MicroBatch], name: str, column_of: ColumnOf, weights: str = CURRENT
    ) -> None:
        """As `Learner`; a user's hook is called before it makes log-probs."""
        routing = self._replay.of_log_probs if self._replay and name == _OLD_LOG_PROBS else Routing.LIVE
        with self.weights.switched(weights):
            model_hooks.before_column(self.args, name, self.chunks)
            results = self._pass(
                micro_batches, lambda m, output, non_loss_data: column_of(m, output), routing, forward_only=True
            )
        for micro_batch, column in zip(micro_batches, results, strict=bool(results)):
            micro_batch.put(name, column)

    def forward_backward(
        self, micro_batches: list[MicroBatch], loss: LossOf, rollout_id: int, step_id: int
    ) -> list[Report]:
        """As `Learner`; MTP heads add their own loss."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        model_hooks.before_train_step(self.args, rollout_id, step_id, self.chunks, self._optimizer, self._scheduler)
        with embedding_at_hand(self.model_chunks):
            loss_of = partial(self._loss_for_schedule, loss)
            return self._pass(micro_batches, loss_of, Routing.REPLAY, forward_only=False)

    def optimizer_step(self, where: str, why_bad: str | None = None) -> dict[str, float]:
        """As `Learner`; overflowing float16 gradients make no step, and a warning."""
        device.wait_side_stream()
        left_out = {f"train/{self.prefix}{BAD_STEPS}": 1.0}
        if why_bad is not None:
            leave_out(self.args, where, why_bad)
            return left_out
        done, grad_norm, _ = self._optimizer.step()
        if isinstance(done, str):  # why not
            leave_out(self.args, where, done)
            return {f"train/{self.prefix}grad_norm": float(grad_norm)} | left_out
        if not done:
            logger.warning(f"{where}: no optimizer step: gradients overflowed float16 and the loss scale is lowered")
            return {f"train/{self.prefix}loss_scale_skips": 1.0}
        check_finite(self.args, where, "gradient norm", grad_norm)
        metrics = {f"train/{self.prefix}grad_norm": float(grad_norm)}
        # How many groups there are depends on the layout, their rates do not.
        for i, rate in enumerate(dict.fromkeys(group["lr"] for group in self._optimizer.param_groups)):
            metrics[f"train/{self.prefix}lr-pg_{i}"] = rate
        self._scheduler.step(1)
        return metrics

    def head_weight(self) -> torch.nn.Parameter:
        return head_weight(self.chunks[-1])

    def _loss_for_schedule(
        self, loss: LossOf, micro_batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, Report]:
        total, report = loss(micro_batch, output)
        model = self.model_chunks[-1]
        if model.next_token_heads:
            more, own = heads_loss(self.args, micro_batch, model, head_weight(model), output)
            total, report = total + more, report | own
        # The weights have divided already: the count that Megatron asks for is not used.
        return total, torch.zeros((), dtype=torch.int, device=total.device), report

    def _pass(
        self, micro_batches: list[MicroBatch], output: _Output, routing: Routing, *, forward_only: bool
    ) -> list[Any]:
        """Run the model; what ``output`` made of each micro-batch on the last pipeline stage, elsewhere nothing."""
        replaying = nullcontext() if self._replay is None else self._replay.passing(routing)
        unread = () if self._replay and routing is Routing.REPLAY else (ROUTES,)
        with Pass(micro_batches, takers=len(self.chunks), unread=unread) as taken, replaying:
            iterators: Any = [iter(taken) for _ in self.chunks]
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=partial(self._forward, output),
                data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=micro_batches[0].num_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        _forget_tokens(self.model_chunks)
        return results

    def _forward(
        self, output: _Output, micro_batches: Iterator[MicroBatch], model: Any, *_: Any, **__: Any
    ) -> tuple[Tensor, Any]:
        """What Megatron's schedules call: one micro-batch through one model chunk, and what to do with its output."""
        micro_batch = next(micro_batches)
        number = next(number for number, chunk in enumerate(self.chunks) if chunk is model)
        with nullcontext() if self._replay is None else self._replay.forward(number, micro_batch):
            result = model(
                micro_batch.tokens,
                micro_batch.position_ids,
                None,
                packed_seq_params=micro_batch.packed_seq_params,
                **micro_batch.model_inputs,
            )
        return result, partial(output, micro_batch)

    def _connect_schedule(self) -> None:
        """Tell Megatron's schedules how gradients are summed; they find it in the model's configuration."""
        config, chunks = self.model_chunks[0].config, self.chunks
        config.finalize_model_grads_func = _finalize_gradients
        config.grad_scale_func = self._optimizer.scale_loss
        single = len(chunks) == 1
        if chunks[0].ddp_config.overlap_grad_reduce:
            config.no_sync_func = chunks[0].no_sync if single else [chunk.no_sync for chunk in chunks]
        self._overlaps = chunks[0].use_forward_hook
        if self._overlaps:
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    @contextmanager
    def gathering_parameters(self) -> Iterator[None]:
        """Within: forward passes wait for the parameters that the step before gathers; after: all are gathered.

        Log-prob passes and weight sets, which read parameters otherwise, are outside.
        """
        if self._overlaps:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        yield
        if self._overlaps:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=True)


def load_weights(model_chunks: list[Any], source: str) -> None:
    """Weights of a Hugging Face directory, of a torch_dist checkpoint, or of the latest in a directory of them."""
    if stored := stored_weights(source):
        checkpoint.load_model(stored, model_chunks)
    else:
        weights_io.load_hf(model_chunks, source)


def _finalize_gradients(model: list[Any], num_tokens: Any, **options: Any) -> None:
    """Sum gradients over all ranks; token weights made the loss a mean, so nothing is divided."""
    finalize_model_grads(model, None, **options)


def _forget_tokens(model_chunks: list[torch.nn.Module]) -> None:
    """Let go of what Megatron keeps of the last micro-batch until the next one, which would not sleep with the rest.

    That is the routing, bytes for each expert of each token in every layer's dispatcher, and the hidden states that
    sequence parallelism gathers.
    """
    parallel_state.get_global_memory_buffer().buffer.clear()
    for chunk in model_chunks:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAlltoAllTokenDispatcher):
                vars(layer.token_dispatcher).update(_OF_TOKENS)
