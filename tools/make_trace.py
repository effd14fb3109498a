#!/usr/bin/env python3
"""Make trace.json of a run, for https://ui.perfetto.dev: what each process did when, and each sample.

    python3 tools/make_trace.py RUN_DIR
    python3 tools/make_trace.py RUN_DIR --rollouts 3-5 --output three_rollouts.json.gz

It needs no more than Python, and a run may still go on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import BadInputError
from tools.tracing.chrome import events_of
from tools.tracing.lanes import busy
from tools.tracing.lines import Recording, of_rollouts, read_run


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 2 where there is nothing to make it of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, with trace/ in it")
    parser.add_argument("--rollouts", type=_range, metavar="A-B", help="only what went on during these, as 3 or 3-5")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default RUN_DIR/trace.json; .gz is compressed")
    args = parser.parse_args(words)
    output = args.output or args.run_dir / "trace.json"
    try:
        recording = read_run(args.run_dir)
        if args.rollouts:
            recording = of_rollouts(recording, *args.rollouts)
        write(recording, output)
    except (BadInputError, OSError) as error:
        print(f"make_trace.py: error: {error}", file=sys.stderr)
        return 2
    print(summary(recording, output))
    return 0


def write(recording: Recording, output: Path) -> None:
    """Make the file; it is complete or absent."""
    about = {"start": datetime.fromtimestamp(recording.start, UTC).isoformat(), "broken_lines": recording.broken}
    with _to_be(output) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
        for number, event in enumerate(events_of(recording)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def summary(recording: Recording, output: Path) -> str:
    """What was written, and of each process how much of the time it was doing something that has a span."""
    start, end = min(span.start for span in recording.spans), max(span.end for span in recording.spans)
    counts = f"{len(recording.spans)} spans, {len(recording.faults)} faults, {(end - start) / 1e9:.1f} s"
    lines = [f"{output}: {counts}; open it at https://ui.perfetto.dev", f"{'process':<24}{'spans':>8}{'busy s':>10}"]
    lines[-1] += f"{'idle s':>10}{'busy':>8}"
    for role in recording.roles:
        spans = [span for span in recording.spans if span.role == role]
        seconds, wall = busy(spans) / 1e9, (end - start) / 1e9
        share = seconds / wall if wall else 0.0
        lines.append(f"{role:<24}{len(spans):>8}{seconds:>10.2f}{wall - seconds:>10.2f}{share:>8.1%}")
    if recording.broken:
        lines.append(f"{recording.broken} lines were left out that are no whole span, as a crash leaves them")
    return "\n".join(lines)


@contextmanager
def _to_be(output: Path) -> Iterator[IO[str]]:
    staged = output.with_name(f"{output.name}.tmp")
    try:
        with gzip.open(staged, "wt") if output.suffix == ".gz" else staged.open("w") as file:
            yield file
        os.replace(staged, output)
    finally:
        staged.unlink(missing_ok=True)


def _range(word: str) -> tuple[int, int]:
    first, dash, last = word.partition("-")
    try:
        numbers = int(first), int(last if dash else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number or a range of two, as 3 or 3-5") from None
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{word}: {numbers[0]} is after {numbers[1]}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
