"""What ends a program, as something that it can clean up after."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within the block, or the function that this decorates, SIGTERM and SIGHUP raise SystemExit with 128 and their
    number, where they would just end us."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one would end the cleaning up
        sys.exit(128 + number)

    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
