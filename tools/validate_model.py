#!/usr/bin/env python3
"""Validate slime with a model: a ladder of real runs of train.py, and a summary that claims no more than ran.

    python3 tools/validate_model.py --hf-checkpoint MODEL --levels 0 1 2 5
    python3 tools/validate_model.py --config tests/data/configs/qwen3-30B-A3B --tiny --levels 0 1 2 4 5

A real checkpoint, or random weights of a config.json (--tiny: of small sizes and the same architecture), on this host's
GPUs in bfloat16, or on its CPU in float32. Exit status: 0 passed, 1 something failed, 3 something was blocked or left
out, 2 a wrong command line. docs/validate_model.md says what each level checks.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.entry.arguments import check_flags  # noqa: E402
from slime.processes.signals import signals_as_exceptions  # noqa: E402
from slime.utils.errors import BadInputError  # noqa: E402
from tools.validation.climb import climb  # noqa: E402
from tools.validation.levels import LEVELS  # noqa: E402
from tools.validation.report import EXIT  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    levels = "\n".join(f"  {number}  {level.title}: {level.proves}" for number, level in LEVELS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nlevels:\n{levels}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--hf-checkpoint", type=Path, help="a model with its weights: a Hugging Face directory")
    model.add_argument(
        "--config", type=Path, help="random weights of this config.json, or of the one in this directory"
    )
    parser.add_argument("--tiny", action="store_true", help="with --config: small sizes, a vocabulary of bytes")
    parser.add_argument("--levels", type=int, nargs="+", choices=LEVELS, default=[0], help="default: 0")
    parser.add_argument(
        "--output-dir", type=Path, help="everything that runs write; default: outputs/validate_model/..."
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, float32 without")
    parser.add_argument("--slots", type=int, help="GPUs to use, or processes that train at once; default: by the host")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, data and runs; default: %(default)s")
    parser.add_argument("--launch-timeout", type=float, default=900.0, help="seconds for one run; default: %(default)g")
    parser.add_argument("--focused-tests", action="store_true", help="first run the unit tests of model tables")
    parser.add_argument(
        "--flags", default="", help="more flags of train.py for every run, in one word: --flags='--x 1'"
    )
    options = parser.parse_args(argv)
    options.levels = sorted(set(options.levels))
    try:
        options.flags = shlex.split(options.flags)
    except ValueError as error:
        parser.error(f"--flags={options.flags}: {error}")
    if {"-h", "--help"} & set(options.flags):
        parser.error("--flags are for runs: for help on them, python3 train.py --help")
    if options.tiny and options.config is None:
        parser.error("--tiny is for random weights: it needs --config")
    if options.slots is not None and options.slots < 1:
        parser.error(f"--slots {options.slots} is not above 0")
    return options


@signals_as_exceptions()
def main(argv: list[str] | None = None) -> int:
    """Exit status by the overall result."""
    options = parse(argv)
    if options.flags:
        with contextlib.chdir(ROOT):  # where runs look for the files that flags name
            check_flags(options.flags)
    options.command = shlex.join(["python3", "tools/validate_model.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        report = climb(options)
    except (BadInputError, ValueError, OSError) as error:
        print(f"validate_model.py: error: {error}", file=sys.stderr)
        return 2
    print(report.text(), end="")
    return EXIT[report.result]


if __name__ == "__main__":
    sys.exit(main())
