"""What an engine and the router share: ports, a process under its supervisor, waiting for it, and its end."""

from __future__ import annotations

import contextlib
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slime.backends.sglang.client import EngineError, HangError, NoAnswerError
from slime.processes.heartbeat import Watcher
from slime.processes.server_process import ServerProcess
from slime.utils.http_utils import PortReservation

_TIME = "%Y-%m-%d %H:%M:%S"
_TRIES = 2
"""In a row without an answer: one alone may have met a host that was held up as a whole."""

Ask = Callable[[float], None]
"""Waits for an answer so many seconds, and raises EngineError, which says what was asked, where none came; it is a
NoAnswerError where somebody listens."""


class Pulse:
    """The answers of one server, from `begin` until `end`."""

    def __init__(self, ask: Ask, interval: float, timeout: float) -> None:
        """Every ``interval`` seconds ``ask`` what the server answers at once, within ``timeout``, whatever it does."""
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
        """Ask now, because of ``because``, and note where nothing is answered; ``silence``. ``ask`` may be another
        question, which more of the server's processes take part in."""
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


class Lookout:
    """Looks at the heartbeats of a server's processes, from `begin` until `end`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._ended = threading.Event()
        self.stands_still: str | None = None
        """Which process does, and since when; None while all go on."""

    def begin(self) -> None:
        """Look from now on."""
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def end(self) -> None:
        """Look no more; may be called again."""
        self._ended.set()

    def _run(self) -> None:
        while self.stands_still is None and not self._ended.wait(self._watcher.pause):
            self.stands_still = self._watcher.look()


_POLL_S = 0.1
_END_S = 2.0
"""In which the supervisor of a server that has died usually tells of it."""
_TAIL_LINES = 40


class ExitInfo(NamedTuple):
    """How a server ended."""

    seen: float
    """When it was noticed, as `time.time`."""
    message: str
    """Which server, its status, and the last lines of its log."""
    hangs: bool = False
    """Whether it was found to hang, and has not ended."""


class Server:
    """One server on this host; its ports stay reserved, and its process is watched, until `stop`."""

    def __init__(self, name: str, args: Namespace, host: str, log_path: str | Path) -> None:
        self._name = name
        self._args = args
        self._host = host
        self._log_path = log_path
        self._ports: list[PortReservation] = []
        self._process: ServerProcess | None = None
        self._ended: float | None = None
        self._pulse: Pulse | None = None
        self._lookout: Lookout | None = None
        self.url = ""

    def start(self) -> None:
        """Start the server, an engine from its first node; returns when it answers, an engine's on all nodes.
        EngineError, with the last lines of its log, where it died or did not answer within
        ``--engine-start-timeout``."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        raise NotImplementedError

    def poll(self) -> int | None:
        """The server's exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def end(self) -> ExitInfo | None:
        """The server's end; None while it runs."""
        status = self.poll()
        if status is None:
            return None
        self._ended = self._ended or time.time()
        return ExitInfo(self._ended, f"{self._name} at {self.url} {_told(status)}{self._log_tail()}")

    def hang(self) -> ExitInfo | None:
        """That it hangs, by the heartbeats of its processes or as it answered nothing; None while it does not."""
        told = self._silence()
        if not told:
            return None
        return ExitInfo(time.time(), f"{self._name} at {self.url} hangs: {told}{self._log_tail()}", hangs=True)

    def _silence(self) -> str | None:
        still = self._lookout.stands_still if self._lookout is not None else None
        return still or (self._pulse.silence if self._pulse is not None else None)

    def check(self) -> None:
        """Raise EngineError, with the last lines of its log, if the server has ended, a HangError if it hangs.

        Whether it lives is decided here alone: by its exit status, by its answers to the questions of `listen`, and by
        the heartbeats of its processes.
        """
        if (end := self.end() or self.hang()) is not None:
            raise HangError(end.message) if end.hangs else EngineError(end.message)

    def listen(self) -> None:
        """Ask the server, which has started, from now on whether it answers."""
        args = self._args
        self._pulse = Pulse(self._ask, args.rollout_health_check_interval, args.rollout_health_check_timeout)
        self._pulse.begin()

    def look(self) -> None:
        """Look from now on at the heartbeats of its processes on this host, if it has any."""
        if self._process is not None and self._process.heartbeats is not None:
            watcher = Watcher(self._process.heartbeats, self._args.rollout_health_check_timeout)
            self._lookout = Lookout(watcher)
            self._lookout.begin()

    def examine(self, because: str, ask: Ask | None = None) -> None:
        """`check`, after asking it at once; with ``ask`` another question than that of `listen`."""
        if self._pulse is not None and self.end() is None and self._pulse.examine(ask, because):
            # One that has just died refuses connections before its supervisor has ended its tree, and told its status.
            deadline = time.monotonic() + _END_S
            while self._process is not None and self.end() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self.check()

    def _ask(self, timeout: float) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End every process of the server; may be called again."""
        for each in (self._pulse, self._lookout):
            if each is not None:
                each.end()
        self._halt()
        for reservation in self._ports:
            reservation.close()

    def _halt(self) -> None:
        if self._process is not None:
            self._process.stop()

    def _reserve(self, count: int = 1) -> int:
        reservation = PortReservation(self._host, count)
        self._ports.append(reservation)
        return reservation.port

    def _launch(self, process: ServerProcess) -> None:
        """Start a process; one that is held listens after `_let_go` only."""
        self._process, self._ended = process, None
        if not process.held:
            self._release_ports()
        process.start()

    def _let_go(self) -> None:
        assert self._process is not None
        self._release_ports()
        self._process.let_go()

    def _release_ports(self) -> None:
        for reservation in self._ports:
            reservation.release()

    def _wait_until(self, done: Callable[[], bool], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            self.check()
            if time.monotonic() > deadline:
                limit = f"{timeout:.0f} s (--engine-start-timeout)"
                raise EngineError(f"{self._name} at {self.url} had not {what} after {limit}{self._log_tail()}")
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        tail = self._process.tail(_TAIL_LINES) if self._process else ""
        return f"\nlast lines of {self._log_path}:\n{tail}"


def _told(status: int) -> str:
    if status < 0:
        return f"is gone: the process that supervises it was ended by signal {-status}"
    by = f" (signal {status - 128})" if status > 128 else ""
    return f"ended with status {status}{by}"
