"""What the requests of one rollout share: the client, the bound on concurrency, and who is doing what."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from slime.backends.sglang.client import GenerateClient
from slime.data import Sample
from slime.observability.trace import span
from slime.observability.trace_utils import trace_span
from slime.rollout.engine.versions import versions
from slime.rollout.runtime import RolloutRuntime, current, current_or_new
from slime.utils.http_utils import RequestError, http_url
from slime.utils.user_functions import setting

_SHOWN, _RETRIES = 4, 30
_GARBAGE_THRESHOLDS = (100_000, 100, 10)
"""Of `gc`, in place of (700, 10, 10). Ten thousand requests in flight are more than a million objects that stay. To
look through them took a third of a rollout's processor time, and takes seconds at once. A request leaves no cycles."""


@dataclass
class _Doing:
    sample: Sample
    what: str
    """What it waits for, and since when."""
    since: float = field(default_factory=time.monotonic)

    _waits: dict[object, tuple[str, float]] = field(default_factory=dict)
    """What its requests that have no place wait for, and since when, by request: several may be under way."""
    _in_line_since: float = 0.0
    _was_in_line: float = 0.0

    @contextlib.contextmanager
    def in_line(self, what: str) -> Iterator[Callable[[str], None]]:
        """Within, a request of it waits for others to be served first; what it gives says that it waits for more."""
        loop, request = asyncio.get_running_loop(), object()
        if not self._waits:
            self._in_line_since = loop.time()

        def goes_on(what: str) -> None:
            self._waits[request] = what, time.monotonic()

        goes_on(what)
        try:
            yield goes_on
        finally:
            del self._waits[request]
            if not self._waits:
                self._was_in_line += loop.time() - self._in_line_since
                self.since = time.monotonic()

    def now(self) -> tuple[str, float]:
        """What it waits for, and since when: a place, for as long as any of its requests has none."""
        return min(self._waits.values(), key=lambda wait: wait[1], default=(self.what, self.since))

    def seconds_in_line(self) -> float:
        now = asyncio.get_running_loop().time()
        return self._was_in_line + (now - self._in_line_since if self._waits else 0.0)


_doing: ContextVar[_Doing | None] = ContextVar("what_the_sample_waits_for", default=None)


def seconds_in_line() -> float:
    """How long requests of the sample that is worked on in this task have waited for others to be served first."""
    doing = _doing.get()
    return 0.0 if doing is None else doing.seconds_in_line()


class RolloutState:
    """Shared by all samples of one call of a rollout function."""

    def __init__(self, args: Namespace, runtime: RolloutRuntime, rank: int) -> None:
        if 0 < gc.get_threshold()[0] < _GARBAGE_THRESHOLDS[0]:
            gc.set_threshold(*_GARBAGE_THRESHOLDS)
        self.runtime = runtime
        self.client = make_client(args, runtime)
        self.loop = asyncio.get_running_loop()
        self._rank = rank
        self.num_samples = 0
        self.num_samples_done = 0
        self.failures: Counter[str] = Counter()
        """Tries to generate or to reward a sample that failed, by reason."""
        self.ending = False
        """No more requests are sent, and those that the engines abort do not go on."""
        self.num_retracted = 0
        """Replies of requests that an engine computed again in parts."""
        self.replies: list[dict[str, float]] = []
        """Of each reply what its engine tells of time, for `request_metrics`."""
        self.requests: set[str] = set()
        """Ids of those that an engine has."""
        self._doing: dict[object, _Doing] = {}
        self._busy: dict[object, tuple[str, float]] = {}

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[str | None]:
        """The id of one request, with a place among those in flight; None where no more are to be sent.

        Older rollouts get their places first, and within one of them the groups that were begun first: a second turn
        does not wait for the first ones of all others. Tools and rewards hold no place.
        """
        async with self.place():
            if self.ending:
                yield None
                return
            rid = uuid.uuid4().hex
            self.requests.add(rid)
            try:
                yield rid
            finally:
                self.requests.discard(rid)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place among the requests in flight, once none of them are held back."""
        doing = _doing.get() or _Doing(Sample(), "")  # a hook of the whole batch sends a request
        with contextlib.ExitStack() as line:
            goes_on = line.enter_context(doing.in_line("waiting for a place among the requests in flight"))
            held = functools.partial(goes_on, "held back by a weight update")
            async with self.runtime.acquire((self._rank, POSITION.get()), held):
                line.close()
                with span("rollout/request"):
                    yield

    @contextlib.contextmanager
    def doing(self, sample: Sample, what: str) -> Iterator[None]:
        """Note what ``sample`` is waiting for, for the message of a deadline."""
        key, doing = object(), _Doing(sample, what)
        self._doing[key] = doing
        try:
            with setting(_doing, doing), trace_span(sample, f"rollout/{what.replace(' ', '_')}") as traced:
                yield
                if found := versions(sample):
                    traced.update({"version": found[-1]})
        finally:
            del self._doing[key]

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Note what the rollout as a whole waits for."""
        key = object()
        self._busy[key] = (what, time.monotonic())
        try:
            yield
        except asyncio.CancelledError:
            raise  # by a deadline, whose message will have it
        except BaseException:
            del self._busy[key]
            raise
        del self._busy[key]

    def progress(self) -> str:
        """How many samples are done, and what the longest waiting ones wait for."""
        now = time.monotonic()
        waits = ((doing.sample.index, *doing.now()) for doing in self._doing.values())
        longest = sorted(waits, key=lambda wait: wait[2])
        shown = ", ".join(f"sample {index} ({what} for {now - since:.0f} s)" for index, what, since in longest[:_SHOWN])
        more = f" and {len(longest) - _SHOWN} more" if len(longest) > _SHOWN else ""
        waiting = f"; waiting for {shown}{more}" if shown else ""
        busy = "".join(f"; {what} for {now - since:.0f} s" for what, since in self._busy.values())
        return f"{self.num_samples_done} of {self.num_samples} samples finished{waiting}{busy}"


