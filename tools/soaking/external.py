"""The external engine of a soak: a server of its own, whose address the run is given, and which joins it again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import requests

from slime.processes import kernel
from slime.processes.kernel import Process
from slime.processes.server_process import ServerProcess
from slime.utils.http_utils import ask_directly
from tools.quickstart import ROOT
from tools.soaking.processes import OverError, command_line, strike
from tools.soaking.watching import wait_for

_SUPERVISOR = "slime.processes.supervisor"
_START_S, _JOIN_S, _ANSWER_S = 300.0, 300.0, 5.0
_FLAGS = (
    *("--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--max-total-tokens", "8192", "--max-running-requests", "64", "--sleep-on-idle"),
    "--enable-deterministic-inference",
)
_ENVIRONMENT = {
    **{"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}


class External:
    """One SGLang server without keys, on loopback; as a context manager it ends with the block."""

    def __init__(self, model: Path, log: Path, run_dir: Path, port: int) -> None:
        self.address, self._run_dir, self._log = f"127.0.0.1:{port}", run_dir, log
        flags = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *_FLAGS]
        self._command = [sys.executable, "-m", "slime.backends.sglang.launch", *flags]
        self._server: ServerProcess | None = None

    def __enter__(self) -> External:
        self.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._server is not None:
            self._server.stop()

    def start(self) -> None:
        """Start it; it answers later (`wait_until_it_answers`)."""
        self._server = ServerProcess(self._command, os.environ | _ENVIRONMENT, self._log)
        self._server.start()

    def wait_until_it_answers(self) -> None:
        """OverError where it does not."""
        if not wait_for(self._answers, _START_S, 0.5):
            raise OverError(
                f"the external engine at {self.address} has not answered within {_START_S:g} s: {self._log}"
            )

    def _answers(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return ask_directly("GET", f"http://{self.address}/health", timeout=_ANSWER_S).ok
        return False

    def name(self) -> str | None:
        """As the run calls it now; None where the run does not have it."""
        table = [line.split("  ") for line in self._engines(["list"]).splitlines()]
        return next((row[0] for row in table if f"http://{self.address}" in map(str.strip, row)), None)

    def kill(self) -> bool:
        """SIGKILL to the server; whether it was there."""
        own = [each for each in self.processes() if _SUPERVISOR not in command_line(each.pid)]
        return bool(own) and strike(own[0], signal.SIGKILL)  # parents are before children

    def processes(self) -> list[Process]:
        """Its own: its supervisor, and what is below."""
        pid = None if self._server is None else self._server.pid
        supervisor = None if pid is None else kernel.with_id(pid)
        return [] if supervisor is None else [supervisor, *kernel.below([supervisor.pid], kernel.running().values())]

    def join_again(self) -> None:
        """Start another at the address, and have the run take it in; returns when it serves. OverError where not."""
        assert self._server is not None
        self._server.stop()
        self.start()
        self.wait_until_it_answers()
        self._engines(["add", self.address, "--timeout", str(_JOIN_S)])

    def _engines(self, words: Sequence[str]) -> str:
        command = [sys.executable, str(ROOT / "tools" / "engines.py"), str(self._run_dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _JOIN_S)
        if done.returncode:
            raise OverError(f"tools/engines.py {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


def free_port() -> int:
    """One of loopback that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
