"""Ending requests before they are done, at the engines themselves: the router forwards no such call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from slime.rollout.runtime import RolloutRuntime
from slime.utils.http_client import Http, RequestError

logger = logging.getLogger(__name__)

_AT_A_TIME = 256
_ANSWER_S = 10.0


async def abort_requests(runtime: RolloutRuntime, rids: Iterable[str] | None) -> bool:
    """Have every engine end requests with what they have, which they answer as ``abort``; whether there is an engine.

    Args:
        rids: the ids of the requests, each at an engine that only the router knows; None for all requests there are.

    An engine that does not answer within 10 s has died or is stuck, which its supervisor says better: nothing waits.
    """
    bodies: list[dict[str, object]] = [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]
    engines = runtime.engines
    await asyncio.gather(*(_abort(runtime.http, url, engines.admin_key, bodies) for url in engines.urls))
    return bool(runtime.engines.urls)


async def _abort(http: Http, url: str, key: str | None, bodies: list[dict[str, object]]) -> None:
    headers, places = {"Authorization": f"Bearer {key}"} if key else {}, asyncio.Semaphore(_AT_A_TIME)

    async def send(body: dict[str, object]) -> None:
        async with places:
            with contextlib.suppress(RequestError):
                await http.request("POST", f"{url}/abort_request", body, retries=0, headers=headers)

    try:
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.gather(*map(send, bodies))
    except TimeoutError:
        logger.warning("%s did not answer /abort_request within %g s", url, _ANSWER_S)
