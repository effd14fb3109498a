"""What a training step leaves in memory: nothing of its tokens, so that nothing of them stays when the rest sleeps."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tests.parallel import rollouts, tiny
from tests.ranks import run_ranks

NUM_GPUS = 0
_SMALL = 1024
"""Bytes; counts of each expert's tokens are fewer."""


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_step_leaves_nothing_of_its_tokens(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path / "model")
    run_ranks(run_rank, (str(tmp_path / "model"),), 1)


def run_rank(rank: int, model_dir: str) -> None:
    from slime.backends.megatron import compat

    compat.install()
    from slime.backends.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": str(rank), "WORLD_SIZE": "1"}
    trainer = MegatronTrainer(rollouts.arguments(Path(model_dir)))
    gc.collect()
    gc.disable()  # what only the collector would find counts: it may come much later
    present = []
    for rollout_id in range(2):
        (batch,) = rollouts.batches(rollouts.columns(rollout_id), 1, 2)
        trainer.train(rollout_id, batch)
        del batch
        present.append(large_tensors())
    first, second = present
    assert not second.keys() - first.keys(), [second[key] for key in second.keys() - first.keys()]


def large_tensors() -> dict[int, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each, by its storage."""
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return {t.untyped_storage()._cdata: (t.shape, t.dtype) for t in tensors if t.untyped_storage().nbytes() > _SMALL}
