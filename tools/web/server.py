"""A server of pages and JSON for one user: to this machine unless told, with a token, and a page runs only its own."""

from __future__ import annotations

import contextlib
import gzip
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from slime.utils.errors import BadInputError

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_KINDS = {".html": "text/html", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'"
)
_COMPRESSED = 20_000
"""Bytes of an answer from which on it is compressed, as on its way through ssh."""


class Site(Protocol):
    """What a `Server` serves.

    Attributes:
        pages: files by their address; ``{{nonce}}`` in one becomes what lets its scripts and styles run.
        routes: the addresses that `answer` knows.
    """

    pages: Mapping[str, Path]
    routes: frozenset[str]

    def answer(self, route: str, values: dict[str, str]) -> Any:
        """JSON to a request, ``values`` its query; BadInputError and OSError are the asker's fault."""
        ...


class Handler(BaseHTTPRequestHandler):
    """Answers one request; ``server`` is a `Server`."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # of a connection that asks nothing more
    server: Server

    def handle(self) -> None:
        """Every request of one connection; a reader may leave before an answer is complete."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        values = dict(parse_qsl(url.query))
        if not self.server.is_ours(self.headers.get("Host", "")):
            return self._refuse(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        if url.path in self.server.site.pages and self.server.is_token(values.get("token")):
            return self._enter(url.path, {name: value for name, value in values.items() if name != "token"})
        if not self.server.is_token(self._cookie()):
            return self._refuse(HTTPStatus.FORBIDDEN, "open the whole address that the tool printed: it has a token")
        if file := self.server.site.pages.get(url.path):
            nonce = secrets.token_urlsafe(16)
            page = file.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
            return self._send(HTTPStatus.OK, _KINDS[file.suffix], page, _POLICY.format(nonce))
        if url.path not in self.server.site.routes:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        return self._send(*self._answer(url.path, values))

    def _answer(self, route: str, values: dict[str, str]) -> tuple[HTTPStatus, str, str]:
        try:
            status, answer = HTTPStatus.OK, json.dumps(self.server.site.answer(route, values), allow_nan=False)
        except (BadInputError, OSError) as error:
            status, answer = HTTPStatus.BAD_REQUEST, json.dumps({"error": str(error)})
        except Exception as error:  # a sample's values may be of any kind; the page says what it stumbled over
            reason = f"{type(error).__name__}: {error}"
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, json.dumps({"error": reason})
        return status, "application/json", answer

    def _cookie(self) -> str | None:
        with contextlib.suppress(CookieError):
            if morsel := SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie):
                return morsel.value
        return None

    def _enter(self, path: str, values: dict[str, str]) -> None:
        """From now on the browser has the token, and the address, which may be shown and copied, has it no more."""
        where = f"{path}?{urlencode(values)}" if values else path
        cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
        self._send(HTTPStatus.SEE_OTHER, "text/plain", "", more={"Location": where, "Set-Cookie": cookie})

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain", why)

    def _send(
        self,
        status: HTTPStatus,
        kind: str,
        text: str,
        policy: str = "default-src 'none'",
        more: Mapping[str, str] | None = None,
    ) -> None:
        body, headers = text.encode(), dict(more or {})
        if len(body) >= _COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        headers |= {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


class Server(ThreadingHTTPServer):
    """Serves a site, to whom has its token."""

    daemon_threads = True

    def __init__(self, host: str, port: int, site: Site) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(16)
        super().__init__((host, port), Handler)
        # Cookies know no ports: that of another server on this host must stay what it is.
        self.cookie = f"slime_{self.server_port}"

    @property
    def url(self) -> str:
        """With the token."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/?token={self.token}"

    def is_token(self, word: str | None) -> bool:
        """Whether it is the server's, in the time that any other takes."""
        return word is not None and secrets.compare_digest(word.encode(), self.token.encode())

    def is_ours(self, host: str) -> bool:
        """Whether a request means this server: another site's name that resolves to loopback must not read samples."""
        own = str(self.server_address[0])
        return own not in LOOPBACK or urlsplit(f"//{host}").hostname in LOOPBACK


def serve(host: str, port: int, site: Site, what: str) -> None:
    """Say where ``what`` is, and serve it until Ctrl-C.

    Raises:
        BadInputError: there is no such address, or it is taken.
    """
    try:
        server = Server(host, port, site)
    except (OSError, OverflowError) as error:
        raise BadInputError(f"--host {host} --port {port}: {error}") from error
    print(f"{what} at {server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def run_tool(name: str, do: Callable[[], None]) -> int:
    """The exit status of a tool: 2, with one line, where something that was given cannot be used."""
    try:
        do()
    except (BadInputError, OSError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
