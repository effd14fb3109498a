"""Random command lines pass their dry run or are refused in one line (tools/fuzz_options.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import fuzz_options
from tools.fuzzing.forked_dry_runs import OK, REFUSED, dry_run

NUM_GPUS = 0
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    fuzz_options.prepare(path)
    return path


def test_the_base_passes_and_a_fault_is_seen(directory: Path) -> None:
    base = [*fuzz_options.BASE.split(), "--colocate"]
    assert dry_run(base, directory).kind == OK
    refused = dry_run([*base, "--lr", "nan"], directory)
    assert (refused.kind, refused.text) == (REFUSED, "argument --lr: must be a finite number, not nan")
    (directory / "ends.py").write_text("import os; os._exit(7)")
    (directory / "sleeps.py").write_text("while True: pass")
    assert dry_run([*base, "--custom-rm-path", "ends.py:f"], directory).kind == "status 7"
    assert dry_run([*base, "--custom-rm-path", "sleeps.py:f"], directory, deadline=1).kind == "no end after 1 s"


@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 20), *(pytest.param(seed, 500, marks=pytest.mark.full) for seed in (1, 2, 3, 4, 5))]
)
def test_no_command_line_is_at_fault(directory: Path, seed: int, cases: int) -> None:
    found = [
        f"case {number}: {fault.kind}: {case.words}"
        for number, case, fault in fuzz_options.faults(seed, range(cases), directory, deadline=30)
    ]
    assert not found, "\n".join(found)
