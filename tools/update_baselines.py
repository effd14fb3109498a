"""Make what runs of a test showed the baseline that its later runs are held against (docs/ci.md).

    python3 tools/update_baselines.py RUN_DIR [RUN_DIR ...]

Each directory is of a run that a test file of tests/ has checked, well or not. Of several runs of one test a baseline
is the mean. What changes is printed; nothing is written unless every run is readable.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.utils.errors import BadInputError  # noqa: E402
from slime.utils.external_utils.metric_gate import Seen, read_baselines, read_seen, write_baselines  # noqa: E402

BASELINES = Path(__file__).resolve().parents[1] / "tests" / "ci" / "baselines.json"


def mean_of(runs: list[Seen]) -> Seen:
    """One baseline out of runs of a test.

    Raises:
        BadInputError: they are of different cards, or have different metrics or steps.
    """
    first = runs[0]
    shapes = {(run.card, *((metric, *sorted(steps)) for metric, steps in sorted(run.values.items()))) for run in runs}
    if len(shapes) > 1:
        raise BadInputError("runs of one test are of different cards, or have different metrics or steps")
    values = {
        metric: {step: statistics.fmean(run.values[metric][step] for run in runs) for step in steps}
        for metric, steps in first.values.items()
    }
    return Seen(first.card, values)


def update(run_dirs: list[Path], file: Path) -> list[str]:
    """Put the runs' values in place of their tests' baselines; a line for each value that is new or another.

    Raises:
        BadInputError: a run's values cannot be read, or do not go together.
    """
    runs = defaultdict(list)
    for run_dir in run_dirs:
        test, seen = read_seen(run_dir)
        runs[test].append(seen)
    baselines, lines = read_baselines(file), []
    for test, found in runs.items():
        old = baselines.get(test, Seen("none"))
        new = baselines[test] = mean_of(found)
        for metric, steps in new.values.items():
            for step, value in steps.items():
                before = old.values.get(metric, {}).get(step)
                if before != value:
                    was = "none" if before is None else f"{before:.6g}"
                    lines.append(f"{test}: {metric} at step {step}: {was} -> {value:.6g} ({new.card})")
    write_baselines(file, baselines)
    return lines


def main() -> int:
    """Parse the command line and update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path)
    options = parser.parse_args()
    try:
        lines = update(options.run_dirs, BASELINES)
    except BadInputError as error:
        parser.error(str(error))
    print("\n".join(lines) or "nothing has changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
