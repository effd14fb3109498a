"""One rank of one layout, under torchrun: trains on every case asked for; rank 0 writes how far each is from another
run's outcome, or the outcome itself.

``torchrun --nproc-per-node N rl_worker.py WORK_DIR '{"layout": {...}, "jobs": [[KIND, CASE, OPTIMIZER, VARIANT], ...],
...}'``
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron import parallel  # noqa: E402
from slime.backends.megatron import trainer as trainer_module  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.data import TrainBatch  # noqa: E402
from tests.parallel import gathering, rollouts  # noqa: E402
from tests.parallel.cases import OPTIMIZERS, RL_CASES, RL_OPTIONS, STAGES, VARIANTS, steps_of  # noqa: E402
from tests.parallel.outcome import Outcome, compare  # noqa: E402


class Rank:
    """What this process does with one case after the other."""

    def __init__(self, work: Path, layout: dict[str, Any]) -> None:
        self.work, self.layout = work, layout

    def arguments(self, kind: str, **options: Any) -> Namespace:
        every = {**RL_OPTIONS, **options, **self.layout}
        if every.get("optimizer") == "sgd":
            every["use_distributed_optimizer"] = False  # which has none
        return rollouts.arguments(self.work / "models" / kind, **every)

    def outcome(self, kind: str, case: str, optimizer: str, variant: str) -> Outcome:
        args = self.arguments(kind, **{**RL_CASES[case], **OPTIMIZERS[optimizer], **VARIANTS[variant]})
        trainer = MegatronTrainer(args)
        _check_variant(trainer, variant)
        gradients = gathering.note_gradients(trainer)
        outcome = Outcome()
        for rollout_id, count in enumerate(steps_of(case, optimizer)):
            rows = torch.load(self.work / f"{kind}.rows{rollout_id}.pt", weights_only=False)
            for metrics in trainer.train(rollout_id, _batch(args, trainer, rows, count)):
                outcome.metrics.append({n: value for n, value in metrics.items() if not n.startswith("perf/")})
        outcome.gradients = [{name: gradient.cpu() for part in parts for name, gradient in part.items()}
                             for parts in zip(*gradients.values(), strict=True)]  # fmt: skip
        outcome.weights = {name: weight.cpu() for name, weight in gathering.weights(trainer).items()}
        _check_same_on_all_ranks(outcome.metrics)
        return outcome

    def on_policy(self, kind: str, dtype: str, steps: int) -> dict[str, float]:
        """Metrics of a first step in which any ratio but 1 counts as clipped, and any KL divergence is above 0."""
        cispo = {"advantage_estimator": "cispo", "eps_clip": 0.0, "eps_clip_high": 0.0, "kl_loss_type": "k2"}
        args = self.arguments(kind, params_dtype=dtype, ci_test=True, num_steps_per_rollout=steps, **cispo)
        trainer = MegatronTrainer(args)
        rows = torch.load(self.work / f"{kind}.rows0.pt", weights_only=False)
        return trainer.train(0, _batch(args, trainer, rows, steps))[0]


def _batch(args: Namespace, trainer: MegatronTrainer, rows: TrainBatch, steps: int) -> TrainBatch:
    return rollouts.batch_of_rank(args, rows, trainer.dp_size, trainer.dp_rank, steps)


def _check_variant(trainer: MegatronTrainer, variant: str) -> None:
    """The model is what the variant says: an option that nobody reads would change no result either."""
    assert trainer.model_chunks[0].config.recompute_granularity == VARIANTS[variant].get("recompute_granularity")
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, [len(chunk.decoder.layers) for chunk in trainer.model_chunks], group)
    even = [[4 // group.size() // len(stage)] * len(stage) for stage in stages]
    assert stages == STAGES.get(variant, even), stages


def _check_same_on_all_ranks(metrics: list[dict[str, float]]) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, metrics)
    assert all(other == metrics for other in every), every


def main() -> None:
    work, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = Rank(work, spec["layout"])
    kinds = [kind for kind, *_ in spec["jobs"]]
    parallel.initialize_distributed(rank.arguments(kinds[0]))
    # Trainers follow one another here, and a process can join the rendezvous of torchrun only once.
    trainer_module.initialize_distributed = lambda args: parallel.set_seeds(args.seed)
    report: dict[str, Any] = {}
    for *same, variant in spec["jobs"]:
        outcome, result = rank.outcome(*same, variant), ".".join(same)
        name = f"{result}.{variant}"
        report[name] = {"metrics": outcome.metrics}
        if spec["compare"]:
            differences: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(differences, asdict(compare(outcome, Outcome.load(work / f"{result}.pt"))))
            report[name]["difference"] = {key: max(each[key] for each in differences) for key in differences[0]}
        else:
            outcome.save(work / f"{result}.pt")
    for kind, dtype, steps in spec["on_policy"]:
        report[f"{kind}.{dtype}.{steps}"] = rank.on_policy(kind, dtype, steps)
    if dist.get_rank() == 0:
        (work / f"{spec['name']}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
