"""The turns of a session that is one sample of a rollout: requests among the rollout's, on its event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import json
import uuid
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from slime.agent.parsing import Call
from slime.agent.session import Generated, SessionError
from slime.data import Sample, Status
from slime.rollout.engine.generation import generate
from slime.rollout.runtime import current
from slime.rollout.sampling import request_seed
from slime.utils.http_client import RequestError

T = TypeVar("T")
_FINISH = {Status.TRUNCATED: "length"}


class InRollout:
    """Generates for one session within a rollout: on its event loop, among its requests. One that is made where no
    event loop runs generates on those that ask it."""

    def __init__(self, args: Namespace, base: Sample) -> None:
        self._args, self._index, self._group = args, base.index, base.group_index
        self._loop, self._context = _running_loop(), contextvars.copy_context()
        self._session_id, self._turns = base.session_id or uuid.uuid4().hex, 0
        self.aborted = False
        self._latest: Sample | None = None

    async def generate(
        self, prompt: list[int], params: dict[str, Any], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        """As of `TurnEngine`."""
        self._turns += 1
        if (seed := params.get("sampling_seed")) is not None:
            params = params | {"sampling_seed": request_seed(seed, self._turns)}
        here = asyncio.get_running_loop()

        def tell(ids: Sequence[int]) -> None:
            assert on_tokens is not None
            here.call_soon_threadsafe(on_tokens, ids)

        sample = Sample(index=self._index, group_index=self._group, tokens=prompt, session_id=self._session_id)
        sample.rollout_routed_experts = self._known_routes(prompt)
        try:
            streams = tell if on_tokens is not None else None
            made = await self._there(lambda: generate(self._args, sample, params, on_tokens=streams))
        except RequestError as error:
            raise SessionError(error.status if error.status == 400 else 503, str(error)) from error
        if made.status is Status.ABORTED:
            self.aborted = True
            raise SessionError(503, "the rollout has enough samples")
        self._latest = made
        ids = made.tokens[len(prompt) :]
        segments = list(zip(made.weight_versions, made.segment_lengths, strict=True))
        counters = made.spec_info.to_dict() | {
            "cached_tokens": made.prefix_cache_info.cached_tokens,
            "prompt_tokens": made.prefix_cache_info.total_prompt_tokens,
        }
        log_probs = list(made.rollout_log_probs or ())
        finish = _FINISH.get(made.status, "stop")
        return Generated(ids, log_probs, finish, segments, counters, made.rollout_routed_experts)

    def _known_routes(self, prompt: Sequence[int]) -> np.ndarray | None:
        """Those of the tokens that a prompt begins with as the latest turn did, so that only the others are asked for:
        experts depend on what was before a token, and on nothing behind it."""
        latest = self._latest
        if latest is None or latest.rollout_routed_experts is None:
            return None
        length = min(len(prompt), len(latest.tokens))
        differs = np.flatnonzero(np.asarray(prompt[:length]) != np.asarray(latest.tokens[:length]))
        return latest.rollout_routed_experts[: int(differs[0]) if differs.size else length]

    async def read_calls(self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """As of `TurnEngine`: an engine has the parsers."""
        runtime = self._context.run(current)
        if runtime is None:
            raise ValueError("there is no engine to ask")
        key = self._args.sglang_router_api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}

        async def ask() -> Any:
            for url in runtime.engines.urls:
                with contextlib.suppress(RequestError):
                    path = f"{url}/parse_function_call"
                    return await runtime.http.request("POST", path, body, retries=0, headers=headers)
            return None

        if (reply := await self._there(ask)) is not None:
            return [{"name": call["name"], "input": _object(call["parameters"])} for call in reply["calls"]]
        raise ValueError(f"no engine reads calls by {parser!r}")

    async def _there(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a coroutine gives that runs on the rollout's event loop, in its context; it is cancelled with this."""
        here, there = asyncio.get_running_loop(), self._loop
        if there is None or there is here:
            return await here.create_task(work(), context=self._context.copy())
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = there.create_task(work(), context=self._context.copy())
            tasks.append(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            if done.cancelled():
                return
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        there.call_soon_threadsafe(start)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise


def _object(parameters: Any) -> Any:
    return json.loads(parameters) if isinstance(parameters, str) else parameters


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
