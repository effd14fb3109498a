"""The connections of a process: a session for each event loop, whoever ends the loop, and from whatever thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from slime.utils.http_client import Http

NUM_GPUS = 0
THREADS, LOOPS_OF_EACH = 32, 6


class _Answers(BaseHTTPRequestHandler):
    cookies: ClassVar[list[str | None]] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.cookies.append(self.headers.get("Cookie"))
        self.send_response(200)
        self.send_header("Set-Cookie", "engine=1")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """A server with a host's name, for which cookies are kept where they are kept at all."""
    _Answers.cookies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


async def _get(http: Http, url: str) -> object:
    return await http.request("GET", url, None, retries=0)


def test_a_loop_for_each_sample_in_many_threads(url: str) -> None:
    """As a hook that calls `asyncio.run` does. Threads change often, so that one comes while another looks."""
    http, interval = Http(60.0), sys.getswitchinterval()

    def hook(_: int) -> list[object]:
        return [asyncio.run(_get(http, url)) for _ in range(LOOPS_OF_EACH)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            replies = list(pool.map(hook, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert replies == [[{}] * LOOPS_OF_EACH] * THREADS


def test_cookies_are_not_kept(url: str) -> None:
    async def twice() -> None:
        http = Http(60.0)
        for _ in range(2):
            await _get(http, url)
        await http.close()

    asyncio.run(twice())
    assert _Answers.cookies == [None, None]


def test_a_session_that_was_closed_is_replaced(url: str) -> None:
    """As by `shutdown_asyncgens` of a loop that goes on."""

    async def on_a_loop_that_goes_on() -> object:
        http = Http(60.0)
        await _get(http, url)
        await asyncio.get_running_loop().shutdown_asyncgens()
        reply = await _get(http, url)
        await http.close()
        return reply

    assert asyncio.run(on_a_loop_that_goes_on()) == {}


def test_a_loop_that_is_closed_and_no_more_leaves_no_complaint(url: str, caplog: pytest.LogCaptureFixture) -> None:
    http = Http(60.0)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            loop = asyncio.new_event_loop()
            assert loop.run_until_complete(_get(http, url)) == {}
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        asyncio.run(_get(http, url))
        gc.collect()
    assert [record.message for record in caplog.records if "Unclosed" in record.message] == []
