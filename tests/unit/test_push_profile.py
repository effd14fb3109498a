"""What `bench.py refit --profile` says of a run's traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.benchmarks import push_profile

NUM_GPUS = 0


def test_parts_are_medians_of_the_last_pushes_by_rank(tmp_path: Path) -> None:
    def line(name: str, version: int, seconds: float, **more: Any) -> str:
        return json.dumps({"name": name, "version": version, "seconds": seconds, **more}) + "\n"

    (tmp_path / "trace").mkdir()
    first = line("push/gather", 0, 9.0) + line("train/save", 1, 5.0)
    for version, seconds in ((1, 0.010), (2, 0.030), (3, 0.020)):
        first += line("push/gather", version, seconds) + line("push/gather", version, 0.001)
        first += line("push/deliver", version, 0.004) + line("push/call", version, 0.002, phase="pause")
    (tmp_path / "trace" / "trainer_0.jsonl").write_text(first)
    (tmp_path / "trace" / "trainer_1.jsonl").write_text(line("push/gather", 3, 0.5))
    rows = {line[:28].strip(): line[28:].split() for line in push_profile.table(tmp_path, 0.040, 3)}
    assert rows == {
        "ms of a push": ["trainer_0", "trainer_1"],
        "push/gather": ["21.0", "500.0"],
        "push/deliver": ["4.0", "0.0"],
        "call: pause": ["2.0", "0.0"],
        "the loop over buckets": ["25.0", "500.0"],
        "other ranks, and the rest": ["13.0"],
        "paused": ["40.0"],
    }
