"""What a training step leaves in memory: nothing of its tokens, so that nothing of them stays when the rest sleeps."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from slime.utils.http_utils import PortReservation
from tests.parallel import rollouts, tiny
from tests.ranks import run_ranks

NUM_GPUS = 0
_SMALL = 1024
"""Bytes; counts of each expert's tokens are fewer."""


@pytest.mark.parametrize(("kind", "ranks"), [("qwen3_moe", 1), ("deepseek_v3", 1), ("qwen3", 2)])
def test_a_step_leaves_nothing_of_its_tokens(kind: str, ranks: int, tmp_path: Path) -> None:
    """Of two ranks under tensor and sequence parallelism."""
    tiny.save(kind, tmp_path / "model")
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    run_ranks(run_rank, (reservation.port, ranks, str(tmp_path / "model")), ranks)
    reservation.close()


def run_rank(rank: int, port: int, ranks: int, model_dir: str) -> None:
    from slime.backends.megatron import compat

    compat.install()
    from megatron.core import parallel_state

    from slime.backends.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    layout = {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}
    trainer = MegatronTrainer(rollouts.arguments(Path(model_dir), **layout))
    gc.collect()
    gc.disable()  # what only the collector would find counts: it may come much later
    present = []
    for rollout_id in range(2):
        (batch,) = rollouts.batches(rollouts.columns(rollout_id), 1, 2)
        trainer.train(rollout_id, batch)
        del batch
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
