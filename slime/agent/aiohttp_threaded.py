"""An aiohttp application in a thread with an event loop of its own, which no busy loop of the caller's stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from slime.options.serving.agents import EVERY_INTERFACE

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_START_S = 30.0
_STOP_S = 10.0


class AppHandle:
    """A running application.

    Attributes:
        host, port: where it listens; the port is the real one where 0 was asked for.
        loop: its event loop, for `asyncio.run_coroutine_threadsafe`.
    """

    def __init__(
        self, host: str, port: int, loop: asyncio.AbstractEventLoop, ending: asyncio.Event, thread: threading.Thread
    ) -> None:
        self.host = host
        self.port = port
        self.loop = loop
        self._ending = ending
        self._thread = thread

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def stop(self, timeout: float = _STOP_S) -> bool:
        """Stop listening, end open requests, run the application's clean-up and end the thread; safe to repeat.

        Returns:
            Whether that was done within ``timeout`` seconds. The thread does not keep the process from ending.
        """
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop was closed just now
                self.loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the server at %s has not ended within %g s: it is left behind", self.url, timeout)
            return False
        return True


def run_app_in_thread(
    app: web.Application,
    host: str,
    port: int,
    *,
    thread_name: str | None = None,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve an application from a thread of its own; it listens when this returns.

    Args:
        host: an address of this host, not every one.
        thread_name: the thread's.
        runner_kwargs: of aiohttp's AppRunner, over what it has here: a handler is cancelled when its client goes away,
            and requests are not logged.

    Raises:
        ValueError: the host is every interface.
        OSError: it cannot listen there.
        TimeoutError: it was not up within 30 s.
    """
    if host in EVERY_INTERFACE:
        raise ValueError(f"host {host!r} is every interface: name the one address at which clients reach this host")
    started: Future[AppHandle] = Future()
    how = {"access_log": None, "shutdown_timeout": 1.0, "handler_cancellation": True, **(runner_kwargs or {})}
    name = thread_name or f"aiohttp-{port}"
    thread = threading.Thread(target=_serve, args=(app, host, port, how, started), name=name, daemon=True)
    thread.start()
    try:
        return started.result(_START_S)
    except TimeoutError as error:
        if not started.cancel():  # and what comes up later ends at once
            raise
        where = f"thread {name!r} at {host}:{port}"
        raise TimeoutError(f"the server in {where} was not up within {_START_S:g} s: its host is busy?") from error


def _serve(app: web.Application, host: str, port: int, how: Mapping[str, Any], started: Future[AppHandle]) -> None:
    try:
        asyncio.run(_run(app, host, port, how, started))
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        else:
            logger.exception("the server at %s:%d has failed", host, port)


async def _run(app: web.Application, host: str, port: int, how: Mapping[str, Any], started: Future[AppHandle]) -> None:
    from aiohttp import web

    ending = asyncio.Event()
    runner = web.AppRunner(app, **how)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        listens_at = runner.addresses[0][1]
        loop = asyncio.get_running_loop()
        if not started.set_running_or_notify_cancel():
            return  # it came up too late, and nobody waits any more
        started.set_result(AppHandle(host, listens_at, loop, ending, threading.current_thread()))
        await ending.wait()
    finally:
        await runner.cleanup()
