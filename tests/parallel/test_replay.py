"""Routing replay under every layout: tokens go where the pass of the old log-probs, or an engine, has sent them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import tiny
from tests.parallel.conftest import run_worker

NUM_GPUS = 0
RTOL = 1e-5
"""Of the largest entry of a gradient, between layouts."""
SAME = 1e-6
"""Between a step with replay and one without, at equal weights."""

TP, PP, CP, EP, ETP = (
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp": (2, {TP: 2, SP: True}),
    "pp2": (2, {PP: 2}),
    "pp2_vpp2": (2, {PP: 2, VPP: 2}),
    "cp2": (2, {CP: 2}),
    "ep2": (2, {EP: 2}),
    "tp2_ep2": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    "tp2_cp2": (4, {TP: 2, SP: True, CP: 2}),
    "pp2_ep2": (4, {PP: 2, EP: 2}),
    "cp2_ep2": (4, {CP: 2, EP: 2}),
}
JOBS = [(mode, recompute) for mode in ("trainers", "engines") for recompute in ("", "full", "moe")]
IN_CI: dict[str, list[tuple[str, str]]] = {
    "tp2_ep2": [("trainers", ""), ("engines", "moe")],
    "pp2_vpp2": [("trainers", "full"), ("engines", "full")],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has left what it came to."""
    directory = tmp_path_factory.mktemp("replay")
    tiny.model("qwen3_moe").save_pretrained(directory / "model")
    check(run(directory, "one", 1, {}, [(mode, "") for mode in ("trainers", "engines")]))
    return directory


def run(work: Path, name: str, ranks: int, layout: dict[str, Any], jobs: list[tuple[str, str]]) -> dict[str, Any]:
    spec = {"name": name, "layout": layout, "jobs": jobs}
    run_worker(ranks, "replay_worker.py", work, json.dumps(spec), log=work / f"{name}.log")
    report: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return report


def check(report: dict[str, Any]) -> None:
    for job, differences in report.items():
        print(job, differences)
        for other, (error, where) in differences.items():
            assert error < (SAME if other == "live" else RTOL), (job, other, error, where)


@pytest.mark.parametrize("layout", IN_CI)
def test_tokens_go_where_they_went(work: Path, layout: str) -> None:
    """The worker looks at each token; what comes of it is the same as in one process and, at equal weights, as without
    replay."""
    check(run(work, layout, *LAYOUTS[layout], IN_CI[layout]))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_where_they_went_in_every_layout(work: Path, layout: str) -> None:
    check(run(work, f"{layout}.full", *LAYOUTS[layout], JOBS))
