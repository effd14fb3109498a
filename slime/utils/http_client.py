"""How one process sends requests: an `Http` holds keys, limits and counts of the servers that it knows."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import random
import resource
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.payload import JsonBytesPayload

from slime.utils.environment import proxy_of
from slime.utils.errors import SlimeError
from slime.utils.user_functions import setting

logger = logging.getLogger(__name__)

TURNED_AWAY = 499
"""The request came during a weight update, which has ended: another try needs no pause."""
RETRIED_STATUSES = frozenset({429, TURNED_AWAY, 502, 503, 504})
"""The server was busy, or the router has no engine at the moment: another try may reach one that lives."""
_LOST_ENGINE = (
    *("call_upstream_request_error", "call_upstream_request_failed", "call_upstream_connection_failed"),
    *("call_upstream_body_error", "read_response_body_failed", "read_response_failed"),
)
"""Codes of the router's own errors, all of status 500: the engine that had the request is gone. The router tries again
five times by itself, but may choose the same engine each time, until that is deregistered."""
_RETRIED_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 4.0
_CLOSE_S = 10.0
_BODY_IN_ERROR = 500
ROUTER_VARIABLES = {"actor": "SLIME_ROUTER_URL", "reward": "SLIME_REWARD_ROUTER_URL"}
"""Where processes that a hook starts find the router of each model."""
_OTHER_FILES = 512
"""That a process opens besides its connections."""
_TIMEOUT_S = 1800.0
"""Of a request outside of an `Http` that has one."""


class RequestError(SlimeError, RuntimeError):
    """A request that failed for good; ``status`` is None where no reply came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoReplyError(RequestError):
    """A request that got no reply in time from servers that were examined, and answer."""


