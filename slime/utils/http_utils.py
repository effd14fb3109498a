"""HTTP for hooks and clients: `post` and `get` with retries and our keys; addresses and ports of this host.

What they know of servers is an `Http`, which whoever owns the process makes and makes current (`Http.active`): users'
functions run with it. Outside of one, as in programs that a hook starts and in threads of its own, they know what the
environment names.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

from slime.utils.http_client import Http, RequestError, current_http

__all__ = [
    "PortReservation",
    "RequestError",
    "ask_directly",
    "get",
    "host_ip",
    "host_port",
    "http_url",
    "post",
    "redact",
]

logger = logging.getLogger(__name__)
_PORTS = range(20000, 30000)
LOOPBACK = "127.0.0.1"


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address that has none yet."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """``http://host:port``, with brackets around an IPv6 address that has none yet."""
    return f"http://{host_port(host, port)}"


def ask_directly(
    method: str,
    url: str,
    *,
    timeout: float | tuple[float, float],
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
    stream: bool = False,
) -> requests.Response:
    """The answer to one request, straight from the server: no proxy of the host stands between. ``timeout`` is for it
    to come, or (for a connection, for the answer); with ``stream`` the body is left to be read. requests'
    RequestException without an answer."""
    # A session for each: callers are of several threads, and a connection that a pause of minutes left open may have
    # been closed by the server.
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, data=data, headers=headers, timeout=timeout, stream=stream)


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """``text`` with every secret replaced by ``***``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Send ``payload``, anything JSON can hold, and return the parsed reply; the key of our own servers is added,
    unless ``headers`` have an ``Authorization``.

    It goes through the proxy that the environment names for the URL, to a run's own servers never. To a run's
    router it waits for a place among the requests that ``--sglang-server-concurrency`` allows. ``timeout``
    (seconds; by default ``--request-timeout``) is how long each try may take; after a lost connection or a status
    of `http_client.RETRIED_STATUSES` there are up to ``max_retries`` more (`Http.send` says what the server may
    then do twice). ``action`` is the HTTP method, in lower case as upstream's hooks write it; a payload of None
    sends no body. RequestError where the request failed for good.
    """
    known = current_http()
    http = known or Http()
    try:
        method = action.upper()
        return await http.request(method, url, payload, retries=max_retries, headers=headers, timeout=timeout)
    finally:
        if known is None:
            await http.close()


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """`post` without a body, by GET."""
    return await post(url, None, max_retries=max_retries, action="get", headers=headers)


def host_ip() -> str:
    """The address at which other hosts reach this one; loopback on a host without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a datagram socket sends nothing: it only asks for the route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_own_address(host: str) -> bool:
    """Whether a host, a name or an address without brackets, is this machine."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
        for address in addresses:
            _check_address(address)
    except OSError:
        return False
    return True


class ThreadedServer(ThreadingHTTPServer):
    """Answers each request in a thread, which no process waits for at its end."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], what: str) -> None:
        """Listen at ``host``, an IPv6 address with or without brackets; ``port`` 0 is a free one. OSError where it
        cannot. ``what`` messages call it."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._what = what
        super().__init__((host.strip("[]"), port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Have it in the log."""
        logger.warning("a request to %s failed", self._what, exc_info=True)


class PortReservation:
    """TCP ports in a row that no one else takes between now and the moment our server listens on them.

    A port is held twice. Bound, until `release`: no program can take it. And by an abstract Unix socket named after
    it, until `close` or the end of this process: no other reservation on this host can take it while the server, whose
    start takes seconds, has yet to bind it. Ports are below the range from which the kernel serves port 0.
    """

    def __init__(self, host: str, count: int = 1, port: int | None = None) -> None:
        """Reserve ``count`` ports for a server on ``host``, the first of which is ``port`` where no others will do;
        OSError where none are free, or ``host`` is not an address of this machine."""
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
