"""``/metrics`` and ``/healthz`` of a run.

The driver serves them: it has the step, the phase, the engines and all figures, also while a rollout manager is made
anew."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.files.storage import writing
from slime.observability import logs
from slime.observability.progress import warn
from slime.observability.prometheus.exposition import CONTENT_TYPE, State, exposition
from slime.observability.prometheus.files import DIRECTORY, KEY_FILE, write_configuration, write_targets
from slime.utils.errors import BadInputError
from slime.utils.http_utils import LOOPBACK, ThreadedServer, http_url

_PATIENCE_S = 30.0
_SILENT_S = 300.0
"""Without a look at its actors, a driver hangs."""
logger = logging.getLogger(__name__)


class Prometheus:
    """Serves the newest figures, which it gets as a sink of `slime.observability.metrics`, and keeps the files by which
    a Prometheus finds it and the engines."""

    def __init__(self, args: argparse.Namespace, state: Callable[[], State]) -> None:
        """Listen at ``--prometheus-host`` and ``--prometheus-port``, and write the files; BadInputError where a port
        that was asked for is taken. ``state`` is asked in other threads too."""
        self._run_dir, self._state = Path(args.run_dir), state
        self._engines_tell = bool(getattr(args, "sglang_enable_metrics", False))
        self._newest: dict[str, float] = {}
        self._key = secrets.token_hex(24)
        logs.hide([self._key])
        self._server: ThreadedServer | None = None
        self.place = "--run-dir", str(self._run_dir / DIRECTORY)
        self._listen(args.prometheus_host, args.prometheus_port)

    def _listen(self, host: str, port: int) -> None:
        try:
            self._server = ThreadedServer(host, port, _handler(self), "the run's metrics server")
        except (OSError, OverflowError) as error:
            if port or host != LOOPBACK:
                raise BadInputError(f"--prometheus-host {host} --prometheus-port {port}: {error}") from error
            warn(f"no /metrics of this run: {error}")
            return
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        self.url = http_url(host, self._server.server_port)
        directory = self._run_dir / DIRECTORY
        with writing(*self.place):
            directory.mkdir(parents=True, exist_ok=True)
            _write_secret(directory / KEY_FILE, self._key)
            write_configuration(self._run_dir)
        write_targets(self._run_dir, "driver", [self.url])
        logger.info("metrics of this run: %s/metrics", self.url)

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Take a line of metrics; at the end of a step see which engines there are."""
        self._newest |= {**metrics, step_key: float(step)}
        if "perf/step_time" in metrics or "perf/update_weights_time" in metrics:
            engines = self._state().engines if self._engines_tell else ()
            write_targets(self._run_dir, "engines", [engine["url"] for engine in engines if engine["url"]])

    def close(self) -> None:
        """Answer no more."""
        server, self._server = self._server, None
        if server is not None:
            write_targets(self._run_dir, "driver", [])
            write_targets(self._run_dir, "engines", [])
            server.shutdown()
            server.server_close()

    def answer(self, path: str, authorization: str) -> tuple[int, str, str]:
        """Status, type and body of a GET."""
        path = urlsplit(path).path
        if path == "/healthz":
            state = self._state()
            good = state.silent < _SILENT_S
            told = {"status": "ok" if good else "stuck", "phase": state.phase, "seconds": round(state.seconds, 1)}
            status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", json.dumps(told) + "\n"
        if path != "/metrics":
            return HTTPStatus.NOT_FOUND, "text/plain", f"there is no {path}: /metrics and /healthz\n"
        given = authorization.removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self._key.encode()):
            return (
                HTTPStatus.UNAUTHORIZED,
                "text/plain",
                f"the key is in {DIRECTORY}/{KEY_FILE} of the run's directory\n",
            )
        return HTTPStatus.OK, CONTENT_TYPE, exposition(self._state(), dict(self._newest))


def _handler(owner: Prometheus) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            status, kind, text = owner.answer(self.path, self.headers["Authorization"] or "")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """A line a scrape would fill the log."""

    return Handler


def _write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)  # another's mode would stay
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
