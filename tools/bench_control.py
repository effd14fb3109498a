#!/usr/bin/env python3
"""What one process pays for each engine of a push, and for each rank of a step, when all of them do nothing.

    python tools/bench_control.py
    python tools/bench_control.py --engines 8,16,32,64 --width 8 --parameters 850 --ranks 0

Engines are answers over HTTP by another process, to the real calls of training rank 0, the proof of the push included;
no weights travel. Ranks are idle Ray actors, which the driver calls as it calls trainers. One JSON line a figure, a
table at the end: processor time is that of the process that calls, and is what to compare, on a busy host with itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from tools.benchmarks import control  # noqa: E402
from tools.benchmarks.report import Report  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", default="8,16,32,64", help="how many, one push after another; default: %(default)s"
    )
    parser.add_argument("--width", type=int, default=1, help="ranks of one engine; default: %(default)s")
    parser.add_argument("--parameters", type=int, default=300, help="that each rank tells of; default: %(default)s")
    parser.add_argument("--pushes", type=int, default=5, help="of which the median counts; default: %(default)s")
    parser.add_argument("--ranks", default="4,8,16", help="idle Ray actors; 0 for none; default: %(default)s")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    options = parser.parse_args(argv)
    for name in ("engines", "ranks"):
        words = getattr(options, name)
        try:
            counts = sorted({int(word) for word in words.split(",")})
        except ValueError:
            parser.error(f"--{name} {words} is not a list of numbers such as 8,16")
        if counts[0] < 0:
            parser.error(f"--{name} {words}: {counts[0]} is below 0")
        setattr(options, name, [count for count in counts if count])
    for name in ("width", "pushes", "parameters"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is not above 0")
    return options


def measure_engines(options: argparse.Namespace, report: Report) -> None:
    """Seconds of a push that brings nothing, by the number of engines."""
    for engines in options.engines:
        found = control.measure(engines, options.width, options.parameters, options.pushes)
        details = {"engines": engines, "width": options.width, "parameters": options.parameters}
        report.add(f"push to {engines} engines", "stub", 0, round(found.processor_s, 4), "s CPU", **details)
        report.add(f"push to {engines} engines, wall", "stub", 0, round(found.wall_s, 4), "s", **details)
        each = 1e3 * found.processor_s / engines
        report.add(f"push to {engines} engines, each", "stub", 0, round(each, 3), "ms CPU", **details)


def measure_ranks(options: argparse.Namespace, report: Report) -> None:
    """Seconds of one call of every rank, by their number."""
    if not options.ranks:
        return
    import ray

    ray.init(num_cpus=max(options.ranks), include_dashboard=False, log_to_driver=False)
    try:
        ranks = control.idle_ranks(max(options.ranks))
        for count in options.ranks:
            found = control.call_ranks(ranks[:count], options.pushes)
            report.add(f"call of {count} ranks", "idle", 0, round(1e3 * found.processor_s, 3), "ms CPU", ranks=count)
            report.add(f"call of {count} ranks, wall", "idle", 0, round(1e3 * found.wall_s, 3), "ms", ranks=count)
    finally:
        ray.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when everything was measured."""
    options = parse(argv)
    words = [f"--{name} {','.join(map(str, getattr(options, name))) or 0}" for name in ("engines", "ranks")]
    words += [f"--{name} {getattr(options, name)}" for name in ("width", "parameters", "pushes")]
    report = Report(f"python3 tools/bench_control.py {' '.join(words)}", time.monotonic() + math.inf, options.output)
    try:
        measure_engines(options, report)
        measure_ranks(options, report)
    finally:
        report.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
