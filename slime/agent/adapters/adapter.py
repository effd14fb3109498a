"""Upstream's adapters: a gateway of one's own, whose sessions have the ids that their opener gives them."""

from __future__ import annotations

import asyncio
import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from slime.agent.gateway import Gateway
from slime.agent.in_rollout import InRollout
from slime.agent.parsing import parser_of
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Budget, Session, TurnRequest
from slime.agent.trajectory import TurnRecord
from slime.data import Sample, Status
from slime.options.flags.sglang import CONSISTENT_HASHING
from slime.rollout.runtime import current
from slime.utils.http_client import Http

logger = logging.getLogger(__name__)

_EVERYBODYS = ("", "default")
"""Ids that clients without a key had upstream."""
_REQUEST_S = 900.0
_CONCURRENCY = 512


@dataclass
class _Opened:
    session: Session
    engine: InRollout


class BaseAdapter:
    """Serves agents as upstream's adapters do, by the gateway: ``app`` has the APIs of all of them.

    A session's id is the key that opens it, so it should be one that nobody guesses. Requests without the id of a
    session that is open get 401: those without any, too.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[..., None] | None = None,
    ) -> None:
        """As upstream's.

        Args:
            tokenizer: of transformers, with a chat template.
            sglang_url: of the router, or of one engine.
            tool_parser: of tool calls, by SGLang's name; None is what the chat template writes.
            reasoning_parser: has no effect: thoughts are what is between ``<think>`` and ``</think>``.
            max_turns_per_sid: answers of one session; further turns get 429.
            fork_threshold_tokens: has no effect: tokens of earlier turns stay as they were, so none are realigned.
            debug_callback: called as ``(sid, messages, tools, reply, turn)`` after each turn.
        """
        self.tokenizer, self.sglang_url = tokenizer, sglang_url.rstrip("/")
        self._renderer = TurnRenderer(tokenizer)
        self._parser = tool_parser or parser_of(tokenizer.get_chat_template())
        self._max_turns, self._callback = max_turns_per_sid, debug_callback
        self._gateway, self._opened = Gateway(), dict[str, _Opened]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app = self._gateway.app()
        self.app.on_startup.append(self._note_loop)

    async def _note_loop(self, app: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Have a session of this id, until it is finished or dropped. In a rollout its turns are requests of that.

        Args:
            sampling_defaults: SGLang's sampling parameters; a client may lower ``max_new_tokens`` and set ``stop``.
            max_context_tokens: of a prompt and its answer; 0 is no bound.

        Raises:
            ValueError: there is one, or the id is one that anybody has.
        """
        if sid in _EVERYBODYS:
            raise ValueError(f"session id {sid!r} is what clients without a key have: take one that nobody guesses")
        engine = InRollout(_options(self.tokenizer, self.sglang_url), Sample(session_id=sid))
        session = Session(
            engine,
            self._renderer,
            parser=self._parser,
            params=sampling_defaults,
            budget=Budget(turns=self._max_turns or 0, context=int(max_context_tokens or 0)),
            on_turn=None if self._callback is None else functools.partial(self._tell, sid),
        )
        self._gateway.open_session(session, sid)
        self._opened[sid] = _Opened(session, engine)

    def _tell(self, sid: str, request: TurnRequest, message: dict[str, Any], turn: TurnRecord) -> None:
        assert self._callback is not None
        try:
            self._callback(sid, request.messages, request.tools, message, turn)
        except Exception:
            logger.exception("debug_callback failed in session %s...", sid[:8])

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further turns, with 503; those under way are ended if they have not within the time, in seconds."""
        if (opened := self._opened.get(sid)) is not None:
            await self._in_app(opened.session.close(wait_timeout))

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session; what is trained of it, one sample a path, each with the whole reward. Nothing of one that is
        not open, or has had no turn. Where the rollout ended a turn, ``base_sample`` with status ABORTED: it is begun
        anew."""
        opened = self._opened.pop(sid, None)
        if opened is None:
            return []
        await self._in_app(self._gateway.close_session(sid, wait_timeout))
        if opened.engine.aborted:
            base_sample.status = Status.ABORTED
            return [base_sample]
        samples = opened.session.samples(base_sample, reward)
        for sample in samples:
            sample.metadata |= extra_metadata or {}
        return [sample for sample in samples if sample.effective_response_length]

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session and forget it."""
        self._opened.pop(sid, None)
        await self._in_app(self._gateway.close_session(sid, wait_timeout))

    async def _in_app(self, work: Coroutine[Any, Any, object]) -> None:
        """Await on the event loop that serves ``app``, whose the turns are."""
        if self._loop is None or self._loop is asyncio.get_running_loop() or not self._loop.is_running():
            await work
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class AnthropicAdapter(BaseAdapter):
    """``/v1/messages`` and ``/v1/messages/count_tokens``, and the APIs of `OpenAIAdapter`."""


class OpenAIAdapter(BaseAdapter):
    """``/v1/chat/completions`` and ``/v1/responses``, and the APIs of `AnthropicAdapter`."""


class ResponsesAdapter(OpenAIAdapter):
    """The same, by the name that is for Codex."""


def _options(tokenizer: Any, url: str) -> Namespace:
    """What requests read of a run's options."""
    parts, runtime = urlsplit(url), current()
    return Namespace(
        hf_checkpoint=tokenizer.name_or_path,
        sglang_router_ip=parts.hostname,
        sglang_router_port=parts.port or 80,
        sglang_router_api_key=_key_of(url),
        router_policy=CONSISTENT_HASHING,  # so that a session's requests have its X-SMG-Routing-Key
        lora_sync=None,
        rollout_max_context_len=None,
        rollout_skip_special_tokens=False,
        request_timeout=_REQUEST_S,
        sglang_server_concurrency=_CONCURRENCY,
        num_engines=1,
        **({"use_rollout_routing_replay": False} if runtime is None else runtime.route_options),
    )


def _key_of(url: str) -> str | None:
    """What opens the router, of a run whose processes know it."""
    runtime = current()
    header = (Http() if runtime is None else runtime.http).authorization(url)
    return header.get("Authorization", "").removeprefix("Bearer ") or None
