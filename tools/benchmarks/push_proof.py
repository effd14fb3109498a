"""What the proof of every push costs, by the traces and metrics that a run has left in its directory.

    python3 train.py --run-dir RUN_DIR ...
    python3 -m tools.benchmarks.push_proof RUN_DIR

Prints milliseconds of each part a push, in the median over all pushes but the first, and their share of a step. The
probe is made beside the next rollout, but for trainers that sleep after it: what the driver waits for it is one part
more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PARTS = {
    ("trainer_0", "push/note"): "trainers count and sample what they send",
    ("trainer_0", "push/call", "begin the proof"): "engines that are new forget earlier loads",
    ("trainer_0", "push/call", "prove"): "engines tell what they loaded and hold",
    ("driver", "driver/probe"): "the driver waits for the probe",
}
"""By process, span and, of calls, phase."""
BESIDE = {
    ("trainer_0", "push/probe"): "trainers score the probe",
    ("engine_0_actor", "engine/probe"): "an engine scores the probe",
}
"""Those that nobody need wait for."""


def milliseconds(spans: Sequence[Mapping[str, Any]]) -> tuple[dict[int, dict[str, float]], dict[str, list[float]]]:
    """Of each version the parts of its push; and what was made beside, one number a push."""
    pushes: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS.values(), 0.0))
    beside: dict[str, list[float]] = {part: [] for part in BESIDE.values()}
    for line in spans:
        key = (line["role"], line["name"], *([line["phase"]] if line["name"] == "push/call" else []))
        if key in PARTS and "version" in line:
            pushes[int(line["version"])][PARTS[key]] += 1000 * line["seconds"]
        elif key in BESIDE:
            beside[BESIDE[key]].append(1000 * line["seconds"])
    return dict(pushes), beside


def table(
    pushes: Mapping[int, Mapping[str, float]], beside: Mapping[str, Sequence[float]], steps: Iterable[float]
) -> list[str]:
    """Lines: the median of each part over all pushes but the first, and of all together, and its share of a step."""
    later = [pushes[version] for version in sorted(pushes)[1:]]
    step = 1000 * median(steps)
    rows = {part: median(push[part] for push in later) for part in PARTS.values()}
    rows["together"] = median(sum(push.values()) for push in later)
    rows |= {f"beside: {part}": median(numbers[1:]) for part, numbers in beside.items() if len(numbers) > 1}
    lines = [f"{len(later)} pushes, steps of {step:.0f} ms", "| part | ms | % of a step |", "|---|---|---|"]
    return lines + [f"| {part} | {value:.2f} | {100 * value / step:.3f} |" for part, value in rows.items()]


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a run has made no second push."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="of a run with trainers and engines")
    run_dir = parser.parse_args(argv).run_dir
    spans = [line for path in sorted(run_dir.glob("trace/*.jsonl")) for line in lines_of(path)]
    pushes, beside = milliseconds(spans)
    steps = [line["perf/step_time"] for line in lines_of(run_dir / "metrics.jsonl") if "perf/step_time" in line]
    if len(pushes) < 2 or not steps:
        print(f"{run_dir}: no run of two pushes or more is here", file=sys.stderr)
        return 1
    print("\n".join(table(pushes, beside, steps)))
    return 0


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Of a file with JSON; of none nothing."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
