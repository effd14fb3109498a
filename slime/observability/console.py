"""What a driver says to whoever started it, and has in its log."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, on standard output unless told, and have it in the driver's log."""
    print(line, file=stream, flush=True)
    logger.info(line)


def warn(line: str) -> None:
    """Say it as a warning, on standard error."""
    say(f"{program()}: warning: {line}", sys.stderr)


def program() -> str:
    """What messages call the driver."""
    return Path(sys.argv[0]).name
