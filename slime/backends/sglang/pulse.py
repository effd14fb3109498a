"""Whether a server that runs also answers: asked again and again, under a deadline, from a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from slime.backends.sglang.client import EngineError, NoAnswerError

_TIME = "%Y-%m-%d %H:%M:%S"
_TRIES = 2
"""In a row without an answer: one alone may have met a host that was held up as a whole."""

Ask = Callable[[float], None]
"""Waits for an answer so many seconds, and raises EngineError, which says what was asked, where none came; it is a
NoAnswerError where somebody listens."""


class Pulse:
    """The answers of one server, from `begin` until `end`."""

    def __init__(self, ask: Ask, interval: float, timeout: float) -> None:
        """
        Args:
            ask: a question that the server answers at once whatever else it does.
            interval: seconds between two questions.
            timeout: seconds that an answer may take.
        """
        self._ask, self._interval, self._timeout = ask, interval, timeout
        self._answered = time.time()
        self._ended = threading.Event()
        self.silence: str | None = None
        """What was asked in vain, and since when nothing was answered; None while it answers."""

    def begin(self) -> None:
        """Ask from now on."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def end(self) -> None:
        """Ask no more; may be called again."""
        self._ended.set()

    def examine(self, ask: Ask | None = None, because: str = "") -> str | None:
        """Ask now, and note where nothing is answered.

        Args:
            ask: another question, which more of the server's processes take part in.
            because: why it is examined.

        Returns:
            ``silence``.
        """
        unanswered: list[EngineError] = []
        while len(unanswered) < _TRIES and not self._ended.is_set():
            try:
                (ask or self._ask)(self._timeout)
            except EngineError as error:
                if ask is None and not isinstance(error, NoAnswerError):
                    return self.silence  # nobody listens any more: its exit status, which may take a while, says more
                unanswered.append(error)
                continue
            self._answered = time.time()
            return self.silence
        if unanswered and not self._ended.is_set():
            since = time.strftime(_TIME, time.localtime(self._answered))
            reason = f" (asked because of {because})" if because else ""
            self.silence = f"{unanswered[-1]}, {_TRIES} times in a row; it last answered at {since}{reason}"
        return self.silence

    def _run(self) -> None:
        while self.silence is None and not self._ended.wait(self._interval):
            with contextlib.suppress(Exception):  # trouble of this process says nothing of the server
                self.examine()
