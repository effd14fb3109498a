"""Each rank stores of a distributed optimizer what it has the most of: against what the ranks have, by layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.utils import device
from tests.parallel import tiny
from tests.parallel.cases import VARIANTS
from tests.parallel.conftest import run_worker

NUM_GPUS = 0
TP2 = {"tensor_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
"""With which gradients are in buckets, each of which all ranks have a share of."""
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2": (2, "qwen2", {}),
    "dp2_offload": (2, "qwen2", VARIANTS["offload"]),  # whose state is pinned, where there are GPUs
    "dp4": (4, "qwen3", {}),
    "dp4_buckets": (4, "qwen3", OVERLAP | {"ddp_bucket_size": 5001}),
    "tp2_dp2": (4, "qwen2", TP2),
    "pp2_dp2": (4, "qwen3_tied", {"pipeline_model_parallel_size": 2}),
    "cp2_dp2": (4, "qwen3", {"context_parallel_size": 2}),
    "ep2_dp4": (4, "qwen3_moe", {"expert_model_parallel_size": 2}),
    "tp2_dp2_etp1": (4, "qwen3_moe", {**TP2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
    "etp2_tp2_dp2": (4, "qwen3_moe", {**TP2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}),
}


FIRST = {"dp2", "dp2_offload"} if device.is_cuda() else {"dp2"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.full) for n in LAYOUTS])
def test_each_parameter_is_stored_once_and_comes_back(name: str, tmp_path: Path) -> None:
    ranks, model, layout = LAYOUTS[name]
    directory = tmp_path / model
    tiny.model(model).save_pretrained(directory)
    run_worker(ranks, "shares_worker.py", directory, tmp_path / "saved", json.dumps(layout), log=tmp_path / "log")
