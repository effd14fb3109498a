"""One rank of one layout, under torchrun: what a model gets of columns that slime knows nothing of.

``torchrun --nproc-per-node N columns_worker.py MODEL_DIR WORK_DIR '{LAYOUT}'``
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.data import Ragged, TrainBatch  # noqa: E402
from tests import column_hooks  # noqa: E402
from tests.parallel import rollouts  # noqa: E402

HOOKS = str(Path(column_hooks.__file__).resolve())


def with_columns(rows: TrainBatch, directory: Path) -> TrainBatch:
    """As the rollout side ships them, numbered anew where a rollout is cut into samples."""
    pictures = np.empty(len(rows), dtype=object)
    pictures[:] = [tuple(column_hooks.pictures_of(group, directory)) for group in rows.group_indices.tolist()]
    lengths, responses = rows.lengths.tolist(), rows.response_lengths.tolist()
    routes = [column_hooks.route_of(i, n, r) for i, (n, r) in enumerate(zip(lengths, responses, strict=True))]
    places = [column_hooks.place_of(i, n) for i, n in enumerate(lengths)]
    return rows.changed(
        sample_indices=np.arange(len(rows)),
        route=Ragged.from_rows(routes, np.int16, column_hooks.SHAPE),
        place=Ragged.from_rows(places, np.int64),
        pictures=pictures,
    )


def check_pictures(batch: TrainBatch, seen: list[dict[str, Any]], passes: int) -> None:
    """Every forward call had those of its own samples, in their order, on each context-parallel rank."""
    micro_batches = [rows for step in batch.steps for rows in step.micro_batches]
    assert len(seen) == passes * len(micro_batches)
    # Passes without gradients go over all steps' micro-batches, as training does.
    for call, rows in zip(seen, micro_batches * passes, strict=True):
        groups = batch.group_indices[rows].tolist()
        pictures = [column_hooks.picture_of(group, number) for group in groups for number in range(group % 3)]
        if not pictures:
            assert call["pixels"] is None
            continue
        assert call["grid"].tolist() == [len(picture) for picture in pictures]
        assert call["pixels"][:, 0].tolist() == list(b"".join(pictures))
        numbers = [number for group in groups for number in range(group % 3) for _ in range(5 + number)]
        assert call["pixels"][:, 1].tolist() == numbers


def main() -> None:
    model_dir, work, layout = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    args = rollouts.arguments(
        model_dir,
        **layout,
        custom_model_provider_path=f"{HOOKS}:model_provider",
        column_modules=[HOOKS],
        num_steps_per_rollout=2,
    )
    trainer = MegatronTrainer(args)
    rows = with_columns(rollouts.uneven(7, rollouts=16), work / "media")
    batch = rollouts.batch_of_rank(args, rows, trainer.dp_size, trainer.dp_rank)
    trainer.train(0, batch)
    # Every token of the rank's rows, on whichever context-parallel rank, as often as there were passes.
    passes = 3  # of the reference, for log-probs, and to train
    seen: Counter[int] = Counter()
    for chunk in trainer.model_chunks:
        own = Counter(p for call in chunk.seen for p in call["place"].tolist() if p >= 0)
        every: list[Counter[int]] = [Counter()] * parallel_state.get_context_parallel_world_size()
        dist.all_gather_object(every, own, parallel_state.get_context_parallel_group())
        seen = sum(every, Counter())
        wanted = Counter(dict.fromkeys(batch.columns["place"].values.tolist(), passes))
        assert seen == wanted, (len(seen), len(wanted), seen.most_common(3))
        check_pictures(batch, chunk.seen, passes)
    (work / f"rank{dist.get_rank()}.json").write_text(json.dumps({"tokens": len(seen)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
