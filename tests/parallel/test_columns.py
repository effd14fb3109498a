"""Columns that a module of the user's declares arrive in the forward call, right at every token, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import tiny
from tests.parallel.conftest import run_worker

NUM_GPUS = 0

TP, PP, CP = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2_sp": (2, {TP: 2, "sequence_parallel": True}),
    "cp2": (2, {CP: 2}),
    "pp2": (2, {PP: 2}),
    "pp2_vpp2": (2, {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}
IN_CI = ("cp2",)


@pytest.mark.parametrize(
    "layout", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_declared_columns_reach_the_model(layout: str, tmp_path: Path) -> None:
    """A rollout of the batch is cut into three samples; micro-batches are of dynamic size."""
    model = tmp_path / "qwen3"
    tiny.model("qwen3").save_pretrained(model)
    ranks, sizes = LAYOUTS[layout]
    run_worker(ranks, "columns_worker.py", model, tmp_path, json.dumps(sizes), log=tmp_path / "log")
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert all(report["tokens"] > 500 for report in reports), reports
