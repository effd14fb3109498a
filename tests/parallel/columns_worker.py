"""One rank of one layout, under torchrun: what a model gets of columns that slime knows nothing of.

``torchrun --nproc-per-node N columns_worker.py MODEL_DIR WORK_DIR '{LAYOUT}'``
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.megatron import compat

compat.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.data import Ragged, TrainBatch  # noqa: E402
from tests import column_hooks  # noqa: E402
from tests.parallel import rollouts  # noqa: E402

HOOKS = str(Path(column_hooks.__file__).resolve())


def with_columns(rows: TrainBatch) -> TrainBatch:
    """As the rollout side ships them, numbered anew where a rollout is cut into samples."""
    lengths, responses = rows.lengths.tolist(), rows.response_lengths.tolist()
    routes = [column_hooks.route_of(i, n, r) for i, (n, r) in enumerate(zip(lengths, responses, strict=True))]
    places = [column_hooks.place_of(i, n) for i, n in enumerate(lengths)]
    return rows.changed(
        sample_indices=np.arange(len(rows)),
        route=Ragged.from_rows(routes, np.int16, column_hooks.SHAPE),
        place=Ragged.from_rows(places, np.int64),
    )


def main() -> None:
    model_dir, work, layout = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    args = rollouts.arguments(
        model_dir,
        **layout,
        custom_model_provider_path=f"{HOOKS}:model_provider",
        column_modules=[HOOKS],
        num_steps_per_rollout=2,
    )
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    trainer = MegatronTrainer(args)
    rows = with_columns(rollouts.uneven(7, rollouts=16))
    batch = rollouts.batches(
        rows,
        trainer.dp_size,
        steps=2,
        max_tokens=256 * args.context_parallel_size,
        micro_batch_multiple=args.pipeline_model_parallel_size if interleaved else 1,
    )[trainer.dp_rank]
    trainer.train(0, batch)
    # Every token of the rank's rows, on whichever context-parallel rank, as often as there were passes.
    passes = 3  # of the reference, for log-probs, and to train
    seen: Counter[int] = Counter()
    for chunk in trainer.model_chunks:
        own = Counter(p for call in chunk.seen for p in call["place"][0].tolist() if p >= 0)
        every: list[Counter[int]] = [Counter()] * parallel_state.get_context_parallel_world_size()
        dist.all_gather_object(every, own, parallel_state.get_context_parallel_group())
        seen = sum(every, Counter())
        wanted = Counter(dict.fromkeys(batch.columns["place"].values.tolist(), passes))
        assert seen == wanted, (len(seen), len(wanted), seen.most_common(3))
    (work / f"rank{dist.get_rank()}.json").write_text(json.dumps({"tokens": len(seen)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
