"""Cases for hosts with GPUs: each skips itself where there are fewer than it needs; a table ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.utils import device
from tests.integration.test_train import make_workspace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here as ``gpu``, and skip what needs more GPUs than there are."""
    here, count = Path(__file__).parent, device.count()
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
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
