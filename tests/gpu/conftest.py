"""Cases for hosts with GPUs: each skips itself where there are fewer than it needs; a table ends the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slime.utils import device
from tests.integration.tiny_run import make_workspace


def pytest_configure() -> None:
    """Give a worker of `scripts/test-gpu.sh` one GPU for itself, before anything looks for GPUs; or with ``--share``
    as many as are to share one."""
    if shared := os.environ.get("SLIME_TEST_SHARE"):
        device.count = lambda: int(shared)
    gpus, worker = os.environ.get("SLIME_TEST_GPUS", "").split(), os.environ.get("PYTEST_XDIST_WORKER")
    if gpus and worker is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here as ``gpu``, and as ``gpus(n)`` by its file's ``NUM_GPUS`` of several; skip what needs more
    GPUs than there are. A case that needs more than its file says so by a ``gpus(n)`` of its own."""
    here, count = Path(__file__).parent, device.count()
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else item.module.NUM_GPUS
        if needed > 1 and not marker:
            item.add_marker(pytest.mark.gpus(needed))
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {count} are here"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a case: what came of it, its seconds, and the figures that it noted by ``record_property``."""
    reports = [
        report
        for outcome in ("passed", "failed", "skipped", "error")
        for report in terminalreporter.getreports(outcome)
        if "tests/gpu/" in report.nodeid and (report.when == "call" or outcome != "passed")
    ]
    if not reports:
        return
    terminalreporter.section("GPU cases")
    for report in reports:
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        name = report.nodeid.split("tests/gpu/")[-1]
        terminalreporter.write_line(f"{name:<64} {report.outcome:<8} {report.duration:6.1f} s  {figures}")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a few problems."""
    return make_workspace(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(autouse=True)
def no_choice_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron notes a model's choice in the environment, and refuses any other one of its process and of its children:
    no case meets what another noted."""
    for kernels in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.delenv(f"NVTE_{kernels}_ATTN", raising=False)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank with a generator for its weights."""
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state, tensor_parallel

    directory: Path = tmp_path_factory.mktemp("megatron")
    device.bind_local_device(0)
    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
