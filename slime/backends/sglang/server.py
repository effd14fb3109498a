"""What an engine and the router share: ports, a process under its supervisor, waiting for it, and its end."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.process import ServerProcess
from slime.utils.http_utils import PortReservation

_POLL_S = 0.1
_TAIL_LINES = 40


class End(NamedTuple):
    """How a server ended."""

    seen: float
    """When it was noticed, as `time.time`."""
    message: str
    """Which server, its status, and the last lines of its log."""


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
        self.url = ""

    def poll(self) -> int | None:
        """The server's exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def end(self) -> End | None:
        """The server's end; None while it runs."""
        status = self.poll()
        if status is None:
            return None
        self._ended = self._ended or time.time()
        by = f" (signal {status - 128})" if status > 128 else ""
        return End(self._ended, f"{self._name} at {self.url} ended with status {status}{by}{self._log_end()}")

    def check(self) -> None:
        """Raise EngineError, with the last lines of its log, if the server has ended."""
        if (end := self.end()) is not None:
            raise EngineError(end.message)

    def stop(self) -> None:
        """End every process of the server; may be called again."""
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
                raise EngineError(f"{self._name} at {self.url} had not {what} after {limit}{self._log_end()}")
            time.sleep(_POLL_S)

    def _log_end(self) -> str:
        tail = self._process.tail(_TAIL_LINES) if self._process else ""
        return f"\nlast lines of {self._log_path}:\n{tail}"
