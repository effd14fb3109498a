"""One rank of one layout, under torchrun: what it stores of a distributed optimizer, beside what the ranks have.

``torchrun --nproc-per-node N shares_worker.py MODEL_DIR '{LAYOUT}'``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from slime.backends.megatron.optimizer import parts_of  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.backends.megatron.weights.checkpoint import _metadata, model_state  # noqa: E402
from tests.parallel import rollouts  # noqa: E402
from tests.parallel.cases import CASES  # noqa: E402

KEYS = {"param", "exp_avg", "exp_avg_sq"}


def held_by(part: Any) -> list[tuple[int, int, int, dict[str, torch.Tensor]]]:
    """What this rank has: of which parameter, from where to where, its values. By megatron-core's own maps."""
    found = []
    number = 0
    for buffer, of_types in zip(part.buffers, part.gbuf_ranges, strict=True):
        for parameter in buffer.param_index_map:
            for buckets in of_types.values():
                for ranges in filter(None, (bucket["param_map"].get(parameter) for bucket in buckets)):
                    values = part._get_main_param_and_optimizer_states(parameter)
                    values = {key: values[key].detach().float().clone() for key in KEYS}
                    found.append((number, ranges["param"].start, ranges["param"].end, values))
            number += 1
    return found


def check(part: Any, chunks: Any) -> int:
    """That each parameter's state is stored once, whole, by a rank that has some of it; how many are of two ranks."""
    group = part.data_parallel_group
    state = part.sharded_state_dict(model_state(chunks), metadata=_metadata())["param_state"]
    stored = {
        number: {key: (value.data.flatten(), value.replica_id) for key, value in of.items()}
        for number, of in state.items()
    }
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, (stored, held_by(part)), group=group)
    parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    cut = 0
    for number, parameter in enumerate(parameters):
        storers = [of[number] for of, _ in everyones if number in of]
        assert len(storers) == 1, f"parameter {number} is stored by {len(storers)} ranks"
        assert set(storers[0]) == KEYS
        pieces = [piece for _, held in everyones for piece in held if piece[0] == number]
        cut += len(pieces) > 1
        for key, (value, replica) in storers[0].items():
            assert replica[-1] == 0
            assert value.dtype == torch.float32
            whole = torch.full((parameter.numel(),), float("nan"))
            for _, start, end, values in pieces:
                whole[start:end] = values[key].flatten().cpu()
            assert torch.equal(value, whole), f"{key} of parameter {number}"
    share = sum(buffer.numel for buffer in part.buffers) / group.size()
    most = max(sum(value["param"][0].numel() for value in of.values()) for of, _ in everyones)
    assert most <= share + max(parameter.numel() for parameter in parameters)
    return cut


def main() -> None:
    model_dir, layout = Path(sys.argv[1]), json.loads(sys.argv[2])
    case = CASES["grpo"]
    trainer = MegatronTrainer(rollouts.arguments(model_dir, **case.options, **layout, use_distributed_optimizer=True))
    batch = rollouts.batches(case.rows(0), trainer.dp_size, case.steps)[trainer.dp_rank]
    trainer.train(0, batch)
    learner = trainer._actor
    cut = [check(part, learner.model_chunks) for part in parts_of(learner._optimizer) if part.buffers]
    assert sum(cut), "no parameter is cut: this shows nothing"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
