"""A step's metrics, added up by hand: of two ranks as data-parallel, context-parallel and pipeline-parallel ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.data import Ragged
from slime.training.loss.token_loss import MAXIMUM, step_metrics
from slime.training.parallel import Parallel, Ranks
from tests.micro_batches import fresh_rows, step_of
from tests.ranks import run_ranks

NUM_GPUS = 0
RANKS = 2
LAYOUTS = {"data parallel": ("dp", "dp_cp"), "context parallel": ("cp", "dp_cp"), "pipeline parallel": ("pp",)}
"""In which ways of splitting both ranks are."""
LARGEST = f"{MAXIMUM}train/diff"
REPORTS: list[list[dict[str, float]]] = [
    [{"train/loss": 0.25, LARGEST: 3.0, "train/cancels": 1e8}, {"train/loss": 0.5, LARGEST: 1.0, "train/cancels": 1.0}],
    [{"train/loss": 1.0, LARGEST: 0.5, "train/cancels": -1e8}, {"train/loss": 2.0, LARGEST: 7.0, "train/cancels": 0.0}],
]
"""Of each rank, by micro-batch."""
TOKENS = [10, 5]
WANTED = {
    "data parallel": {"train/loss": 3.75, "train/diff_max": 7.0, "train/cancels": 1.0, "tokens": 15.0},
    # Both hold parts of the same rows.
    "context parallel": {"train/loss": 3.75, "train/diff_max": 7.0, "train/cancels": 1.0, "tokens": 10.0},
    # The first stage has no reports.
    "pipeline parallel": {"train/loss": 3.0, "train/diff_max": 7.0, "train/cancels": -1e8, "tokens": 5.0},
}
SOME: list[list[dict[str, float]]] = [
    [{"train/loss": 1.0}, {"train/loss": 2.0, "train/mine": 4.0, LARGEST: 0.25}],
    [{"train/theirs": 8.0, "train/loss": 4.0}],
]
"""Of a loss that does not report the same of every micro-batch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks found."""
    directory = tmp_path_factory.mktemp("metrics")
    run_ranks(run_rank, (str(directory),), RANKS)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_a_step(found: list[dict[str, Any]], layout: str) -> None:
    for of_rank in found:
        assert of_rank[layout] == WANTED[layout]


def test_what_only_some_micro_batches_report_counts_as_0_of_the_others(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        metrics = of_rank["some"]
        assert metrics == {
            "train/loss": 7.0, "train/mine": 4.0, "train/theirs": 8.0, "train/diff_max": 0.25, "tokens": 15.0,
        }  # fmt: skip


def test_masks_of_all_ranks_make_the_means(found: list[dict[str, Any]]) -> None:
    """Two ranks that mask tokens, some rollouts throughout, weigh the others as one process does with such masks."""
    assert [of_rank["weighed"] for of_rank in found] == [True] * RANKS
    assert sum(of_rank["sum of weights"] for of_rank in found) == pytest.approx(1.0, rel=1e-6)


def weigh_masked(rank: int) -> dict[str, Any]:
    """Whether this rank's half of a batch has the weights of the whole, and what they add up to."""
    from slime.training.micro_batch import MicroBatch
    from slime.training.rollout_data import weigh
    from tests.micro_batches import pack_layout

    layout = pack_layout(multiple=1)
    batch = fresh_rows(3)
    masks = [batch.loss_mask[row] * (np.arange(len(batch.loss_mask[row])) % 3 == 0) for row in range(len(batch))]
    masks[3][:] = masks[4][:] = masks[5][:] = 0  # all parts of one rollout
    sums = np.bincount(batch.rollout_ids, [mask.sum() for mask in masks]).astype(np.int64)[batch.rollout_ids]
    masked = batch.changed(loss_mask=Ragged.from_rows(masks, np.uint8), rollout_mask_sums=sums)
    rows = np.arange(len(batch))[rank::RANKS]
    wanted = MicroBatch(masked, rows, step_of(masked), layout)
    own = MicroBatch(batch, rows, step_of(batch), layout)
    own.set_mask(torch.cat([torch.from_numpy(masks[row]).float() for row in rows.tolist()]))
    weigh(batch, [own], dist.group.WORLD)
    return {
        "weighed": torch.equal(own.mean_weights, wanted.mean_weights),
        "sum of weights": float(own.mean_weights.sum()),
    }


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    metrics: dict[str, Any] = weigh_masked(rank)
    both = Ranks.of(dist.group.WORLD)
    for layout, axes in LAYOUTS.items():
        parallel = Parallel(**dict.fromkeys(axes, both))
        own = REPORTS[rank] if parallel.is_last_stage else []
        metrics[layout] = step_metrics([tensors(report) for report in own], {"tokens": TOKENS[rank]}, parallel)
    alike = Parallel(dp=both, dp_cp=both)
    metrics["some"] = step_metrics([tensors(report) for report in SOME[rank]], {"tokens": TOKENS[rank]}, alike)
    Path(directory, f"rank{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


def tensors(report: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in report.items()}
