"""What programs do before they import anything else: ask whether the packages that slime needs are there."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

_NEEDED = ("numpy", "torch", "transformers", "ray", "yaml")
"""Packages of every installation; a python without one of them is not that of an installation."""


def check_installation(program: str | None = None) -> None:
    """End ``program``, the running one, with one line, where it runs in a python that slime is not installed for.

    From then on Ctrl-C that nobody handles, such as one while the program imports, is one line and status 130; of
    several ranks, the first says it.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _one_line_if_interrupted
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        name = program or Path(sys.argv[0]).name
        print(
            f"{name}: error: slime is not installed for {sys.executable} (no {', '.join(missing)}): "
            "activate its environment (source .venv/bin/activate), or make it (bash scripts/install.sh); "
            "python3 tools/doctor.py says what else is missing",
            file=sys.stderr,
        )
        sys.exit(2)


def _one_line_if_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes on what its ranks have had from the terminal
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
    sys.exit(130)
