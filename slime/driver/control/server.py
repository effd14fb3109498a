"""The run's own server, by which `tools/engines.py` asks for engines and `tools/pull_versions.py` for weights: HTTP
under a key, at an address that stands with it in ``engines.json`` of the run's directory, which its owner alone can
read."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from slime.driver.control.engine_requests import EngineRequests
from slime.driver.control.version_files import VersionFiles
from slime.files.control_file import control_file, write_control_file
from slime.observability import logs
from slime.utils.http_utils import ThreadedServer, http_url

_WEIGHTS = "/weights/"
_MOST_BYTES = 1 << 16
_PATIENCE_S = 30.0
"""With a client that does not say what it wants, or does not take the answer."""
logger = logging.getLogger(__name__)


class Control:
    """Answers in threads of its own; what changes engines is left to `EngineRequests`."""

    def __init__(
        self,
        run_dir: str,
        host: str,
        requests: EngineRequests,
        view: Callable[[], Mapping[str, Any]],
        versions: VersionFiles,
    ) -> None:
        """Listen at ``host``, and write the file. ``view`` gives the engines there are, and the weights' version."""
        self._path, self._requests, self._view = control_file(run_dir), requests, view
        self._versions = versions
        self._key = secrets.token_hex(24)
        logs.hide([self._key])
        control = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

            def do_GET(self) -> None:
                control._answer(self, control._get)

            def do_POST(self) -> None:
                control._answer(self, control._post)

            def do_DELETE(self) -> None:
                control._answer(self, control._delete)

            def log_message(self, *args: Any) -> None:
                logger.info("control: %s", self.requestline)

        self._server = ThreadedServer(host, 0, Handler, "the run's control server")
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()
        url = http_url(host, self._server.server_port)
        write_control_file(run_dir, url, self._key)

    def close(self) -> None:
        """Answer no more, and take the file away; may be called again."""
        self._requests.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._versions.close()

    def _answer(self, handler: BaseHTTPRequestHandler, answer: Callable[..., tuple[int, Any]]) -> None:
        given = (handler.headers["Authorization"] or "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self._key.encode()):
            answered: tuple[int, Any] | None = (HTTPStatus.UNAUTHORIZED, {"error": "the key is not that of this run"})
        elif handler.command == "GET" and handler.path.startswith(_WEIGHTS):
            answered = self._versions.answer(handler, handler.path.removeprefix(_WEIGHTS))
        else:
            try:
                answered = answer(handler.path, _body(handler))
            except ValueError as error:
                answered = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        if answered is None:  # it has been sent
            return
        status, reply = answered
        body = json.dumps(reply).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _get(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if path == "/engines":
            return HTTPStatus.OK, dict(self._view())
        number = path.removeprefix("/requests/")
        found = self._requests.get(int(number)) if number.isdecimal() else None
        return (HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}) if found is None else (HTTPStatus.OK, found)

    def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if path != "/engines":
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}
        addr = body.get("addr") or ""
        if not isinstance(addr, str):
            raise ValueError(f"addr must be text, not {addr!r:.60}")
        return HTTPStatus.ACCEPTED, {"request": self._requests.put("add", addr)}

    def _delete(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        name = unquote(path.removeprefix("/engines/"))
        if name == path or not name:
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}
        return HTTPStatus.ACCEPTED, {"request": self._requests.put("remove", name)}


def _body(handler: BaseHTTPRequestHandler) -> Mapping[str, Any]:
    length = handler.headers["Content-Length"] or "0"
    if not length.isdecimal() or int(length) > _MOST_BYTES:
        raise ValueError(f"Content-Length {length:.20}: must be at most {_MOST_BYTES}")
    body = json.loads(handler.rfile.read(int(length)) or b"{}")
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    return body
