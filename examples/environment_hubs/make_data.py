"""Ask a hub's Python for tasks and demonstrations: what examples/tiny_model.sh warms up on and train.py reads.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no task of train.jsonl is in eval.jsonl. HUB names the
hub, HUB_PYTHON the Python in which it is installed.

    HUB=openenv HUB_PYTHON=outputs/hubs/openenv/bin/python \\
        python3 -m examples.environment_hubs.make_data outputs/openenv/data
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from slime.files.storage import reported, write_text

_NUM_EVAL = 64
_SERVER = Path(__file__).with_name("server.py")


def write(output: Path, hub: str, python: str, seed: int) -> None:
    """Write the three files. What the hub's side had to say goes to standard error.

    Raises:
        SystemExit: it failed; it has said why.
    """
    try:
        asked = subprocess.run([python, str(_SERVER), hub, "--tasks", str(output), "--seed", str(seed)])
    except OSError as error:
        sys.exit(f"make_data.py: error: HUB_PYTHON={python} cannot be run: {error.strerror}")
    if asked.returncode:
        sys.exit(asked.returncode)
    lines = (output / "tasks.jsonl").read_text().splitlines(keepends=True)
    held_out = min(_NUM_EVAL, len(lines) // 4)
    parts = {"eval": lines[:held_out], "train": lines[held_out:]}
    for name, rows in parts.items():
        write_text("output", output / f"{name}.jsonl", "".join(rows))
    (output / "demonstrations.jsonl").replace(output / "sft.jsonl")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to write; files of the same names are replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "HUB" not in os.environ:
        parser.error("HUB is not set: verifiers, openenv, nemo_gym or harbor")
    with reported("make_data.py"):
        write(args.output, os.environ["HUB"], os.environ.get("HUB_PYTHON", sys.executable), args.seed)


if __name__ == "__main__":
    main()
