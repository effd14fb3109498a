"""One rank of one layout, under torchrun: what it stores of a distributed optimizer, beside what the ranks have.

``torchrun --nproc-per-node N shares_worker.py MODEL_DIR SAVE_DIR '{LAYOUT}'``
"""

from __future__ import annotations

import json
import logging
import os
import sys
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories  # noqa: E402

from slime.backends.megatron.optimizer import parts_of  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.backends.megatron.weights.checkpoint import _metadata, load_state, model_state, save_state  # noqa: E402
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
    """That each parameter's state is stored once, whole, by a rank that has some of it, and by each rank about as much;
    how many are of several ranks."""
    group = part.data_parallel_group
    state = part.sharded_state_dict(model_state(chunks), metadata=_metadata())["param_state"]
    stored = {
        number: {key: (value.data.flatten().clone(), value.replica_id) for key, value in of.items()}
        for number, of in (state.items() if isinstance(state, dict) else ())
    }
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, (stored, held_by(part)), group=group)
    parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    bases, _ = extract_sharded_tensors_and_factories(model_state(chunks))
    replicas = {base.data: base.replica_id for base in nested_values(bases)}
    cut = 0
    for number, parameter in enumerate(parameters):
        storers = [of[number] for of, _ in everyones if number in of]
        assert len(storers) == 1, f"parameter {number} is stored by {len(storers)} ranks"
        assert set(storers[0]) == KEYS
        pieces = [piece for _, held in everyones for piece in held if piece[0] == number]
        cut += len(pieces) > 1
        for key, (value, replica) in storers[0].items():
            assert replica == (*replicas[parameter][:-1], 0), "what other ranks of the model have too is not theirs"
            assert value.dtype == torch.float32
            whole = torch.full((parameter.numel(),), float("nan"))
            for _, start, end, values in pieces:
                whole[start:end] = values[key].flatten().cpu()
            assert torch.equal(value.cpu(), whole), f"{key} of parameter {number}"
    share = sum(parameter.numel() for parameter in parameters) / group.size()
    most = max(sum(value["param"][0].numel() for value in of.values()) for of, _ in everyones)
    assert most <= share + 2 * max(parameter.numel() for parameter in parameters)
    return cut


def round_trip(learner: Any, parts: list[Any], directory: str) -> None:
    """What is saved comes back, to the bit, and is no less than what ranks have in common."""
    if dist.get_rank() == 0:
        Path(directory).mkdir()
    dist.barrier()
    logging.getLogger().addHandler(log := BufferingHandler(capacity=10_000))
    forked: list[int] = []
    os.register_at_fork(before=lambda: forked.append(1))
    save_state(directory, learner.model_chunks, learner._optimizer, learner._scheduler)
    assert not forked, "what a rank forks keeps its connections open when it is killed"
    logging.getLogger().removeHandler(log)
    lines = [record.getMessage() for record in log.buffer]
    assert not [line for line in lines if "differs" in line], lines
    before = [held_by(part) for part in parts]
    for part in parts:
        for state in part.optimizer.state.values():
            for value in state.values():
                value.fill_(7.0)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(7.0)
    load_state(directory, learner.model_chunks, learner._optimizer, learner._scheduler)
    for held, again in zip(before, (held_by(part) for part in parts), strict=True):
        for (*place, values), (*place_now, now) in zip(held, again, strict=True):
            assert place == place_now
            assert all(torch.equal(now[key], values[key]) for key in KEYS)


def main() -> None:
    model_dir, directory, layout = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    case = CASES["grpo"]
    trainer = MegatronTrainer(rollouts.arguments(model_dir, **case.options, **layout, use_distributed_optimizer=True))
    batch = rollouts.batches(case.rows(0), trainer.dp_size, case.steps)[trainer.dp_rank]
    trainer.train(0, batch)
    learner = trainer._actor
    parts: list[Any] = [part for part in parts_of(learner._optimizer) if part.buffers]
    assert sum(check(part, learner.model_chunks) for part in parts), "no parameter is cut: this shows nothing"
    round_trip(learner, parts, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
