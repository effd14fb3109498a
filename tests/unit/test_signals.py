"""What ends a program lets it clean up, once."""

from __future__ import annotations

import os
import signal

import pytest

from slime.processes.signals import signals_as_exceptions

NUM_GPUS = 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_end_the_cleaning_up(number: int, second: int) -> None:
    cleaned = []

    @signals_as_exceptions()
    def program() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), second)
            cleaned.append(number)

    with pytest.raises(SystemExit) as left:
        program()
    assert left.value.code == 128 + number
    assert cleaned == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_handlers_of_the_caller_stay() -> None:
    """Ray's or a user's own."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with signals_as_exceptions():
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
