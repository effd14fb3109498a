"""Whether the packages that slime needs are there: asked by programs before they import anything else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NEEDED = ("numpy", "torch", "transformers", "ray", "yaml")
"""Packages of every installation; a python without one of them is not that of an installation."""


def check_installation(program: str | None = None) -> None:
    """End the program, with one line, where it runs in a python that slime is not installed for.

    Args:
        program: what the line begins with; by default the running program.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        name = program or Path(sys.argv[0]).name
        print(
            f"{name}: error: slime is not installed for {sys.executable} (no {', '.join(missing)}): "
            "activate its environment (source .venv/bin/activate), or make it (bash scripts/install.sh)",
            file=sys.stderr,
        )
        sys.exit(2)
