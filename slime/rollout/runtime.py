"""What the rollouts of one process share, in one object that whoever owns the process makes and passes on.

The rollout manager has one; so may other processes that generate, and one caller can pause them all for a weight push.
Users' functions have upstream's signatures, without a place for it: they, and what they call of ours, run in a context
in which it is the `current` one (`RolloutRuntime.active`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slime.data.routes import route_options
from slime.observability.logs import FailureLog
from slime.rollout.engine.gate import Gate, Line, PauseSwitch
from slime.rollout.engine.loop import HOOK_THREADS
from slime.utils.http_client import Http, RequestError, allow_open_files
from slime.utils.user_functions import TOLD, setting

logger = logging.getLogger(__name__)

_FIRST_VERSION = 0
_ABORTS_AT_A_TIME = 256
_ABORT_ANSWER_S = 10.0


@dataclass(frozen=True)
class EngineSet:
    """The engines that get the process's requests; whenever one comes or goes there is another of a later version."""

    version: int
    urls: tuple[str, ...]
    admin_key: str | None
    """What opens their control calls."""
    open_urls: frozenset[str] = frozenset()
    """Of those that ask for no key."""


@dataclass
class OfLoop:
    """What belongs to one event loop of the process: its places and waiting line."""

    gate: Gate
    line: Line = field(default_factory=Line)
    hook_threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HOOK_THREADS))
    stream: Any = None
    """The groups under way without end of `slime.rollout.fully_async_rollout`."""


