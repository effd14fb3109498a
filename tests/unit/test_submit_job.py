"""tools/submit_job.py: what a job server answers that does not take a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import ray

from tests import shipped

NUM_GPUS = 0


class _JobServer(BaseHTTPRequestHandler):
    """Has the version of a Ray, and answers a job with the server's ``refusal``."""

    server: _Server

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"version": "4", "ray_version": ray.__version__, "ray_commit": ""}))

    def do_POST(self) -> None:
        self._answer(500, self.server.refusal)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


class _Server(HTTPServer):
    refusal = ""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _JobServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (
            "No available agent to submit job, please try again later.",
            "Request failed with status code 500: No available agent to submit job, please try again later: its "
            "dashboard agent, the last part",
        ),
        ("Traceback (most recent call last):\n  File ...\nOSError: no route to host", "OSError: no route to host\n"),
    ],
)
def test_a_job_that_is_not_taken_is_one_line(server: _Server, refusal: str, expected: str) -> None:
    server.refusal = refusal
    address = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, str(shipped.ROOT / "tools/submit_job.py"), "--", "true"]
    environment = os.environ | {"RAY_ADDRESS": address}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines(keepends=True) if " INFO " not in line]
    assert line.startswith(f"launch: error: RAY_ADDRESS={address}: the job server answered: {expected}")
    assert "\x1b" not in ran.stdout + ran.stderr
