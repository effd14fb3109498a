"""Has SGLang's scheduler tell that its loop goes round, and when it does what may take any time."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from slime.processes import heartbeat

_SCHEDULER = "sglang.srt.managers.scheduler"


def beat_in_loops() -> None:
    """Has a scheduler beat once a turn of its loop, and note while a batch or a control call is under way.

    A server whose scheduler stands still answers `/health`, and SGLang's own watchdog looks while it computes only.
    """
    when_scheduling_begins(_beat)


def _beat(scheduler: Any) -> None:
    if (heart := heartbeat.own()) is not None:
        mark_turns(scheduler.Scheduler, heart)


def when_scheduling_begins(do: Callable[[Any], None]) -> None:
    """Call ``do`` with SGLang's module of schedulers once in each scheduler's process, or in the one that it is forked
    from: others need not import it."""
    plugins: Any = importlib.import_module("sglang.srt.plugins")
    load = plugins.load_plugins
    done: list[bool] = []

    def load_and_do() -> None:
        load()
        # The first thing that a scheduler's process does; SGLang loads plugins several times in a process.
        if _SCHEDULER in sys.modules and not done:
            done.append(True)
            do(sys.modules[_SCHEDULER])

    plugins.load_plugins = load_and_do


def mark_turns(scheduler: Any, heart: heartbeat.Heart) -> None:
    """Wrap what each of the class's loops calls: once a turn, with what came for it, and around each batch.

    Of ranks that get their requests from another one no turns are counted: they wait for it, however long that is.
    """
    take = scheduler.process_input_requests
    if getattr(take, "marks_turns", False):
        return

    @functools.wraps(take)
    def take_marked(self: Any, requests: list[Any]) -> Any:
        ranks = _ranks_of(self)
        if ranks.pp_rank == ranks.attn_tp_rank == ranks.attn_cp_rank == 0:
            heart.turn(works=bool(requests))  # a push of weights, or a call that profiles, is one of them
        else:
            heart.work()
        try:
            return take(self, requests)
        finally:
            heart.work(False)

    take_marked.marks_turns = True  # type: ignore[attr-defined]
    scheduler.process_input_requests = take_marked
    for name in ("run_batch", "process_batch_result"):
        setattr(scheduler, name, _at_work(getattr(scheduler, name), heart))


def _ranks_of(scheduler: Any) -> Any:
    """Which rank of each kind a scheduler is: its own attribute until 0.5.17, asked of the process in 0.5.23."""
    if hasattr(scheduler, "ps"):
        return scheduler.ps
    return importlib.import_module("sglang.srt.runtime_context").get_parallel()


def _at_work(method: Callable[..., Any], heart: heartbeat.Heart) -> Callable[..., Any]:
    """A batch is under way until the loop comes round: what it has begun may be waited for anywhere."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        heart.work()
        return method(self, *args, **options)

    return wrapped