class RolloutRuntime:
    """The requests of one process: how they are sent, how many at a time, to which engines, under which weights.

    Its methods may be called from any thread or event loop of the process. It keeps those options alone that it says.
    """

    def __init__(self, args: Namespace) -> None:
        self.http = Http(args.request_timeout)
        self.failures = FailureLog()
        self.judges_of_numbers: set[str] = set()
        """Who has given a reward that is not a dict."""
        self.told: set[tuple[str, ...]] = set()
        """What was warned of, and is not again (`is_first`)."""
        self.services: dict[str, Any] = {}
        """What others run beside it in this process, by a name that each knows."""
        self.route_options = route_options(args)
        """For requests of those who have no options: whether engines are asked for routes, and what these are like."""
        self.version = _FIRST_VERSION
        """The newest weights at the engines, where the driver tells: that of train_async.py does."""
        self.engines = EngineSet(0, (), None)
        """Those of now; `set_engines` changes them."""
        self._per_engine, self._num_planned = args.sglang_server_concurrency, args.num_engines
        self._pause = PauseSwitch()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callable[[], Coroutine[Any, Any, None]]]] = []
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, OfLoop] = {}
        """Streams refer to their loop, so that no weak reference to that would ever end."""
        allow_open_files(self.capacity)

    def own_process(self) -> None:
        """Be the `current` one also of threads that a user's code begins, which have no context of ours."""
        global _of_process
        _of_process = self
        self.http.own_process()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, and in coroutines and hook threads that it starts, this one is `current`."""
        with setting(_current, self), self.http.active(), setting(TOLD, self.told):
            yield

    def here(self) -> OfLoop:
        """What belongs to the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._loops:
                for ended in [other for other in self._loops if other.is_closed()]:
                    del self._loops[ended]
                self._loops[loop] = OfLoop(Gate(self.capacity))
            return self._loops[loop]

    def set_engines(self, urls: Sequence[str], admin_key: str | None, open_urls: frozenset[str] = frozenset()) -> None:
        """Say which engines there are from now on, none where there is no one to tell of aborts; how many requests may
        be in flight follows from it. Requests under way stay, also at an engine that is left out."""
        with self._lock:
            self.engines = EngineSet(self.engines.version + 1, tuple(urls), admin_key, open_urls)
            loops = list(self._loops.items())
        allow_open_files(self.capacity)
        for loop, its in loops:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(its.gate.set_capacity, self.capacity)

    @property
    def capacity(self) -> int:
        """Requests in flight over all engines, on each event loop; of as many as the options plan, until they start."""
        count = len(self.engines.urls) if self.engines.version else self._num_planned
        return int(self._per_engine * max(1, count))

    @contextlib.asynccontextmanager
    async def acquire(self, rank: tuple[int, int], held: Callable[[], object] = lambda: None) -> AsyncIterator[None]:
        """A place among the requests in flight, by rank (`Gate`), which ``held`` is told of, when nothing pauses."""
        gate = self.here().gate
        await gate.enter(rank)
        try:
            held()
            await self._pause.wait_until_resumed()
            yield
        finally:
            gate.leave()

    def pause_generation(self) -> None:
        """Keep new requests of this process from the engines, as while weights are pushed; those under way go on.

        Engines hold them back as well, but a request that reaches SGLang 0.5.17 while it waits for the running ones to
        leave is turned away in the end, and makes it wait for another second. They are held as long as a push takes,
        which has a deadline and whose failure ends the run.
        """
        self._pause.pause()

    async def resume_generation(self, version: int | None = None) -> None:
        """Let requests go on, under weights of ``version`` where there are others now; who asked for it is told so."""
        try:
            if version is not None:
                self.version = version
                for loop, listener in list(self._listeners):
                    if loop is asyncio.get_running_loop():
                        await listener()
                    elif not loop.is_closed():
                        asyncio.run_coroutine_threadsafe(listener(), loop)
        finally:
            self._pause.resume()  # nobody else would

    async def abort_requests(self, rids: Iterable[str] | None) -> bool:
        """Have all engines end requests, by their ids or (None) all, with what they have, which they answer as
        ``abort``; whether there is an engine. The router, which alone knows where each is, forwards no such call.

        One that does not answer within 10 s has died or is stuck, which its supervisor says better: nothing waits.
        """
        bodies: list[dict[str, object]] = [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]
        engines = self.engines
        keys = {url: None if url in engines.open_urls else engines.admin_key for url in engines.urls}
        await asyncio.gather(*(self._abort(url, key, bodies) for url, key in keys.items()))
        return bool(engines.urls)

    async def _abort(self, url: str, key: str | None, bodies: list[dict[str, object]]) -> None:
        headers, places = {"Authorization": f"Bearer {key}"} if key else {}, asyncio.Semaphore(_ABORTS_AT_A_TIME)

        async def send(body: dict[str, object]) -> None:
            async with places:
                with contextlib.suppress(RequestError):
                    await self.http.request("POST", f"{url}/abort_request", body, retries=0, headers=headers)

        try:
            async with asyncio.timeout(_ABORT_ANSWER_S):
                await asyncio.gather(*map(send, bodies))
        except TimeoutError:
            logger.warning("%s did not answer /abort_request within %g s", url, _ABORT_ANSWER_S)

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
        """Within the block, have ``listener`` called after every push, on the event loop that runs now."""
        entry = asyncio.get_running_loop(), listener
        self._listeners.append(entry)
        try:
            yield
        finally:
            self._listeners.remove(entry)


_current: ContextVar[RolloutRuntime | None] = ContextVar("rollout_runtime", default=None)
_of_process: RolloutRuntime | None = None


def current() -> RolloutRuntime | None:
    """The runtime in whose context this runs, else that of the process; None in scripts that have none."""
    return _current.get() or _of_process


@contextlib.asynccontextmanager
async def current_or_new(args: Namespace) -> AsyncIterator[RolloutRuntime]:
    """The current runtime; where there is none, one for the block, which then shares nothing with others."""
    if (runtime := current()) is not None:
        yield runtime
        return
    with (runtime := RolloutRuntime(args)).active():
        try:
            yield runtime
        finally:
            await runtime.http.close()


def pushed_version() -> int:
    """The newest weights at the engines, as far as the current runtime was told (`RolloutRuntime.version`)."""
    return _FIRST_VERSION if (runtime := current()) is None else runtime.version
