"""What a training step leaves in memory: nothing of its tokens, so that nothing of them stays when the rest sleeps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.utils.http_utils import PortReservation
from tests.parallel import rollouts, tiny
from tests.ranks import run_ranks

NUM_GPUS = 0
_SMALL = 1024
"""Bytes; counts of each expert's tokens are fewer."""


_LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts": ("qwen3_moe", 1, {}),
    "latent attention": ("deepseek_v3", 1, {}),
    "tensor and sequence": ("qwen3", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "expert": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
}
"""Model, ranks and how it is cut over them."""


@pytest.mark.parametrize("name", _LAYOUTS)
def test_a_step_leaves_nothing_of_its_tokens(name: str, tmp_path: Path) -> None:
    kind, ranks, layout = _LAYOUTS[name]
    tiny.save(kind, tmp_path / "model")
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    run_ranks(run_rank, (reservation.port, ranks, layout, str(tmp_path / "model")), ranks)
    reservation.close()


def run_rank(rank: int, port: int, ranks: int, layout: dict[str, Any], model_dir: str) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state

    from slime.backends.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    trainer = MegatronTrainer(rollouts.arguments(Path(model_dir), **layout))
    data_ranks = ranks // layout.get("tensor_model_parallel_size", 1)
    gc.collect()
    gc.disable()  # what only the collector would find counts: it may come much later
    present = []
    for rollout_id in range(2):
        batches = rollouts.batches(rollouts.columns(rollout_id), data_ranks, 2)
        trainer.train(rollout_id, batches[rank % data_ranks])
        del batches
        present.append(large_tensors())
        assert not parallel_state.get_global_memory_buffer().buffer
    first, second = present
    assert not second.keys() - first.keys(), [second[key] for key in second.keys() - first.keys()]


def large_tensors() -> dict[int, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each, by its storage; but for states of random generators."""
    state = torch.get_rng_state()
    tensors = [
        t for t in gc.get_objects() if isinstance(t, torch.Tensor) and (t.shape, t.dtype) != (state.shape, state.dtype)
    ]
    return {t.untyped_storage()._cdata: (t.shape, t.dtype) for t in tensors if t.untyped_storage().nbytes() > _SMALL}