REPLY_TIMES = ("e2e_latency", "queue_time", "decode_throughput")
"""What engines tell of a request in ``meta_info``: seconds in all and in the queue, tokens a second after the first."""
POSITION: ContextVar[int] = ContextVar("position_of_the_group", default=0)
"""Of which of the rollout's groups requests are, in the order of their beginning."""
_current: ContextVar[RolloutState | None] = ContextVar("rollout_state", default=None)


def _state_here() -> RolloutState | None:
    """Of the rollout under way in this task; none on an event loop of a hook's own, where its client is of no use."""
    state = _current.get()
    return state if state is not None and state.loop is asyncio.get_running_loop() else None


def router_url(args: Namespace) -> str:
    """Address of the router; ValueError where there is none yet."""
    host, port = args.sglang_router_ip, args.sglang_router_port
    if not host or not port:
        raise ValueError("no router is running: args.sglang_router_ip and args.sglang_router_port are not set")
    return http_url(host, int(port))


def make_client(args: Namespace, runtime: RolloutRuntime) -> GenerateClient:
    """A client of the router."""
    adapter = args.lora_sync == "adapter"
    return GenerateClient(runtime.http, router_url(args), args.sglang_router_api_key, _RETRIES, adapter=adapter)


@contextlib.asynccontextmanager
async def state_of_call(args: Namespace) -> AsyncIterator[RolloutState]:
    """The state of the rollout under way in this task; in a user's own rollout function a new one for a single call."""
    state = _state_here()
    if state is None and (runtime := current()) is not None:
        state = RolloutState(args, runtime, rank=0)
    # Not by `rollout_state` where there is one: this is done for each sample.
    async with rollout_state(args) if state is None else contextlib.nullcontext(state) as state:
        yield state


@contextlib.asynccontextmanager
async def rollout_state(args: Namespace, rank: int = 0) -> AsyncIterator[RolloutState]:
    """The state of the rollout under way in this task; outside of one, a new one that ends with the block, of ``rank``:
    smaller ones are first in line for the bound on requests in flight."""
    if (state := _state_here()) is not None:
        yield state
        return
    async with current_or_new(args) as runtime:
        with setting(_current, state := RolloutState(args, runtime, rank)):
            yield state


def is_ending() -> bool:
    """Whether the rollout under way in this task has enough samples, and sends no more requests."""
    state = _current.get()
    return state is not None and state.ending


@contextlib.asynccontextmanager
async def place_of_request() -> AsyncIterator[None]:
    """The place of a request that a user's code sends by itself, where it is part of a rollout of slime's; RequestError
    where the rollout got enough samples while the request waited.

    One of an event loop of its own, as of a plain function in a thread, has none.
    """
    if (state := _state_here()) is None:
        yield
        return
    was_ending = state.ending  # hooks of the whole batch send theirs then
    async with state.place():
        if state.ending and not was_ending:
            raise RequestError("not sent: the rollout has enough samples")
        yield