def origin_of(url: str) -> str:
    """``scheme://host:port`` of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _routers() -> list[str]:
    return [origin_of(os.environ.get(name, "")) for name in ROUTER_VARIABLES.values()]


class Http:
    """How requests of one process are sent: keys, limits and counts, each by the origin of the server."""

    def __init__(self, request_timeout: float | None = None) -> None:
        """A `post` as a whole may take the seconds of ``--request-timeout``, which are None where no flag is known."""
        self._timeout = _TIMEOUT_S if request_timeout is None else request_timeout
        self._flag = "" if request_timeout is None else " (--request-timeout)"
        self._api_keys: dict[str, str] = {}
        self._places: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {}
        self._examiners: dict[str, Callable[[str], Awaitable[str | None]]] = {}
        self._sessions: dict[
            asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[aiohttp.ClientSession, None]]
        ] = {}
        """Each with who closes it. Sessions refer to their loop, so that no weak reference to that would ever end."""
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._resent: dict[str, Counter[str]] = {}

    def own_process(self) -> None:
        """Be that of `post` and `get` wherever in the process no other one is active."""
        global _of_process
        _of_process = self

    def active(self) -> AbstractContextManager[None]:
        """Within the block, and in coroutines and hook threads that it starts, `post` and `get` are this one's."""
        return setting(_current, self)

    def add_api_keys(self, keys: Mapping[str, str]) -> None:
        """Send these bearer tokens with every later request to their origins, by which they are; one with a path of one
        word (``/workers``) is only for what is there and below."""
        self._api_keys |= keys

    def limit_posts(self, url: str, place: Callable[[], AbstractAsyncContextManager[object]]) -> None:
        """Make every later `post` to the origin of ``url`` within ``place()``."""
        self._places[origin_of(url)] = place

    def examine_by(self, url: str, examine: Callable[[str], Awaitable[str | None]]) -> None:
        """Have ``examine``, given what went wrong, look into it when a request to the origin of ``url`` gets no reply
        in time: None where a server that hung is out of the way, so that the request is sent again, else why it is not
        to be. It raises RequestError where no server is left that answers."""
        self._examiners[origin_of(url)] = examine

    def authorization(self, url: str) -> dict[str, str]:
        """The headers that open one of our own servers: origins of `add_api_keys` and, for processes that a hook
        starts, those that the variables ``SLIME_ROUTER_URL`` and ``SLIME_REWARD_ROUTER_URL`` name, with
        ``SLIME_ROUTER_API_KEY`` for both. A key never goes to any other origin."""
        origin, first_word = origin_of(url), "/".join(urlsplit(url).path.split("/")[:2])
        key = self._api_keys.get(origin + first_word) or self._api_keys.get(origin)
        if key is None and origin in _routers():
            key = os.environ.get("SLIME_ROUTER_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def take_counts(self, url: str) -> tuple[int, Counter[str]]:
        """The requests to the origin of ``url`` since the last call, and the further tries by cause."""
        origin = origin_of(url)
        with self._lock:
            return self._sent.pop(origin, 0), self._resent.pop(origin, Counter())

    def _count_resend(self, url: str, cause: str) -> None:
        """One further try, because of ``cause``, a word for the name of a metric."""
        with self._lock:
            self._resent.setdefault(origin_of(url), Counter())[cause] += 1

    async def send(
        self,
        method: str,
        url: str,
        payload: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        retries: int,
        dumps: Callable[[Any], bytes] = lambda payload: json.dumps(payload).encode(),
        loads: Callable[[str], Any] = json.loads,
        proxy: str | None = None,
    ) -> Any:
        """Send one request by the event loop's session, through a ``proxy`` if one is given, again with growing pauses
        where another try may succeed; the reply, parsed by ``loads`` where that raises no ValueError, else its text.
        ``dumps`` makes JSON of a payload; None sends no body. RequestError names the URL, what came back and how often
        it was tried.

        Tried again are connections that were refused or that broke off, be it in the middle of the reply, the statuses
        of `RETRIED_STATUSES`, what the router answers when the engine that had the request has died, and a request
        without a reply in time where a server is found to hang (`examine_by`). Only a refused connection and statuses
        429 and 499 mean that the server surely did not work on the request; after the others it may have, and the work
        is then done twice: send nothing this way, with retries, that must happen at most once. Not tried again are
        other error statuses, which would come back, other timeouts, whose work may still be under way, and replies that
        are no HTTP.
        """
        session, pause = await self._session(), _FIRST_BACKOFF_S
        with self._lock:
            self._sent[origin_of(url)] += 1
        for attempt in range(retries + 1):
            status: int | None = None
            body = None if payload is None else JsonBytesPayload(payload, dumps)
            try:
                async with session.request(method, url, data=body, headers=headers, proxy=proxy) as reply:
                    status, text = reply.status, await reply.text()
                if status < 400:
                    return _parse(text, loads)
                problem, cause = f"status {status}: {text[:_BODY_IN_ERROR]}", f"status_{status}"
                worth_retrying = status in RETRIED_STATUSES or (status == 500 and _error_code(text) in _LOST_ENGINE)
            except TimeoutError as error:
                await self._examined(f"{method} {url}: no reply within {self._timeout:g} s", url, error)
                problem, worth_retrying, cause = "no reply of an engine that hangs", True, "hung_engine"
            except (*_RETRIED_ERRORS, aiohttp.ClientError) as error:
                problem, worth_retrying = f"{type(error).__name__}: {error}", isinstance(error, _RETRIED_ERRORS)
                cause = "cut_body" if isinstance(error, aiohttp.ClientPayloadError) else "connection"
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    problem += f"; {_too_few_files()}"
            if not worth_retrying or attempt == retries:
                raise RequestError(f"{method} {url}: {problem} (tried {attempt + 1} times)", status)
            if status == TURNED_AWAY:
                continue
            self._count_resend(url, cause)
            # Full jitter: without it all requests that a restarted server refused come back at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_BACKOFF_S)
        raise AssertionError("unreachable")

    async def _examined(self, problem: str, url: str, timeout: TimeoutError) -> None:
        """Return where the request is worth another try, since a server that may have had it hangs; else raise."""
        examine = self._examiners.get(origin_of(url))
        if examine is None:
            raise RequestError(f"{problem}{self._flag}") from timeout
        if (explanation := await examine(problem)) is not None:
            raise NoReplyError(f"{problem}; {explanation}{self._flag}") from timeout

    async def request(
        self, method: str, url: str, payload: Any, *, retries: int, headers: Mapping[str, str] | None = None
    ) -> Any:
        """One request with our key, as `post`, which see."""
        place = self._places.get(origin_of(url), nullcontext) if method == "POST" else nullcontext
        async with place():
            is_own = origin_of(url) in (*self._api_keys, *self._places, *_routers())
            proxy = None if is_own else proxy_of(url)
            both = {**self.authorization(url), **(headers or {})}
            return await self.send(method, url, payload, headers=both, retries=retries, proxy=proxy)

    async def close(self) -> None:
        """Close the running event loop's connections; for one whose peer reads nothing 10 s are waited at most."""
        with self._lock:
            found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()

    async def _session(self) -> aiohttp.ClientSession:
        # One session a loop: aiohttp's connections belong to the loop they were opened on.
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None or found[0].closed:
            lending = self._lend()
            found = await anext(lending), lending  # no other task runs meanwhile: it waits for nothing
            with self._lock:
                for ended in [other for other in self._sessions if other.is_closed()]:
                    # Whoever closed it did not end its generators; an open session would complain of that.
                    session, _ = self._sessions.pop(ended)
                    with contextlib.suppress(RuntimeError, AttributeError):
                        session.connector._close()  # type: ignore[union-attr]
                self._sessions[loop] = found
        return found[0]

    async def _lend(self) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """A session that is closed when its loop is shut down, as `asyncio.run` ends the generators that are under way:
        a hook may call it for each sample."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),  # a router's would bind all requests to one engine
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            trust_env=False,
        )
        try:
            yield session
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.close(), _CLOSE_S)


_current: ContextVar[Http | None] = ContextVar("http_of_the_process", default=None)
_of_process: Http | None = None


def current_http() -> Http | None:
    """The one that is active here, else that of the process; None in programs that a hook starts."""
    return _current.get() or _of_process


def allow_open_files(connections: int | None = None) -> None:
    """Let this process have so many connections, or as many as the host allows, which is often far above the 1,024 open
    files that a process begins with. Warns where it is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = hard if connections is None else connections + _OTHER_FILES
    if soft == unlimited or (needed != unlimited and soft >= needed):
        return
    allowed = needed if hard == unlimited else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning("up to %d requests may be in flight, but %s", connections, _too_few_files())


def _too_few_files() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process may have {limit} open files, and each request in flight is one: raise the hard limit "
        "(ulimit -Hn) or lower --sglang-server-concurrency"
    )


def _error_code(text: str) -> Any:
    error = reply.get("error") if isinstance(reply := _parse(text, json.loads), dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _parse(text: str, loads: Callable[[str], Any]) -> Any:
    try:
        return loads(text)
    except ValueError:
        return text
