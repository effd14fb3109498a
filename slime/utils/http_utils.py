"""HTTP for hooks and clients: `post` and `get` with retries and our keys; addresses and ports of this host."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import resource
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slime.utils.environment import proxy_of
from slime.utils.errors import SlimeError
from slime.utils.resends import count_request, count_resend

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
_BODY_IN_ERROR = 500
_PORTS = range(20000, 30000)
LOOPBACK = "127.0.0.1"
ROUTER_VARIABLES = {"actor": "SLIME_ROUTER_URL", "reward": "SLIME_REWARD_ROUTER_URL"}
"""Where processes that a hook starts find the router of each model."""
_OTHER_FILES = 512
"""That a process opens besides its connections."""

_api_keys: dict[str, str] = {}
_places: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {}
_examiners: dict[str, Callable[[str], Awaitable[str | None]]] = {}
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


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


def _first_word(url: str) -> str:
    word = urlsplit(url).path.split("/")[1:2]
    return f"/{word[0]}" if word and word[0] else ""


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address that has none yet."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """``http://host:port``, with brackets around an IPv6 address that has none yet."""
    return f"http://{host_port(host, port)}"


def register_api_key(url: str, key: str, path: str = "") -> None:
    """Send ``key`` as bearer token with every later request of this process to the origin of ``url``.

    Args:
        path: of one word (``/workers``): only to what is there and below.
    """
    _api_keys[origin_of(url) + path] = key


def limit_posts(url: str, place: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    """Make every later `post` of this process to the origin of ``url`` within ``place()``."""
    _places[origin_of(url)] = place


def examine_by(url: str, examine: Callable[[str], Awaitable[str | None]]) -> None:
    """Have ``examine`` look into it when a request of this process to the origin of ``url`` gets no reply in time.

    Args:
        examine: given what went wrong; None where a server that hung is out of the way, so that the request is sent
            again, else why it is not to be. It raises RequestError where no server is left that answers.
    """
    _examiners[origin_of(url)] = examine


def authorization(url: str) -> dict[str, str]:
    """The headers that open one of our own servers.

    Known origins are those of `register_api_key` and, for processes that a hook starts, those that the variables
    ``SLIME_ROUTER_URL`` and ``SLIME_REWARD_ROUTER_URL`` name; ``SLIME_ROUTER_API_KEY`` is the key of both. A key never
    goes to any other origin.
    """
    origin = origin_of(url)
    key = _api_keys.get(origin + _first_word(url)) or _api_keys.get(origin)
    if key is None and origin in _routers():
        key = os.environ.get("SLIME_ROUTER_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _routers() -> list[str]:
    """The origins that the environment of a hook's process names."""
    return [origin_of(os.environ.get(name, "")) for name in ROUTER_VARIABLES.values()]


def _is_own(url: str) -> bool:
    return origin_of(url) in (*_api_keys, *_places, *_routers())


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """``text`` with every secret replaced by ``***``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


async def send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    payload: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    retries: int,
    loads: Callable[[str], Any] = json.loads,
    proxy: str | None = None,
) -> Any:
    """Send one request, again with growing pauses where another try may succeed.

    Tried again are connections that were refused or that broke off, be it in the middle of the reply, the statuses of
    `RETRIED_STATUSES`, what the router answers when the engine that had the request has died, and a request without a
    reply in time where a server is found to hang (`examine_by`). Only a refused connection and statuses 429 and 499
    mean that the server surely did not work on the request; after the others it may have, and the work is then done
    twice: send nothing this way, with retries, that must happen at most once. Not tried again are other error statuses,
    which would come back, other timeouts, whose work may still be under way, and replies that are no HTTP.

    Args:
        loads: parses the reply, or raises ValueError where it is no JSON.
        proxy: URL of the one that the request goes through.

    Returns:
        The reply, parsed where it is JSON, else its text.

    Raises:
        RequestError: naming the URL, what came back and how often it was tried.
    """
    pause = _FIRST_BACKOFF_S
    count_request(origin_of(url))
    for attempt in range(retries + 1):
        status: int | None = None
        try:
            async with session.request(method, url, json=payload, headers=headers, proxy=proxy) as reply:
                status, text = reply.status, await reply.text()
            if status < 400:
                return _parse(text, loads)
            problem, cause = f"status {status}: {text[:_BODY_IN_ERROR]}", f"status_{status}"
            worth_retrying = status in RETRIED_STATUSES or (status == 500 and _error_code(text) in _LOST_ENGINE)
        except TimeoutError as error:
            await _examined(f"{method} {url}: no reply within {session.timeout.total:g} s", url, error)
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
        count_resend(origin_of(url), cause)
        # Full jitter: without it all requests that a restarted server refused come back at the same moment.
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _LONGEST_BACKOFF_S)
    raise AssertionError("unreachable")


async def _examined(problem: str, url: str, timeout: TimeoutError) -> None:
    """Return where the request is worth another try, since a server that may have had it hangs; else raise."""
    examine = _examiners.get(origin_of(url))
    if examine is None:
        raise RequestError(problem) from timeout
    if (explanation := await examine(problem)) is not None:
        raise NoReplyError(f"{problem}; {explanation}") from timeout


def allow_open_files(connections: int | None = None) -> None:
    """Let this process have so many connections, or as many as the host allows, which is often far above the 1,024 open
    files that a process begins with. Warns where it is less.
    """
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


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send ``payload`` as JSON and return the parsed reply; the key of our own servers is added.

    It goes through the proxy that the environment names for the URL, to a run's own servers never. To a run's router it
    waits for a place among the requests that ``--sglang-server-concurrency`` allows.

    Args:
        url: where to; the router's address for generation.
        payload: anything JSON can hold; None sends no body.
        max_retries: how often to try again after a lost connection or a status of `RETRIED_STATUSES`; see `send` for
            what the server may then do twice.
        action: the HTTP method, in lower case as upstream's hooks write it.
        headers: further headers; an ``Authorization`` here wins over ours.

    Raises:
        RequestError: the request failed for good.
    """
    method, both = action.upper(), {**authorization(url), **(headers or {})}
    place = _places.get(origin_of(url), nullcontext) if method == "POST" else nullcontext
    async with place():
        proxy = None if _is_own(url) else proxy_of(url)
        return await send(_session(), method, url, payload, headers=both, retries=max_retries, proxy=proxy)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """`post` without a body, by GET."""
    return await post(url, None, max_retries=max_retries, action="get", headers=headers)


def _session() -> aiohttp.ClientSession:
    # One session a loop: aiohttp's connections belong to the loop they were opened on.
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=1800), trust_env=False
        )
        _sessions[loop] = session
    return session


