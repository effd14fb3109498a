"""Ending requests before they are done, at the engines themselves: the router forwards no such call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from slime.utils.http_utils import RequestError, post

logger = logging.getLogger(__name__)

_AT_A_TIME = 256
_ANSWER_S = 10.0

_engines: dict[str, str | None] = {}
"""Addresses of the run's engines, and the key that opens their control calls."""


def register_engines(urls: Iterable[str], admin_key: str | None) -> None:
    """Say where requests of this process run, in the place of what was said before; empty where there is no one."""
    engines = dict.fromkeys(urls, admin_key)
    _engines.update(engines)
    for url in _engines.keys() - engines.keys():
        _engines.pop(url)


def num_engines() -> int:
    """How many of them there are."""
    return len(_engines)


async def abort_requests(rids: Iterable[str] | None) -> bool:
    """Have every engine end requests with what they have, which they answer as ``abort``; whether there is an engine.

    Args:
        rids: the ids of the requests, each at an engine that only the router knows; None for all requests there are.

    An engine that does not answer within 10 s has died or is stuck, which its supervisor says better: nothing waits.
    """
    bodies: list[dict[str, object]] = [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]
    engines = list(_engines.items())  # another thread may register others meanwhile
    await asyncio.gather(*(_abort(url, key, bodies) for url, key in engines))
    return bool(_engines)


async def _abort(url: str, key: str | None, bodies: list[dict[str, object]]) -> None:
    """Give one engine all of them."""
    headers, places = {"Authorization": f"Bearer {key}"} if key else {}, asyncio.Semaphore(_AT_A_TIME)

    async def send(body: dict[str, object]) -> None:
        async with places:
            with contextlib.suppress(RequestError):
                await post(f"{url}/abort_request", body, max_retries=0, headers=headers)

    try:
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.gather(*map(send, bodies))
    except TimeoutError:
        logger.warning("%s did not answer /abort_request within %g s", url, _ANSWER_S)
