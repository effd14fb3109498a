"""Which engines hang, when a request got no reply in time: their own actors examine them, and those are left out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError

from slime.utils.errors import DeadlineError
from slime.utils.http_utils import RequestError

_MARGIN_S = 20.0


class Examiner:
    """Examines the engines behind a router, once for all requests that ask meanwhile, in a thread of its own."""

    def __init__(
        self,
        engines: Callable[[], Mapping[str, Any]],
        answer: float,
        remove: Callable[[str], object],
        *,
        come_back: bool = False,
    ) -> None:
        """``engines`` gives the actors of those that get requests, by URL; each is asked twice, with ``answer`` seconds
        to answer. ``remove`` is called with the URL of one that hangs; it then gets none any more. It is not called
        where all hang, unless they ``come_back``."""
        self._engines, self._remove, self._come_back = engines, remove, come_back
        self._limit = 2 * answer + _MARGIN_S
        self._lock = threading.Lock()
        self._current: Future[str | None] | None = None
        self._turn = threading.Lock()
        """Of whoever examines, or pauses engines."""
        self._forbidden = False
        self._working = 0

    async def __call__(self, problem: str) -> str | None:
        """As of `Http.examine_by`."""
        return await asyncio.wrap_future(self._begin(problem))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Within, engines generate; outside they may be asleep, and a question would be the end of them."""
        with self._lock:
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    def forbid(self) -> None:
        """Examine nothing until `allow`, as engines pause; DeadlineError if an examination under way does not end."""
        if not self._forbidden and not self._turn.acquire(timeout=self._limit):
            raise DeadlineError(
                f"an examination of the engines has not ended within {self._limit:.0f} s "
                "(--rollout-health-check-timeout), and engines under examination cannot be paused"
            )
        self._forbidden = True

    def allow(self) -> None:
        """Take `forbid` back, where it was granted."""
        if self._forbidden:
            self._forbidden = False
            self._turn.release()

    def _begin(self, problem: str) -> Future[str | None]:
        with self._lock:
            if self._current is None or self._current.done():
                self._current = Future()
                self._current.set_running_or_notify_cancel()  # one that gives up must not cancel it for the others
                threading.Thread(
                    target=self._run, args=(problem, self._current), name="examination", daemon=True
                ).start()
            return self._current

    def _run(self, problem: str, verdict: Future[str | None]) -> None:
        try:
            with self._turn:
                answer = self._examine(problem)
            verdict.set_result(answer)
        except BaseException as error:
            verdict.set_exception(error)

    def _examine(self, problem: str) -> str | None:
        if not self._working:
            return "no rollout is under way, so that no engine was asked"
        asked = dict(self._engines())
        calls = {url: actor.examine.remote(problem, paused=False) for url, actor in asked.items()}
        deadline = time.monotonic() + self._limit
        hanging = {}
        for url, call in calls.items():
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:  # one that has died among them
                hanging[url] = str(getattr(error, "cause", None) or error).splitlines()[0]
        if not asked and self._come_back:
            return None
        if not hanging:
            who = f"all {len(asked)} engines answer" if len(asked) > 1 else "the only engine left answers"
            return f"{who}, so that this takes longer: raise the limit, or ask for less"
        if len(hanging) == len(asked) and not self._come_back:
            raise RequestError(f"{problem}: no engine is left that answers\n" + "\n".join(hanging.values()))
        for url in hanging:
            self._remove(url)
        return None
