"""HTTP servers of a thread, which answer as they are told to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Servers:
    """A router and engines at one address: what was posted, and what is answered by path; to what was posted otherwise
    202."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.posted_with: list[str | None] = []
        """What each came with to open it."""
        self.asked: list[tuple[str, str | None]] = []
        self.key: str | None = None
        """What GET requests need."""
        self.answers: dict[str, tuple[int, Any]] = {"/workers": (200, {"workers": []})}
        servers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.headers["Authorization"]
                servers.asked.append((self.path, key))
                refused = servers.key is not None and key != f"Bearer {servers.key}"
                self._answer(*((401, {}) if refused else servers.answers.get(self.path, (404, {}))))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                servers.posted.append((self.path, body))
                servers.posted_with.append(self.headers["Authorization"])
                self._answer(*servers.answers.get(self.path, (202, {})))

            def do_DELETE(self) -> None:
                servers.posted.append((f"DELETE {self.path}", None))
                self._answer(202, {})

            def _answer(self, status: int, reply: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = "127.0.0.1", self._server.server_port
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
