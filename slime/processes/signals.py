"""What ends a program, as something that it can clean up after."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within the block, or the function that this decorates, the first SIGTERM or SIGHUP raises SystemExit with 128 and
    its number, where it would just end us. Later ones do nothing: they would end the cleaning up, as Ctrl-C does."""
    leaves = False

    def leave(number: int, frame: FrameType | None) -> None:  # and not SIG_IGN, which programs that we start inherit
        nonlocal leaves
        if not leaves:
            leaves = True
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
