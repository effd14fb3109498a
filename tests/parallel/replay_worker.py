"""One rank of one layout, under torchrun: where routers send tokens in each pass, with routing replay and without.

``torchrun --nproc-per-node N replay_worker.py WORK_DIR '{"name": ..., "layout": {...}, "jobs": [[MODE, RECOMPUTE]]}'``

Routers are watched at what they return, whatever they were told.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402

from slime.backends.megatron import parallel  # noqa: E402
from slime.backends.megatron import trainer as trainer_module  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.data import Ragged, TrainBatch  # noqa: E402
from slime.data.routes import RouteShape  # noqa: E402
from slime.training.micro_batch import MicroBatch  # noqa: E402
from tests.parallel import gathering, rollouts  # noqa: E402
from tests.parallel.outcome import Outcome, compare  # noqa: E402

MODES: dict[str, dict[str, bool]] = {
    "live": {},
    "trainers": {"use_routing_replay": True},
    "engines": {"use_routing_replay": True, "use_rollout_routing_replay": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
LR = 0.5
"""Of SGD: large enough for routers to choose others in the second step."""
OLD_LOG_PROBS, STEPS = "old_log_probs", ("step 0", "step 1")
UNROUTED_ROWS = 5
"""Every so many rows one has no routes."""


def route_of(token: int, position: int, layer: int, experts: int) -> tuple[int, int]:
    """Two experts, which depend on all that a stream may mix up."""
    first = (7 * token + 3 * position + 5 * layer) % experts
    return first, (first + 1 + (token + position + layer) % (experts - 1)) % experts


def with_routes(rows: TrainBatch, shape: RouteShape) -> TrainBatch:
    """As the rollout side ships them: the last token has none, nor have some rows."""
    routes = []
    for number, tokens in enumerate(rows.tokens[row] for row in range(len(rows))):
        own = np.full((len(tokens), len(shape.moe_layers), shape.topk), shape.absent, shape.dtype)
        for position, token in enumerate(tokens[:-1].tolist() if number % UNROUTED_ROWS else []):
            own[position] = [route_of(token, position, layer, shape.experts) for layer in range(len(shape.moe_layers))]
        routes.append(own)
    column = Ragged.from_rows(routes, shape.dtype, routes[0].shape[1:])
    return rows.changed(routed_experts=column, sample_indices=np.arange(len(rows)))


class Watch:
    """What routers returned: by pass and layer, for each micro-batch, and in the order of recomputation."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        self.phase, self.micro_batch = "", None
        self.maps: dict[tuple[str, int], dict[MicroBatch, Tensor]] = defaultdict(dict)
        self.again: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        learner: Any = trainer._actor
        self._forward, self._column, self._step = learner._forward, learner.compute_column, learner.forward_backward
        learner._forward, learner.compute_column, learner.forward_backward = self.forward, self.column, self.step
        for chunk in learner.model_chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    layer.mlp.router.register_forward_hook(partial(self._note, layer.layer_number - 1))

    def column(self, micro_batches: list[MicroBatch], name: str, *rest: Any) -> None:
        self.phase = name
        self._column(micro_batches, name, *rest)

    def step(self, micro_batches: list[MicroBatch], loss: Any, rollout_id: int, step_id: int) -> Any:
        self.phase = STEPS[step_id]
        return self._step(micro_batches, loss, rollout_id, step_id)

    def forward(self, output: Any, micro_batches: Iterator[MicroBatch], model: Any, *rest: Any, **options: Any) -> Any:
        self.micro_batch = next(micro_batches)
        try:
            return self._forward(output, iter([self.micro_batch]), model, *rest, **options)
        finally:
            self.micro_batch = None

    def _note(self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        routing_map = output[1].detach().cpu()
        if self.micro_batch is None:
            self.again[self.phase, layer].append(routing_map)
        else:
            self.maps[self.phase, layer][self.micro_batch] = routing_map

    def layers(self) -> set[int]:
        return {layer for _, layer in self.maps}

    def check_recomputed(self, expected: bool) -> None:
        """Backward passes had the experts of their forward passes, in each layer that has any."""
        for step in STEPS:
            for layer in self.layers():
                again = self.again[step, layer]
                forward = list(self.maps[step, layer].values())
                assert len(again) == (len(forward) if expected else 0)
                assert all(torch.equal(one, other) for one, other in zip(again, forward, strict=expected))

    def changed(self) -> int:
        """Tokens that went elsewhere in a step than in the pass of the log-probs, over this rank's layers."""
        return sum(
            int((routing_map != self.maps[OLD_LOG_PROBS, layer][micro_batch]).any(1).sum())
            for step in STEPS
            for layer in self.layers()
            for micro_batch, routing_map in self.maps[step, layer].items()
        )

    def check_given(self, shape: RouteShape, sequence_parallel: bool) -> int:
        """Tokens with a route went there, in all passes but the reference's; how many there were, over layers."""
        count = 0
        for phase in (OLD_LOG_PROBS, *STEPS):
            for layer in self.layers():
                for micro_batch, routing_map in self.maps[phase, layer].items():
                    tokens, positions, routed = _cut(_where(micro_batch), sequence_parallel)
                    place = shape.moe_layers.index(layer)
                    wanted = torch.zeros_like(routing_map)
                    for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
                        wanted[row, list(route_of(int(token), int(position), place, shape.experts))] = True
                    assert torch.equal(routing_map[routed], wanted[routed]), (phase, layer)
                    assert (routing_map.sum(1) == shape.topk).all()
                    count += int(routed.sum())
        return count


def _where(micro_batch: MicroBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token, position and whether it has a route, of each token that this context-parallel rank holds."""
    stream: Any = micro_batch._stream
    tokens, positions = micro_batch.tokens[0].cpu().numpy(), micro_batch.position_ids[0].cpu().numpy()
    rows = stream.row_of_token
    padding = stream.local >= stream.padded[: len(stream.rows)].sum()
    numbers = micro_batch._batch.sample_indices[stream.rows]
    has_routes = (numbers % UNROUTED_ROWS != 0)[rows] & (positions < stream.lengths[rows] - 1) & ~padding
    return tokens, positions, has_routes


def _cut(arrays: tuple[np.ndarray, ...], sequence_parallel: bool) -> list[np.ndarray]:
    if not sequence_parallel:
        return list(arrays)
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return [np.split(array, ranks)[rank] for array in arrays]


def _sum(count: int) -> int:
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return sum(counts)


def run(work: Path, layout: dict[str, Any], mode: str, recompute: str) -> tuple[Outcome, Watch]:
    options = {"optimizer": "sgd", "lr": LR, "lr_decay_style": "constant", "lr_warmup_iters": 0, "clip_grad": 100.0}
    args = rollouts.arguments(
        work / "model",
        **(layout | options | MODES[mode] | RECOMPUTE[recompute]),
        num_steps_per_rollout=2,
        use_distributed_optimizer=False,
    )
    trainer = MegatronTrainer(args)
    rows = rollouts.uneven(7, rollouts=16)
    if mode == "engines":
        rows = with_routes(rows, RouteShape.of(args))
    batch = rollouts.batch_of_rank(args, rows, trainer.dp_size, trainer.dp_rank)
    watch, gradients, outcome = Watch(trainer), gathering.note_gradients(trainer), Outcome()
    steps = trainer.train(0, batch)
    outcome.metrics = [{n: v for n, v in metrics.items() if not n.startswith("perf/")} for metrics in steps]
    outcome.gradients = [{name: gradient.cpu() for name, gradient in step.items()} for step in gradients[""]]
    outcome.weights = {name: weight.cpu() for name, weight in gathering.weights(trainer).items()}
    watch.check_recomputed(expected=bool(recompute))
    if mode == "engines":
        assert _sum(watch.check_given(RouteShape.of(args), args.sequence_parallel)) > 1000
    else:
        assert (_sum(watch.changed()) > 0) == (mode == "live")
    return outcome, watch


def main() -> None:
    work, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
    parallel.initialize_distributed(rollouts.arguments(work / "model", **spec["layout"]))
    # Trainers follow one another here, and a process can join the rendezvous of torchrun only once.
    trainer_module.initialize_distributed = lambda args: parallel.set_seeds(args.seed)
    report: dict[str, Any] = {}
    live, _ = run(work, spec["layout"], "live", "")
    for mode, recompute in spec["jobs"]:
        outcome, _ = run(work, spec["layout"], mode, recompute)
        differences = {}
        if mode == "trainers":  # at equal weights: those of the first step
            first = [Outcome(each.metrics[:1], each.gradients[:1]) for each in (outcome, live)]
            differences["live"] = compare(*first).gradient
        if spec["name"] == "one":
            if not recompute:
                outcome.save(work / f"{mode}.pt")
        else:
            differences["one"] = compare(outcome, Outcome.load(work / f"{mode}.pt")).gradient
        report[f"{mode} {recompute}"] = differences
    if dist.get_rank() == 0:
        (work / f"{spec['name']}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
