"""Sessions: who may ask, how much, and what became of it. One turn is prompt, generation, reading, memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slime.agent.memory import Prompt, TokenMemory
from slime.agent.parsing import (
    MARKERS,
    TAGS,
    THINK,
    Call,
    Delta,
    ParsedModelOutput,
    Splitter,
    overlap,
    parsed,
    tagged_calls,
    well_formed,
)
from slime.agent.rendering import TurnRenderer
from slime.agent.trajectory import TurnRecord
from slime.data import Sample
from slime.data.rows.messages import Messages, RowError
from slime.observability.trace import around, span

logger = logging.getLogger(__name__)

_OPENING_TOKENS = 8
"""At a prompt's end, in which it may have begun the model's thoughts."""
_UNFINISHED = "\ufffd"
_MAX_NEW_TOKENS = 4096
CLIENTS = ("stop",)
"""Sampling parameters that a client may set: others decide how likely each token was, as which it is trained."""


class SessionError(Exception):
    """Why a turn is refused; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Generated:
    """What an engine made of a prompt; ``segments``, ``meta_info`` and ``routes`` as of `TurnRecord`."""

    ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    segments: Sequence[tuple[str, int]] = ()
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    routes: np.ndarray | None = None


class TurnEngine(Protocol):
    """Generates."""

    async def generate(
        self, prompt: list[int], params: dict[str, Any], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        """Answer a prompt, by SGLang's sampling parameters; ``on_tokens`` is given new ones as they are made, on the
        caller's event loop. SessionError where that is not to be."""

    async def read_calls(self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """The tool calls in a text, by one of SGLang's parsers; ValueError where they cannot be read."""


@dataclass(frozen=True)
class Budget:
    """What a session may take; 0 is no bound.

    Attributes:
        turns: answers.
        tokens: that are generated.
        context: of a prompt and its answer.
        seconds: since it was opened.
    """

    turns: int = 0
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TurnRequest:
    """One turn that is asked for, whatever API it was written for.

    Attributes:
        messages: in OpenAI's form.
        tools: likewise.
        params: SGLang's sampling parameters, of those that the client sets.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TurnReply:
    """An answer.

    Attributes:
        message: in OpenAI's form, as the session remembers it.
        finish: ``stop``, ``length`` or ``tool_calls``.
        cached: prompt tokens of which the engine had keys and values.
        stop: the client's stop string that ended it; it is no part of the message, and its tokens are trained.
    """

    message: dict[str, Any]
    finish: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: int = 0
    stop: str | None = None


class Session:
    """One agent's conversations with the model."""

    def __init__(
        self,
        engine: TurnEngine,
        renderer: TurnRenderer,
        *,
        parser: str | None = TAGS,
        params: Mapping[str, Any] | None = None,
        clients: Collection[str] = CLIENTS,
        budget: Budget = Budget(),
        on_turn: Callable[[TurnRequest, dict[str, Any], TurnRecord], None] | None = None,
    ) -> None:
        """``parser`` is that of tool calls, by SGLang's name or `TAGS`; ``params`` are SGLang's sampling parameters, of
        which the client may set those that ``clients`` names, and ask for fewer than ``max_new_tokens``; ``on_turn`` is
        told of each turn what was asked, the message that answers it, and its tokens."""
        self.memory = TokenMemory(renderer)
        self._engine, self._parser, self._budget = engine, parser, budget
        self._params = dict(params or {})
        if self._params.get("max_new_tokens") is None:
            self._params["max_new_tokens"] = budget.context or _MAX_NEW_TOKENS
        self._clients, self._on_turn = frozenset(clients), on_turn
        self._opened, self._tokens, self._begun = time.monotonic(), 0, 0
        self._turns: set[asyncio.Task[Any]] = set()
        self._around = around()
        self.closed = False

    async def turn(self, request: TurnRequest, on_delta: Callable[[Delta], None] | None = None) -> TurnReply:
        """Answer; ``on_delta`` is given words and thoughts as they come. SessionError where the session may not go on,
        or the request cannot be answered. Who is cancelled has had no turn."""
        self._check()
        self._begun += 1
        task = asyncio.current_task()
        assert task is not None
        self._turns.add(task)
        try:
            # The gateway's tasks are not within the sample whose session it is.
            with span("agent/turn", within=self._around):
                return await self._turn(request, on_delta)
        except BaseException:
            self._begun -= 1
            raise
        finally:
            self._turns.discard(task)

    async def _turn(self, request: TurnRequest, on_delta: Callable[[Delta], None] | None) -> TurnReply:
        try:
            prompt = self.memory.prompt(request.messages, request.tools)
        except RowError as error:
            raise SessionError(400, str(error)) from error
        params = self._params_of(request, len(prompt.ids))
        if params is None:  # as an engine's answer of no tokens
            return self._reply(prompt, request, Generated((), (), "length"), {"role": "assistant", "content": ""})
        asked = request.params.get("stop") if "stop" in self._clients else None
        stops = [asked] if isinstance(asked, str) else asked or []
        text = _Text(self.memory.renderer, self._splitter(prompt, request), stops, on_delta)
        made = await self._engine.generate(prompt.ids, params, text.add if on_delta else None)
        self._tokens += len(made.ids)
        result = await self._read(text, made, request)
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_uses:
            turn = [*prompt.ids, *made.ids]
            message["tool_calls"] = [_as_openai(call, turn, i) for i, call in enumerate(result.tool_uses)]
        reply = self._reply(prompt, request, made, message, ill_formed=result.ill_formed)
        reply.stop = text.stop
        return reply

    def _splitter(self, prompt: Prompt, request: TurnRequest) -> Splitter:
        opening = self.memory.renderer.decode(prompt.ids[-_OPENING_TOKENS:])
        if request.tools and not self._parser:
            _warn_unread()
        marker = MARKERS.get(self._parser, "") if request.tools and self._parser else None
        return Splitter(opened=opening.rstrip().endswith(THINK), marker=marker)

    async def _read(self, text: _Text, made: Generated, request: TurnRequest) -> ParsedModelOutput:
        splitter = text.finish(made)
        if not splitter.calls:
            return parsed(splitter, lambda calls: [])
        tools, parser = request.tools or [], self._parser
        assert parser is not None
        if MARKERS.get(parser) == MARKERS[TAGS]:
            result = parsed(splitter, lambda calls: tagged_calls(calls, tools))
        else:
            found: list[Call] = []
            with contextlib.suppress(ValueError):
                found = await self._engine.read_calls(parser, splitter.calls, tools)
            result = parsed(splitter, lambda calls: found)
            result.ill_formed = not found and bool(MARKERS.get(parser))
        text.tell(result.text)
        return result

    def _reply(
        self, prompt: Prompt, request: TurnRequest, made: Generated, message: dict[str, Any], ill_formed: bool = False
    ) -> TurnReply:
        fields = (prompt.ids, list(made.ids), made.finish_reason, list(made.log_probs), ill_formed, made.segments)
        record = TurnRecord(*fields, meta_info=made.meta_info, routes=made.routes)
        self.memory.record(prompt, record, message)
        if self._on_turn is not None:
            self._on_turn(request, message, record)
        finish = "length" if made.finish_reason == "length" else "tool_calls" if message.get("tool_calls") else "stop"
        cached = int(made.meta_info.get("cached_tokens") or 0)
        return TurnReply(message, finish, len(prompt.ids), len(made.ids), cached)

    def _check(self) -> None:
        budget, seconds = self._budget, time.monotonic() - self._opened
        if self.closed:
            raise SessionError(503, "the session is closed")
        for used, bound, what in (
            (self._begun, budget.turns, "turns"),
            (self._tokens, budget.tokens, "tokens"),
            (seconds, budget.seconds, "seconds"),
        ):
            if bound and used >= bound:
                raise SessionError(429, f"the session has had its {bound:g} {what}")

    def _params_of(self, request: TurnRequest, prompt_tokens: int) -> dict[str, Any] | None:
        """What the engine is asked for; None where there is no room for an answer."""
        params = self._params | {name: value for name, value in request.params.items() if name in self._clients}
        bounds = [self._params["max_new_tokens"], request.params.get("max_new_tokens", self._params["max_new_tokens"])]
        if self._budget.context:
            bounds.append(self._budget.context - prompt_tokens)
        if self._budget.tokens:
            bounds.append(self._budget.tokens - self._tokens)
        params["max_new_tokens"] = min(bounds)
        return params if params["max_new_tokens"] > 0 else None

    async def close(self, wait: float = 0.0) -> None:
        """Take no more turns, and end those under way if they have not within ``wait`` seconds."""
        self.closed = True
        if self._turns and wait:
            await asyncio.wait(self._turns, timeout=wait)
        for turn in self._turns:
            turn.cancel()

    def samples(self, base: Sample, reward: float | dict[str, Any] | None = None) -> list[Sample]:
        """What it is trained on (`Trajectory.samples`), with its figures in ``metadata["agent"]`` of the first."""
        decode = self.memory.renderer.decode
        made = self.memory.trajectory.samples(base, reward, decode=decode, max_tokens=self._budget.context)
        if made:
            made[0].metadata["agent"] = self.figures()
        return made

    def figures(self) -> dict[str, float]:
        """Turns, forks and what rendering took."""
        counters = self.memory.counters
        return {name: float(value) for name, value in vars(counters).items()}


class _Text:
    """The text of a turn, as its tokens come."""

    def __init__(
        self,
        renderer: TurnRenderer,
        splitter: Splitter,
        stops: Sequence[str],
        on_delta: Callable[[Delta], None] | None,
    ) -> None:
        self._renderer, self._splitter, self._stops, self._on_delta = renderer, splitter, stops, on_delta
        self._held = ""
        """Text that is, or may become, a stop string and what is behind it."""
        self.stop: str | None = None
        self._ids: list[int] = []
        self._read, self._told = 0, 0
        """Tokens of which the text was read; the tokens before these of which it was read with them."""

    def add(self, ids: Sequence[int]) -> None:
        """Take new tokens, and tell what is clear of them: the last one may end the turn, or be half a character."""
        self._ids += ids
        self._feed(self._new_text(len(self._ids) - 1))

    def finish(self, made: Generated) -> Splitter:
        """Take all tokens of the turn, but for the one that ends it."""
        self._ids = list(made.ids)
        end = len(self._ids)
        stopped = made.finish_reason == "stop"
        if stopped and end and self._renderer.is_special(self._ids[-1]):
            end, stopped = end - 1, False
        self._feed(self._new_text(end, last=True))
        self.stop, at = _first(self._stops, self._held) if stopped else (None, len(self._held))
        self._tell(self._splitter.feed(self._held[:at]))
        self._tell(self._splitter.finish())
        return self._splitter

    def _feed(self, text: str) -> None:
        """Have text split, but for what may be the stop string that ends the turn."""
        self._held += text
        _, ready = _first(self._stops, self._held)
        ready = min([ready, *(len(self._held) - overlap(self._held, stop) for stop in self._stops)])
        self._tell(self._splitter.feed(self._held[:ready]))
        self._held = self._held[ready:]

    def tell(self, content: str) -> None:
        """Tell what of the whole content was not told: a tool call that cannot be read."""
        if rest := content[len(self._splitter.content) :]:
            self._tell([("content", rest)])

    def _tell(self, deltas: list[Delta]) -> None:
        if self._on_delta is not None:
            for delta in deltas:
                self._on_delta(delta)

    def _new_text(self, end: int, *, last: bool = False) -> str:
        # Decoded with some tokens before it: what a token is may depend on those.
        decode, before = self._renderer.decode, self._ids[self._told : self._read]
        text = decode(self._ids[self._told : max(end, self._read)])
        if text.endswith(_UNFINISHED) and not last:
            return ""
        new = text[len(decode(before)) :]
        self._told, self._read = self._read, max(end, self._read)
        return new


def _first(stops: Sequence[str], text: str) -> tuple[str | None, int]:
    """The stop string that comes first in a text, and where; None and the text's length where there is none."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), None))
    return stop, at


@functools.cache
def _warn_unread() -> None:
    logger.warning(
        "tools are given, but the chat template does not tell how its model calls them: every answer is read as words. "
        "Name the parser of its calls: --sglang-tool-call-parser, or an adapter's tool_parser"
    )


def _as_openai(call: Call, turn: Sequence[int], number: int) -> dict[str, Any]:
    """The ``number``-th call of a turn, whose tokens are ``turn``, the prompt's included. Its id follows from these:
    some templates render it, and with equal seeds agents have the same prompts."""
    arguments = well_formed(json.dumps(call["input"], ensure_ascii=False))
    function = {"name": well_formed(call["name"]), "arguments": arguments}
    digest = hashlib.blake2b(np.asarray([number, *turn], dtype=np.int64).tobytes(), digest_size=12)
    return {"id": f"call_{digest.hexdigest()}", "type": "function", "function": function}