def _error_code(text: str) -> Any:
    """The code in an error of the router's; None in any other text."""
    error = reply.get("error") if isinstance(reply := _parse(text, json.loads), dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _parse(text: str, loads: Callable[[str], Any]) -> Any:
    try:
        return loads(text)
    except ValueError:
        return text


def host_ip() -> str:
    """The address at which other hosts reach this one; loopback on a host without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a datagram socket sends nothing: it only asks for the route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class PortReservation:
    """TCP ports in a row that no one else takes between now and the moment our server listens on them.

    A port is held twice. Bound, until `release`: no program can take it. And by an abstract Unix socket named after
    it, until `close` or the end of this process: no other reservation on this host can take it while the server, whose
    start takes seconds, has yet to bind it. Ports are below the range from which the kernel serves port 0.
    """

    def __init__(self, host: str, count: int = 1, port: int | None = None) -> None:
        """Reserve ``count`` ports, the first of which is ``port``, for a server on ``host``.

        Args:
            port: the first, where no others will do.

        Raises:
            OSError: no ports are free, or ``host`` is not an address of this machine.
        """
        _check_address(host)
        self._locks: list[socket.socket] = []
        self._bound: list[socket.socket] = []
        self._is_wanted = port is not None
        ports = _PORTS if port is None else range(port, port + count)
        for each in ports:
            if not self._hold(each):
                self.close()
            elif len(self._bound) == count:
                self.port = each - count + 1
                return
        self.close()
        raise OSError(f"no {count} free ports in a row in {ports.start}-{ports.stop - 1}")

    def _hold(self, port: int) -> bool:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # On every address: some servers, torch's rendezvous among them, bind no single one.
        everywhere = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        bound = socket.socket(everywhere, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0slime-port-{port}")
            if everywhere == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # Without SO_REUSEADDR, with which two sockets may bind one port. But a port that has to be this one is free
            # while the kernel still remembers connections of a server that has ended, up to a minute.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, self._is_wanted)
            bound.bind(("", port))  # no listen(), which would answer too early
        except OSError:
            lock.close()
            bound.close()
            return False
        self._locks.append(lock)
        self._bound.append(bound)
        return True

    def release(self) -> None:
        """Let go of the ports themselves: call it just before the server binds them."""
        while self._bound:
            self._bound.pop().close()

    def close(self) -> None:
        """End the reservation."""
        self.release()
        while self._locks:
            self._locks.pop().close()


def _check_address(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise OSError(error.errno, f"{host} is not an address of this machine") from error
            raise
