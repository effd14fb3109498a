"""A server process under its supervisor: start, poll, stop, and the last lines of its log."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import slime
from slime.files.storage import writing
from slime.processes import heartbeat, kernel
from slime.utils.command_line import apart, secrets_of
from slime.utils.http_utils import redact

GENERATE_KEY_VARIABLE = "SLIME_ENGINE_API_KEY"
ADMIN_KEY_VARIABLE = "SLIME_ENGINE_ADMIN_API_KEY"
FLOAT8_VARIABLE = "SLIME_ENGINE_TAKES_FLOAT8"
SAME_KERNELS_VARIABLE = "SLIME_ENGINE_COMPUTES_AS_TRAINERS"
EQUAL_BITS_VARIABLE = "SLIME_ENGINE_COMPUTES_EQUAL_BITS"
SECRET_FLAGS_VARIABLE = "SLIME_SERVER_SECRET_FLAGS"
"""Words of the command line that are left out of it, as a JSON array: every user of the host can read it."""
HELD_VARIABLE = "SLIME_ENGINE_WAITS_FOR_A_LINE"
"""The server imports, and goes on after a line of its standard input."""
_AFTER_KILL_S = 15.0


class ServerProcess:
    """One server that ends with its owner (this process), whatever ends the owner.

    The command runs under `slime.processes.supervisor`, in a session of its own, so that Ctrl-C in the terminal
    reaches the driver only and the server is stopped in order.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        log_path: str | Path,
        secrets: tuple[str, ...] = (),
        grace: float = 10.0,
        scratch: str | None = None,
        held: bool = False,
        beats: bool = False,
    ) -> None:
        """``command``, whose flags that are named for secrets come to it by environment, runs with ``env`` as its whole
        environment, its output appended to ``log_path``; `tail` replaces ``secrets`` by ``***``.

        It has ``grace`` seconds to end in order before it is killed. Files that it maps into memory whose paths begin
        with ``scratch`` are removed when it has ended, nobody else's. If it is ``held``, it only imports until
        `let_go`. One that ``beats`` has a directory for that, `heartbeats`, which goes when it has ended.
        """
        self._command, hidden = apart(command)
        self._env = {**env, "PYTHONPATH": _with_our_package(env.get("PYTHONPATH", ""))}
        if hidden:
            self._env[SECRET_FLAGS_VARIABLE] = json.dumps(hidden)
        self._log_path = Path(log_path)
        self._secrets = (*secrets, *secrets_of(hidden))
        self._grace = grace
        self._scratch = scratch
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.held = held
        if held:
            self._env[HELD_VARIABLE] = "1"
        self._owner_end: int | None = None
        self._beats = beats
        self.heartbeats: str | None = None
        """As of `heartbeat`, from `start` on."""

    def start(self) -> None:
        """Start the supervisor, which starts the command; returns at once."""
        supervisor_end, self._owner_end = os.pipe()
        supervisor = [sys.executable, "-m", "slime.processes.supervisor"]
        options = ["--owner-fd", str(supervisor_end), "--grace", str(self._grace)]
        if self._scratch is not None:
            options += ["--scratch", self._scratch]
        if self._beats:
            self.heartbeats = self._env[heartbeat.DIRECTORY_VARIABLE] = heartbeat.make_directory()
            options += ["--heartbeats", self.heartbeats]
        try:
            with writing("--run-dir, log", self._log_path):
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                log = self._log_path.open("ab")
            with log:
                self._supervisor = subprocess.Popen(
                    [*supervisor, *options, "--", *self._command],
                    env=self._env,
                    stdin=subprocess.PIPE if self.held else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(supervisor_end,),
                    start_new_session=True,
                )
        except BaseException:
            heartbeat.remove_directory(self.heartbeats)
            raise
        finally:
            os.close(supervisor_end)

    def let_go(self) -> None:
        """Have a server that is held go on; one that has ended is left to `poll`."""
        self.held = False
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.write(b"\n")
            self._supervisor.stdin.close()

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; every process of the server is below it."""
        return self._supervisor.pid if self._supervisor else None

    def poll(self) -> int | None:
        """The server's exit status, 128 + n if signal n ended it; None while it runs or before `start`."""
        return self._supervisor.poll() if self._supervisor else None

    def stop(self) -> None:
        """End the whole tree: TERM, a grace period, KILL. Returns when it is gone; may be called again. RuntimeError
        where the supervisor did not end within its own deadlines (it is then killed, and the server dies with it)."""
        if self._owner_end is not None:
            os.close(self._owner_end)
            self._owner_end = None
        if self._supervisor is None:
            return
        try:
            self._supervisor.wait(self._grace + _AFTER_KILL_S)
        except subprocess.TimeoutExpired as error:
            kernel.end_child(self._supervisor, _AFTER_KILL_S)
            raise RuntimeError(
                f"supervisor {self._supervisor.pid} did not end its server within {self._grace + _AFTER_KILL_S:.0f} s; "
                f"see {self._log_path}"
            ) from error

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log, secrets struck out."""
        if not self._log_path.exists():
            return ""
        with self._log_path.open(errors="replace") as log:
            return redact("".join(deque(log, maxlen=lines)), self._secrets)


def last_value(flags: Sequence[str], name: str) -> str | None:
    """What follows the last flag of this name, None where there is none."""
    return dict(pairwise(flags)).get(name)


def secret_flags() -> list[str]:
    """In the server: what its command line leaves out."""
    words: list[str] = json.loads(os.environ.get(SECRET_FLAGS_VARIABLE, "[]"))
    return words


def server_secrets() -> tuple[str, ...]:
    """In the server: its keys, and other secrets of its command line."""
    keys = (os.environ.get(GENERATE_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))
    return (*filter(None, keys), *secrets_of(secret_flags()))


def _with_our_package(python_path: str) -> str:
    # The owner may have found `slime` through its working directory or sys.path, which a new process does not inherit.
    root = str(Path(slime.__file__).parents[1])
    return os.pathsep.join([root, *(part for part in python_path.split(os.pathsep) if part and part != root)])
