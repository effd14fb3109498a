"""One rank of one layout, under torchrun: MTP heads against plain PyTorch, and the policy beside them.

``torchrun --nproc-per-node N heads_worker.py KIND MODEL_DIR WORK_DIR '{LAYOUT}'``
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from slime.backends.megatron import learner, parallel  # noqa: E402
from slime.backends.megatron import trainer as trainer_module  # noqa: E402
from slime.backends.megatron.layers import mtp  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.backends.megatron.weights import gather, weights_io  # noqa: E402
from slime.training import checkpoint_dirs  # noqa: E402
from slime.training.loss import log_probs  # noqa: E402
from slime.training.micro_batch import MicroBatch  # noqa: E402
from slime.weights.hf_directory import stored_tensors  # noqa: E402
from tests.parallel import gathering, rollouts, tiny  # noqa: E402
from tests.parallel.heads import COPIES, PREFIXES  # noqa: E402

BIASES = "e_score_correction_bias"
"""Of routers: they are not trained."""


class Logits:
    """Compares the logits of every trained token with plain PyTorch's, in the place of the loss's own call."""

    def __init__(self, wanted: dict[str, Tensor]) -> None:
        self.wanted, self.worst, self.compared, self.batch, self.number = wanted, 0.0, 0, None, 0
        self.order: list[int] = []
        """The rows that this rank trains on."""
        self._loss, self._terms = mtp.heads_loss, mtp.token_terms
        learner.heads_loss, mtp.token_terms = self.loss, self.terms

    def loss(self, args: Namespace, batch: MicroBatch, *rest: Any) -> Any:
        self.batch, self.number = batch, 0
        return self._loss(args, batch, *rest)

    def terms(self, hidden: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Any:
        batch: Any = self.batch
        local = log_probs.logits(hidden.detach(), weight)
        got = tensor_parallel.gather_from_tensor_model_parallel_region(local)[:, : tiny.VOCAB].cpu()
        self.number += 1
        later = mtp._later(batch.responses, batch.mask, self.number)
        positions, rows = batch.position_ids[0].tolist(), batch.row_of_token.tolist()
        for t in torch.nonzero(later).flatten().tolist() if self.wanted else ():
            wanted = self.wanted.get(f"row{self.order[batch.rows[rows[t]]]}.head{self.number - 1}", ())
            if positions[t] < len(wanted):
                self.worst = max(self.worst, float((got[t] - wanted[positions[t]]).abs().max()))
                self.compared += 1
        return self._terms(hidden, weight, *rest, **options)


class Rank:
    """What this process does."""

    def __init__(self, kind: str, model_dir: Path, work: Path, layout: dict[str, Any]) -> None:
        self.prefix, self.model_dir, self.work, self.layout = PREFIXES[kind], model_dir, work, layout

    def trainer(self, **options: Any) -> MegatronTrainer:
        own = {"enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3, "pushes_heads": True}
        return MegatronTrainer(rollouts.arguments(self.model_dir, **{**own, **self.layout, **options}))

    def train(self, trainer: MegatronTrainer, first: int, last: int) -> list[dict[str, float]]:
        metrics: list[dict[str, float]] = []
        for rollout_id in range(first, last):
            batch = rollouts.batches(rollouts.columns(rollout_id), trainer.dp_size, 1)[trainer.dp_rank]
            metrics += trainer.train(rollout_id, batch)
        return [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in metrics]

    def policy(self) -> None:
        """Gradients and metrics of the heads; with them and without, the policy is the same.

        Bit for bit, as layouts here have at most two data-parallel ranks: heads shift buckets, and sums over more ranks
        are then added up in another order. A distributed optimizer cuts buckets into shards, by which the norm of all
        gradients is summed: there it, and all that it scales, is equal up to rounding.
        """
        limit = 1e-6 if self.layout.get("use_distributed_optimizer") else 0.0
        logits = Logits(load_file(self.work / "plain.safetensors"))
        rows = rollouts.batches(rollouts.columns(0), parallel_state.get_data_parallel_world_size(), 1)
        logits.order = rows[parallel_state.get_data_parallel_rank()].sample_indices.tolist()
        with_heads, without = self.trainer(), self.trainer(enable_mtp_training=False)
        noted = [gathering.note_gradients(trainer)[""] for trainer in (with_heads, without)]
        metrics, others = self.train(with_heads, 0, 1), self.train(without, 0, 2)
        logits.wanted = {}  # those of the first step's weights
        metrics += self.train(with_heads, 1, 2)
        report = {"logits": logits.worst, "compared": logits.compared, "metrics": metrics[0]}
        for step, other in zip(metrics, others, strict=True):
            trunk = {name: value for name, value in step.items() if "mtp" not in name}
            assert trunk == pytest.approx(other, rel=limit, abs=limit)
        for gradients, theirs in zip(*noted, strict=True):
            assert all(torch.allclose(gradients[name], tensor, limit, limit) for name, tensor in theirs.items())
            assert all(name.startswith(self.prefix) for name in gradients.keys() - theirs.keys())
        weights, theirs = gathering.weights(with_heads), gathering.weights(without)
        assert all(torch.allclose(weights[name], tensor, limit, limit) for name, tensor in theirs.items())
        self.check_pushed(with_heads, weights, set(theirs))
        self.check_saved(with_heads, weights)
        (self.work / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
        if dist.get_rank() == 0:
            heads = {n: t.cpu().contiguous() for n, t in noted[0][0].items() if n.startswith(self.prefix)}
            save_file(heads, self.work / "gradients.safetensors")

    def check_pushed(self, trainer: MegatronTrainer, weights: dict[str, Tensor], trunk: set[str]) -> None:
        """All of them to engines that draft by the heads, and to others what these know."""
        pushed = {name: tensor.clone() for bucket in trainer.export_buckets(1) for name, tensor in bucket}
        assert pushed.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in pushed.items())
        self.check_pushed_again(trainer, weights)
        trainer.args.pushes_heads = False
        assert {name for bucket in trainer.export_buckets(1) for name, _ in bucket} == trunk

    def check_pushed_again(self, trainer: MegatronTrainer, weights: dict[str, Tensor]) -> None:
        """The values that are there then, by what the ranks have agreed on the first time."""
        own = [tensor for _, tensor in weights_io.global_weights(trainer.model_chunks)]
        torch._foreach_neg_(own)
        with mock.patch.object(gather, "union", side_effect=AssertionError("ranks ask each other again")):
            pushed = {name: tensor.clone() for bucket in trainer.export_buckets(2) for name, tensor in bucket}
        torch._foreach_neg_(own)
        assert pushed.keys() == weights.keys()
        assert all(torch.equal(tensor, -weights[name]) for name, tensor in pushed.items())

    def check_saved(self, trainer: MegatronTrainer, weights: dict[str, Tensor]) -> None:
        """The trained heads, and not those that they began as."""
        trainer.save_hf(str(self.work / "hf"), 0)
        before, saved = (dict(stored_tensors(directory)) for directory in (self.model_dir, self.work / "hf"))
        assert saved.keys() == before.keys()
        for name, tensor in saved.items():
            is_copy = any(f"{self.prefix}{copy}.weight" == name for copy in COPIES)
            assert torch.equal(tensor, before[name] if is_copy else weights[name].cpu()), name
            assert is_copy or name.endswith(BIASES) or not torch.equal(tensor, before[name]), name

    def resume(self) -> None:
        """From a checkpoint training goes on as if it had never stopped, also where buckets of gradients are padded."""
        save = self.work / "checkpoint"
        options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 5001}
        trainer = self.trainer(**options)
        self.train(trainer, 0, 1)
        trainer.save(checkpoint_dirs.begin_save(save, 0))
        checkpoint_dirs.commit_save(save, 0)
        metrics, weights = self.train(trainer, 1, 3), gathering.weights(trainer)
        again = self.trainer(load=str(save), **options)
        assert again.start_rollout_id == 1
        assert self.train(again, 1, 3) == metrics
        assert all(torch.equal(tensor, weights[name]) for name, tensor in gathering.weights(again).items())
        try:
            self.trainer(load=str(save), **options, enable_mtp_training=False)
        except ValueError as error:
            assert "was saved with --enable-mtp-training" in str(error)  # noqa: PT017
        else:
            raise AssertionError("heads were dropped without a word")


def main() -> None:
    model_dir, work = (Path(name) for name in sys.argv[2:4])
    layout = json.loads(sys.argv[4])
    parallel.initialize_distributed(rollouts.arguments(model_dir, **layout))
    # Trainers follow one another here, and a process can join the rendezvous of torchrun only once.
    trainer_module.initialize_distributed = lambda args: parallel.set_seeds(args.seed)
    rank = Rank(sys.argv[1], model_dir, work, layout)
    rank.policy()
    rank.resume()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
