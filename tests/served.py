"""A site of tools/web, served to a test."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from tools.web.server import Server, Site


@contextlib.contextmanager
def served(site: Site) -> Iterator[Server]:
    """Its server, until the block ends."""
    server = Server("127.0.0.1", 0, site)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(20)
        assert not thread.is_alive(), "the server has not ended within 20 s"
        server.server_close()


def get(
    server: Server, path: str, host: str = "localhost:1", headers: dict[str, str] | None = None, **values: Any
) -> tuple[int, Any, Any]:
    """Status, headers and content of an answer, of JSON what it says; asked with the token's cookie unless told."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    asked = {"Cookie": f"{server.cookie}={server.token}"} if headers is None else headers
    connection.request("GET", f"{path}?{urlencode(values)}" if values else path, headers={"Host": host} | asked)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.headers.get("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    is_json = response.headers["Content-Type"].startswith("application/json")
    return response.status, response.headers, json.loads(body) if is_json else body.decode()
