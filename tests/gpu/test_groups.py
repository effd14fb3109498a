"""Which process groups have one of NCCL's channels, and so next to none of its buffers, which do not sleep."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist

from slime.utils import device
from slime.utils.http_utils import PortReservation
from tests.ranks import run_ranks

NUM_GPUS = 1


def test_one_channel_for_groups_of_small_collectives(tmp_path: Path) -> None:
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    run_ranks(run_rank, (reservation.port, tmp_path), 1)
    reservation.close()
    one, all_ = (set(names) for names in json.loads((tmp_path / "groups.json").read_text()))
    assert one == {
        "default_pg",
        "MODEL_PARALLEL_GROUP",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    }
    assert all_ >= {
        "DATA_PARALLEL_GROUP_WITH_CP",
        "CONTEXT_PARALLEL_GROUP",
        "TENSOR_MODEL_PARALLEL_GROUP",
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "EXPERT_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_DATA_PARALLEL_GROUP",
    }


def run_rank(rank: int, port: int, directory: Path) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from slime.backends.megatron import parallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "1"}
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    args = Namespace(**{f"{size}_parallel_size": 1 for size in sizes}, virtual_pipeline_model_parallel_size=None)
    args.distributed_timeout_minutes, args.seed = 2, 1
    parallel.initialize_distributed(args)
    one, all_ = [], []
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "nccl":
            channels = group._get_backend(device.current_device()).options.config.max_ctas
            (one if channels == 1 else all_).append(group.group_desc)
    (directory / "groups.json").write_text(json.dumps([one, all_]))
    dist.destroy_process_group()
