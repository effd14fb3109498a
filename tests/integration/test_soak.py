"""The soak in small: a few faults of the real parts, in two shards, and all adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ROOT

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_RUN_S = 1800
_KINDS = ("engine_killed", "reward_raises", "trainer_killed")


def test_a_run_that_is_struck_in_two_shards_ends_as_if_nothing_were(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/soak.py"), "--seed", "1", "--out", str(tmp_path / "soak")]
    command += ["--faults", str(len(_KINDS)), "--kinds", *_KINDS, "--shard-minutes"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    statuses, minutes = list[int](), ["4", "25"]
    while not statuses or statuses[-1] == 3:
        assert len(statuses) < 4
        shard = [*command, minutes[min(len(statuses), 1)]]
        statuses.append(subprocess.run(shard, env=environment, timeout=_RUN_S).returncode)
    assert statuses[-1] == 0, (tmp_path / "soak" / "run.log").read_text()[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "soak" / "injected.jsonl").read_text().splitlines()]
    assert sorted(line["kind"] for line in lines if line["bit"]) == sorted(_KINDS)
    table = (tmp_path / "soak" / "soak.md").read_text()
    assert " | NO | " not in table
    assert table.count(" | yes | ") == 7
