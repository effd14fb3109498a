#!/usr/bin/env python3
"""Look at this host: would a run begin, and not end by what has nothing to do with it?

    python3 tools/doctor.py
    python3 tools/doctor.py RUN_DIR --bundle report.tar.gz
    python3 tools/doctor.py --self-test

It needs no installed package, and says which ones are missing. Exit status 1 where something would end a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.doctoring.bundle import write_bundle
from tools.doctoring.findings import Check, Finding, Level, Setting
from tools.doctoring.table import CHECKS, SELF_TEST, findings_of, lines_of


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 1 where something would end a run, 2 where what was asked for cannot be done."""
    args = _parse(words)
    if args.run_dir is not None and not args.run_dir.is_dir():
        print(f"doctor.py: error: {args.run_dir}: no such directory", file=sys.stderr)
        return 2
    setting = Setting(args.run_dir, tuple(args.directory), tuple(args.port), self_test_s=args.self_test_timeout)
    results: list[tuple[Check, list[Finding]]] = []
    said: list[str] = []
    for check in (*CHECKS, SELF_TEST) if args.self_test else CHECKS:
        if args.self_test and check is SELF_TEST:
            print("the self-test runs: a minute or two", file=sys.stderr, flush=True)
        results.append((check, findings_of(check, setting)))
        for line in lines_of(results[-1:]):
            said.append(line)
            if args.all or not line.startswith(Level.FINE.value + " "):
                print(line, flush=True)
    said.append(summary(results))
    print(said[-1])
    if args.bundle is not None:
        try:
            names = write_bundle(args.bundle, "\n".join(said), setting)
        except OSError as error:
            print(f"doctor.py: error: --bundle {args.bundle}: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"{args.bundle}: {', '.join(names)}")
        print("keys are struck out, and files of samples left out; look through the logs before you send it")
    return int(_count(results, Level.STOPS) > 0)


def summary(results: Sequence[tuple[Check, list[Finding]]]) -> str:
    """How many findings of each kind."""
    counts = {level: _count(results, level) for level in Level}
    stopping = counts[Level.STOPS]
    verdict = f"{stopping} would end a run" if stopping else "nothing here would end a run"
    return f"{len(results)} checks: {verdict}; {counts[Level.WARNING]} warnings, {counts[Level.FINE]} as they should be"


def _count(results: Sequence[tuple[Check, list[Finding]]], level: Level) -> int:
    return sum(finding.level is level for _, found in results for finding in found)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="of a run: its directories and ports")
    parser.add_argument("--directory", type=Path, action="append", default=[], help="measure this one; may be repeated")
    parser.add_argument("--port", type=_port, action="append", default=[], help="is it free? May be repeated")
    parser.add_argument("--self-test", action="store_true", help="make a tiny run: engine, rollout, step, two pushes")
    parser.add_argument("--self-test-timeout", type=float, default=300.0, metavar="SECONDS", help="default 300")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="write a .tar.gz for a bug report, without secrets")
    parser.add_argument("--all", action="store_true", help="show also what is as it should be")
    return parser.parse_args(words)


def _port(word: str) -> int:
    if not word.isdigit() or not 1 <= int(word) <= 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is no port: 1 to 65535")
    return int(word)


if __name__ == "__main__":
    sys.exit(main())
