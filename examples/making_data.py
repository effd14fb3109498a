"""The command line of examples' make_data.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from slime.files.storage import reported


def make_data(description: str | None, write: Callable[[Path, int], None]) -> None:
    """Have ``write(output, seed)`` make the files; one line and status 1 where they cannot be written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to write; files of the same names are replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with reported("make_data.py"):
        write(args.output, args.seed)
