"""One training rank: a Megatron model, its optimizer, and the passes that turn a rollout into optimizer steps."""

from __future__ import annotations

import logging
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from slime.backends.megatron import compat
from slime.models import family_of, weight_shape
from slime.options.checkpoint import is_torch_dist
from slime.utils import device
from slime.utils.types import OptimizerStep, TrainBatch

compat.install()  # before anything imports megatron.core

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from slime.backends.megatron import checkpoint, weights_io  # noqa: E402
from slime.backends.megatron.batch import MicroBatch, PackLayout, pack  # noqa: E402
from slime.backends.megatron.log_probs import log_probs_and_entropy  # noqa: E402
from slime.backends.megatron.loss import LOSSES, reduce_tokens  # noqa: E402
from slime.backends.megatron.metrics import step_metrics  # noqa: E402
from slime.backends.megatron.model import build_model, wrap  # noqa: E402
from slime.backends.megatron.optimizer import (  # noqa: E402
    make_optimizer,
    make_scheduler,
    wrap_data_parallel,
)
from slime.backends.megatron.parallel import initialize_distributed  # noqa: E402
from slime.backends.megatron.weight_sets import WeightSets  # noqa: E402

logger = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training cannot go on: what went wrong, in which rollout and step."""


class MegatronTrainer:
    """A rank of the training group; every method is collective over all ranks.

    Attributes:
        start_rollout_id: the first rollout to train, one after the loaded checkpoint's.
        resumed_from: the checkpoint directory that training continues from, or None.
        dp_rank, dp_size: which `TrainBatch` this rank takes, of how many.
        model_chunks: the bare model, one part a virtual pipeline stage.
        family, shape: how its weights are named in Hugging Face's format.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        initialize_distributed(args)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        hf_config = AutoConfig.from_pretrained(args.hf_checkpoint)
        self.family, self.shape = family_of(hf_config), weight_shape(hf_config)
        self.model_chunks = build_model(args)
        self._weights = WeightSets(self.model_chunks, "actor")
        found = checkpoint.find_checkpoint(args.load) if args.load else None
        self._load_weights(resumes=found is not None)
        self._chunks = wrap_data_parallel(args, wrap(self.model_chunks))
        self._optimizer = make_optimizer(args, self._chunks)
        self._scheduler = make_scheduler(args, self._optimizer)
        self._connect_schedule()
        self.start_rollout_id, self.resumed_from = 0, None
        if found is not None:
            directory, rollout_id = found
            checkpoint.load_state(directory, self.model_chunks, self._optimizer, self._scheduler)
            self.start_rollout_id, self.resumed_from = rollout_id + 1, str(directory)
        self._layout = PackLayout(
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            multiple=parallel_state.get_tensor_model_parallel_world_size(),
            per_token_loss=args.calculate_per_token_loss,
            device=device.current_device(),
        )

    # ---- training

    def train(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        """Train on this rank's part of one rollout.

        Returns:
            One dict of metrics an optimizer step, the same on every rank: ``train/*`` and ``rollout/*`` of the step,
            and on the last also ``perf/*`` of the whole call, in seconds.

        Raises:
            TrainingError: a loss or gradient that is not finite.
        """
        seconds: dict[str, float] = {}
        with _timed(seconds, "perf/train_time"):
            packed = [[pack(batch, rows, step, self._layout) for rows in step.micro_batches] for step in batch.steps]
            everything = [micro_batch for micro_batches in packed for micro_batch in micro_batches]
            if self._needs_reference:
                with _timed(seconds, "perf/ref_log_probs_time"):
                    self.use_weights("ref")
                    self._keep_log_probs(everything, "ref_log_probs")
                    self.use_weights("actor")
            if self.args.loss_type == "policy_loss" and len(batch.steps) > 1:
                with _timed(seconds, "perf/log_probs_time"):
                    self._keep_log_probs(everything, "old_log_probs")
            with _timed(seconds, "perf/actor_train_time"), self._gathering_parameters():
                steps = [
                    self._step(f"rollout {rollout_id}, step {i + 1} of {len(packed)}", batch, step, packed[i])
                    for i, step in enumerate(batch.steps)
                ]
        tokens = sum(metrics.pop("tokens") for metrics in steps)
        steps[-1] |= seconds | {"perf/actor_train_tok_per_s": tokens / seconds["perf/actor_train_time"]}
        return steps

    def _step(
        self, where: str, batch: TrainBatch, step: OptimizerStep, micro_batches: list[MicroBatch]
    ) -> dict[str, float]:
        """One optimizer step; its metrics."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = self._pass(micro_batches, self._loss, forward_only=False)
        tokens = sum(int(batch.tokens.lengths[rows].sum()) for rows in step.micro_batches)
        metrics = step_metrics(reports, tokens)
        self._check_finite(where, "loss", metrics["train/loss"])
        done, grad_norm, _ = self._optimizer.step()
        if not done:
            logger.warning(f"{where}: no optimizer step: gradients overflowed float16 and the loss scale is lowered")
            return metrics | {"train/loss_scale_skips": 1.0}
        self._check_finite(where, "gradient norm", grad_norm)
        metrics["train/grad_norm"] = float(grad_norm)
        for i, group in enumerate(self._optimizer.param_groups):
            metrics[f"train/lr-pg_{i}"] = group["lr"]
        self._scheduler.step(1)
        return metrics

    def _check_finite(self, where: str, what: str, value: float) -> None:
        if self.args.check_for_nan_in_loss_and_grad and not math.isfinite(value):
            raise TrainingError(
                f"{where}: the {what} is {value}. Nothing was saved after it: look at the rollout's rewards and "
                f"log-probs, or resume from the last checkpoint with a lower --lr or --clip-grad"
            )

    # ---- passes over micro-batches

    def _pass(self, micro_batches: list[MicroBatch], output: Any, *, forward_only: bool) -> list[Any]:
        """Run the model; what ``output`` made of each micro-batch on the last pipeline stage, elsewhere nothing."""
        chunks = self._chunks
        iterators: Any = [iter(micro_batches) for _ in chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(_forward, output),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _token_terms(self, micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(
            logits[0],
            micro_batch.labels,
            vocab_size=self.shape.vocab_size,
            temperature=self.args.rollout_temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _loss(self, micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs, entropy = self._token_terms(micro_batch, logits)
        loss = LOSSES[self.args.loss_type](self.args, micro_batch, log_probs, entropy)
        total, report = reduce_tokens(loss, micro_batch.weights)
        # The weights have divided already: the count that Megatron asks for is not used.
        return total, torch.zeros((), dtype=torch.int, device=total.device), report

    def _log_probs(self, micro_batch: MicroBatch, logits: Tensor, non_loss_data: bool) -> Tensor:
        return self._token_terms(micro_batch, logits)[0]

    @torch.no_grad()
    def _keep_log_probs(self, micro_batches: list[MicroBatch], name: str) -> None:
        """Set a column of every micro-batch to the model's log-probs, on the last pipeline stage."""
        results = self._pass(micro_batches, self._log_probs, forward_only=True)
        for micro_batch, log_probs in zip(micro_batches, results, strict=bool(results)):
            setattr(micro_batch, name, log_probs)

    def _connect_schedule(self) -> None:
        """Tell Megatron's schedules how gradients are summed; they find it in the model's configuration."""
        config, chunks = self.model_chunks[0].config, self._chunks
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
    def _gathering_parameters(self) -> Iterator[None]:
        """Within: forward passes wait for the parameters that the step before gathers; after: all are gathered.

        Log-prob passes and weight sets, which read parameters otherwise, are outside.
        """
        if self._overlaps:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
        yield
        if self._overlaps:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=True)

    # ---- weights

    @property
    def _needs_reference(self) -> bool:
        return self.args.use_kl_loss and self.args.loss_type == "policy_loss"

    def _load_weights(self, resumes: bool) -> None:
        """Initial weights, and a copy of the reference's; a resumed run gets its own from its checkpoint later."""
        if resumes and not self._needs_reference:
            return
        source = self.args.ref_load or self.args.hf_checkpoint
        found = checkpoint.find_checkpoint(source)
        if found is not None or is_torch_dist(source):
            checkpoint.load_model(found[0] if found else source, self.model_chunks)
        else:
            weights_io.load_hf(self.model_chunks, source)
        if self._needs_reference:
            self._weights.keep("ref")

    def use_weights(self, name: str) -> None:
        """Put the weights of ``"actor"`` or ``"ref"`` into the model."""
        self._weights.switch(name)

    def export_buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The model in Hugging Face's names, in buckets of ``--update-weight-buffer-size`` bytes."""
        size = self.args.update_weight_buffer_size
        return weights_io.export_hf_buckets(self.model_chunks, self.family, self.shape, size)

    def save(self, directory: str) -> None:
        """Write everything that training continues from into an existing empty directory."""
        checkpoint.save_state(directory, self.model_chunks, self._optimizer, self._scheduler)

    def save_hf(self, directory: str) -> None:
        """Write the weights as a Hugging Face directory, complete or not at all; what is there is replaced."""
        unfinished = checkpoint.begin_directory(Path(directory))
        weights_io.save_hf(self.model_chunks, unfinished, self.args.hf_checkpoint)
        checkpoint.commit_directory(Path(directory))


def _forward(output: Any, micro_batches: Iterator[MicroBatch], model: Any, *_: Any, **__: Any) -> tuple[Tensor, Any]:
    """What Megatron's schedules call: one micro-batch through one model chunk, and what to do with its output."""
    micro_batch = next(micro_batches)
    result = model(micro_batch.tokens, micro_batch.position_ids, None, packed_seq_params=micro_batch.packed_seq_params)
    return result, partial(output, micro_batch)


def _finalize_gradients(model: list[Any], num_tokens: Any, **options: Any) -> None:
    """Sum gradients over all ranks; token weights made the loss a mean, so nothing is divided."""
    finalize_model_grads(model, None, **options)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    device.synchronize()
    started = time.perf_counter()
    yield
    device.synchronize()
    seconds[name] = time.perf_counter() - started
