"""What a push spends its time on, rank by rank, by the traces that a run has left: for ``bench.py refit --profile``."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from tools.benchmarks.push_proof import lines_of

_LOOP = ("push/gather", "push/stage", "push/note", "push/deliver")
"""What is done for buckets, one after the other; the last is waiting for engines to have loaded one."""
_CALL = "push/call"


def table(run_dir: Path, paused: float, counted: int) -> list[str]:
    """Lines: milliseconds of each part in the median over the last ``counted`` pushes, for each training rank; of rank
    0 also what is left of the ``paused`` seconds, in which it waits for other ranks."""
    ranks = {path.stem: _parts(path, counted) for path in sorted(run_dir.glob("trace/trainer_*.jsonl"))}
    names = list(dict.fromkeys(name for parts in ranks.values() for name in parts))
    names.sort(key=lambda name: name not in _LOOP)
    rows = [(name, [parts.get(name, 0.0) for parts in ranks.values()]) for name in names]
    rows.append(("the loop over buckets", [sum(parts.get(name, 0.0) for name in _LOOP) for parts in ranks.values()]))
    lines = [f"{'ms of a push':<28}" + "".join(f"{rank:>12}" for rank in ranks)]
    lines += [f"{name:<28}" + "".join(f"{1000 * seconds:>12.1f}" for seconds in values) for name, values in rows]
    rest = paused - sum(ranks.get("trainer_0", {}).values())
    return [*lines, f"{'other ranks, and the rest':<28}{1000 * rest:>12.1f}", f"{'paused':<28}{1000 * paused:>12.1f}"]


def _parts(path: Path, counted: int) -> dict[str, float]:
    """By part the median seconds of a rank's last pushes; calls by their phases."""
    pushes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines_of(path):
        name = line["name"]
        if "version" in line and (name in _LOOP or name == _CALL):
            pushes[str(line["version"])][f"call: {line['phase']}" if name == _CALL else name] += line["seconds"]
    last = list(pushes.values())[-counted:]
    return {
        name: median(push.get(name, 0.0) for push in last) for name in {name: None for push in last for name in push}
    }
