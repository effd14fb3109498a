"""What the proof of every push costs, by the traces and metrics that a run has left in its directory.

    python3 train.py --run-dir RUN_DIR ...
    python3 -m tools.benchmarks.push_proof RUN_DIR

Prints milliseconds of each part a push, in the median over all pushes but the first, and their share of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

PARTS = {
    ("trainer_0", "push/note"): "trainers count and sample what they send",
    ("trainer_0", "push/call", "begin the proof"): "engines that are new forget earlier loads",
    ("trainer_0", "push/call", "prove"): "engines tell what they loaded and hold",
    ("trainer_0", "push/probe"): "trainers score the probe",
    ("driver", "driver/probe"): "engines score the probe",
}
"""By process, span and, of calls, phase."""


def milliseconds(spans: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Of each version the parts of its push."""
    pushes: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS.values(), 0.0))
    for line in spans:
        key = (line["role"], line["name"], *([line["phase"]] if line["name"] == "push/call" else []))
        if key in PARTS and "version" in line:
            pushes[int(line["version"])][PARTS[key]] += 1000 * line["seconds"]
    return dict(pushes)


def table(pushes: Mapping[int, Mapping[str, float]], steps: Iterable[float]) -> list[str]:
    """Lines: the median of each part over all pushes but the first, and of all together, and its share of a step."""
    later = [pushes[version] for version in sorted(pushes)[1:]]
    step = 1000 * median(steps)
    rows = {part: median(push[part] for push in later) for part in PARTS.values()}
    rows["together"] = median(sum(push.values()) for push in later)
    lines = [f"{len(later)} pushes, steps of {step:.0f} ms", "| part | ms | % of a step |", "|---|---|---|"]
    return lines + [f"| {part} | {value:.2f} | {100 * value / step:.3f} |" for part, value in rows.items()]


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a run has made no second push."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="of a run with trainers and engines")
    run_dir = parser.parse_args(argv).run_dir
    spans = (line for path in sorted(run_dir.glob("trace/*.jsonl")) for line in lines_of(path))
    pushes = milliseconds(spans)
    steps = [line["perf/step_time"] for line in lines_of(run_dir / "metrics.jsonl") if "perf/step_time" in line]
    if len(pushes) < 2 or not steps:
        print(f"{run_dir}: no run of two pushes or more is here", file=sys.stderr)
        return 1
    print("\n".join(table(pushes, steps)))
    return 0


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Of a file with JSON; of none nothing."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
