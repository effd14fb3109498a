"""Two runs in one directory: the second is told of the first, until that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.driver.process import acquire_run_lock
from slime.ray.supervision import InputError

NUM_GPUS = 0

HOLDER = """
import sys, time
from slime.driver.process import acquire_run_lock
held = acquire_run_lock(sys.argv[1], "--save")
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_is_told_of_the_first(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    first = acquire_run_lock(directory, "--run-dir")
    for _ in range(2):
        with pytest.raises(InputError, match=rf"yet: another run, process {os.getpid()} on \S+, writes there: wait"):
            acquire_run_lock(directory, "--run-dir")
    other = acquire_run_lock(tmp_path / "other", "--save")
    os.close(first)
    os.close(acquire_run_lock(directory, "--run-dir"))
    os.close(other)


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            acquire_run_lock(tmp_path, "--save")
    finally:
        holder.kill()
        holder.wait(60)
    os.close(acquire_run_lock(tmp_path, "--save"))
