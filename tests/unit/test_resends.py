"""Requests that are sent again are counted by cause, and told of."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import web

from slime.backends.sglang.router import Router, _metrics_url
from slime.fleet.resend_log import ResendLog
from slime.utils import http_client
from slime.utils.http_client import Http
from slime.utils.http_utils import RequestError, post
from tests.unit.test_http_utils import http, serving

NUM_GPUS = 0
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(number: int, body: str = "{}") -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=number, text=body)

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Length": "100"})
    await reply.prepare(request)
    await reply.write(b'{"half":')
    assert request.transport is not None
    request.transport.close()
    return reply


LOST = '{"error": {"code": "call_upstream_request_error"}}'


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        (status(503), {"status_503": 2}),
        (status(429), {"status_429": 2}),
        (status(500, LOST), {"status_500": 2}),
        (status(http_client.TURNED_AWAY), {}),
        (reset, {"connection": 2}),
        (cut, {"cut_body": 2}),
    ],
    ids=["busy", "throttled", "lost engine", "turned away by a push", "reset", "cut"],
)
def test_causes(fault: Fault, causes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_BACKOFF_S", 0.01)
    left = [2]

    async def handler(request: web.Request) -> web.StreamResponse:
        left[0] -= 1
        return await (fault if left[0] >= 0 else status(200))(request)

    async def scenario() -> None:
        async with serving(handler) as url:
            assert await post(f"{url}/generate", {}) == {}
            assert http().take_counts(url) == (1, Counter(causes))
            assert http().take_counts(url) == (0, Counter())
            left[0] = 10
            with pytest.raises(RequestError):
                await post(f"{url}/generate", {}, max_retries=0)
            assert http().take_counts(url) == (1, Counter()), "a request that is given up is not sent again"

    asyncio.run(scenario())


def test_a_rollout_logs_them_and_warns_from_one_in_a_hundred(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    client = Http()
    log = ResendLog(client, "http://192.0.2.2:1/")
    client._sent["http://192.0.2.2:1"] += 1000
    client._count_resend("http://192.0.2.2:1", "connection")
    client._count_resend("http://192.0.2.2:2", "connection")
    failed = Counter({"status_503": 7, "cut_body": 1})
    assert log.metrics(3, failed) == {
        "rollout/resent_requests": 9.0,
        "rollout/resent/connection": 1.0,
        "rollout/resent_by_router/cut_body": 1.0,
        "rollout/resent_by_router/status_503": 7.0,
    }
    assert not caplog.messages, "fewer than one in a hundred"
    assert log.metrics(4, failed) == {"rollout/resent_requests": 0.0}
    client._sent["http://192.0.2.2:1"] += 400
    log.metrics(5, failed + Counter(connection=4))
    assert not caplog.messages, "fewer than five"
    client._sent["http://192.0.2.2:1"] += 400
    log.metrics(6, failed + Counter(connection=9))
    (message,) = caplog.messages
    assert message.startswith("rollout 6: 5 tries at 400 requests to engines failed and were made again (5 connection)")


METRICS = """# TYPE smg_router_upstream_responses_total counter
smg_router_upstream_responses_total{router_type="http",status_code="500",error_code="call_upstream_request_error"} 31
smg_router_upstream_responses_total{status_code="500",error_code="read_response_body_failed",router_type="http"} 2
smg_router_upstream_responses_total{router_type="http",status_code="200",error_code=""} 31
smg_router_upstream_responses_total{router_type="http",status_code="400",error_code=""} 5
smg_router_upstream_responses_total{router_type="http",status_code="499",error_code=""} 6
smg_router_upstream_responses_total{router_type="http",status_code="503",error_code=""} 30
smg_worker_retries_total{worker_type="regular",endpoint="generate"} 61
"""


def test_what_the_router_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(Namespace(), "192.0.2.2", None, tmp_path / "log")
    monkeypatch.setattr(requests.Session, "request", lambda *_, **__: Namespace(text=METRICS))
    assert router.failed_tries() == {"connection": 31, "cut_body": 2, "status_503": 30}

    def refuse(*_: Any, **__: Any) -> None:
        raise requests.ConnectionError

    monkeypatch.setattr(requests.Session, "request", refuse)
    assert router.failed_tries() == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "http://127.0.0.1:20001/metrics"),
        (["--prometheus-port", "29000"], "http://127.0.0.1:29000/metrics"),
        (["--prometheus-host", "0.0.0.0"], "http://127.0.0.1:20001/metrics"),
        (["--prometheus-host", "::", "--prometheus-port", "9"], "http://[::1]:9/metrics"),
    ],
)
def test_where_the_router_tells(words: list[str], expected: str) -> None:
    assert _metrics_url(["--prometheus-host", "127.0.0.1", "--prometheus-port", "20001", *words]) == expected
