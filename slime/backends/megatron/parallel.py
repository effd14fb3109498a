"""Process groups, parallel layout and random seeds of one training rank."""

from __future__ import annotations

import json
import os
import random
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime.training.parallel import Parallel, Ranks
from slime.utils import device

SMALL_GROUPS = ("mp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp", "intra_dist_opt_instance")
"""Megatron's names of the groups over which only counts, norms and flags go, as they do over all ranks but where
`sends_activations_over_all`.

NCCL has buffers for each channel of a group, which do not sleep: 0.9 GiB of each of two GPUs with all channels, 0.03
with one, which reduces 20 GB/s.
"""
_ONE_CHANNEL = {"min_ctas": 1, "max_ctas": 1}


def initialize_distributed(args: Namespace) -> None:
    """Join the run's process group, build Megatron's groups in it and seed all generators.

    Rank, world size and the rendezvous address are read from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    `patches.install` must have been called; the options have checked that the layout fits.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.bind_local_device(int(os.environ.get("LOCAL_RANK", 0)))
    # No device_id: torch would split later groups off this one, and weight publishing makes one with other processes.
    dist.init_process_group(
        backend=device.collective_backend(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        pg_options=_options_of_all(args),
    )
    with _settings_of_groups() as settings:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            nccl_communicator_config_path=settings,
        )
    set_seeds(args.seed)


def neighbours() -> Parallel:
    """This rank's, of the groups that `initialize_distributed` has built."""
    return Parallel(
        dp=Ranks.of(parallel_state.get_data_parallel_group()),
        cp=Ranks.of(parallel_state.get_context_parallel_group()),
        dp_cp=Ranks.of(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        tp=Ranks.of(parallel_state.get_tensor_model_parallel_group()),
        pp=Ranks.of(parallel_state.get_pipeline_model_parallel_group()),
    )


def sends_activations_over_all(args: Namespace) -> bool:
    """Whether Megatron uses the group of all ranks for one of the two directions between a pipeline's stages.

    It does where there are two and no batches of sends and receives, which is where they are interleaved.
    """
    return args.pipeline_model_parallel_size == 2 and args.virtual_pipeline_model_parallel_size is not None


def _options_of_all(args: Namespace) -> Any:
    """NCCL's of the group of all ranks, as Megatron makes them of `_settings_of_groups` for its own."""
    if not device.is_cuda() or sends_activations_over_all(args):
        return None
    return parallel_state.get_nccl_options("all", {"all": _ONE_CHANNEL})


@contextmanager
def _settings_of_groups() -> Iterator[str | None]:
    """The file of NCCL's settings that Megatron asks for; none without NCCL."""
    if not device.is_cuda():
        yield None
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(dict.fromkeys(SMALL_GROUPS, _ONE_CHANNEL), file)
        file.flush()
        yield file.name


def set_seeds(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's per-region generators; pipeline stages differ, replicas do not."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
