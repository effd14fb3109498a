"""What megatron-core does with process groups, on which their number of channels depends, and who is in them."""

from __future__ import annotations

import inspect
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import p2p_communication  # noqa: E402

from slime.backends.megatron.parallel import SMALL_GROUPS, neighbours, sends_activations_over_all  # noqa: E402
from slime.backends.trainers import TRAINERS  # noqa: E402
from slime.options.cluster import ClusterOptions  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

NUM_GPUS = 0


def test_small_groups_are_names_of_megatrons_groups() -> None:
    known = set(re.findall(r'get_nccl_options\("(\w+)"', inspect.getsource(parallel_state)))
    assert set(SMALL_GROUPS) <= known
    assert "tp" in known - set(SMALL_GROUPS)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations_over_all_ranks(interleaved: bool, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformer_config` batches sends and receives where stages are not interleaved."""
    used = []

    def call(tensor: torch.Tensor, dst: int = 0, src: int = 0, group: Any = None) -> None:
        used.append(group)

    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, call)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: op(tensor, group=group))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: ops)
    group, tensor = SimpleNamespace(size=lambda: stages, rank=lambda: 0), torch.zeros(1)
    tensors = {f"tensor_{verb}_{where}": tensor for verb in ("send", "recv") for where in ("prev", "next")}
    communicate = p2p_communication._p2p_ops if interleaved else p2p_communication._batched_p2p_ops
    communicate(**tensors, group=group, prev_pipeline_rank=stages - 1, next_pipeline_rank=1)
    assert group in used
    args = Namespace(pipeline_model_parallel_size=stages)
    args.virtual_pipeline_model_parallel_size = 2 if interleaved else None
    assert sends_activations_over_all(args) == any(other is not group for other in used)


CUTS: dict[str, dict[str, int]] = {
    "tensor and pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "context and data": {"context_parallel_size": 2},
    "experts": {"expert_model_parallel_size": 2},
}
PLACES = {
    "tensor and pipeline": lambda r: {"tp": (r % 2, 2), "pp": (r // 2, 2)},
    "context and data": lambda r: {"cp": (r % 2, 2), "dp": (r // 2, 2), "dp_cp": (r, 4)},
    "experts": lambda r: {"ep": (r % 2, 2), "dp": (r, 4), "dp_cp": (r, 4)},
}
"""Of rank r in each way of splitting that has more than one."""


def test_neighbours(tmp_path: Path) -> None:
    run_ranks(find_neighbours, (str(tmp_path),), 4)


def find_neighbours(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4)
    for cut, sizes in CUTS.items():
        parallel_state.initialize_model_parallel(**sizes)
        found = neighbours()
        for field in fields(found):
            ranks = getattr(found, field.name)
            assert (ranks.rank, ranks.size) == PLACES[cut](rank).get(field.name, (0, 1)), (cut, field.name)
            members: list[int] = [-1] * ranks.size
            dist.all_gather_object(members, rank, ranks.group)
            assert members[ranks.rank] == rank
        assert found.is_last_stage == (found.pp.size == 1 or rank >= 2)
        assert found.counts_rows == (found.cp.size == 1 or rank % 2 == 0)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_every_training_backend_has_a_trainer() -> None:
    assert set(TRAINERS) == set(get_args(get_type_hints(ClusterOptions)["train_backend"]))
