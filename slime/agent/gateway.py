"""The agents' way in: an HTTP server with the APIs that agents speak, each session under a key of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slime.agent.adapters.anthropic_messages import AnthropicMessages
from slime.agent.adapters.api import Api, Event, Reply
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses
from slime.agent.parsing import Delta, well_formed
from slime.agent.session import Session, SessionError, TurnReply, TurnRequest
from slime.utils.redaction import SESSION_KEY

logger = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
"""Of a request's body."""
_MODEL = "slime"
_IN_PATH = "/sessions/{session}"
"""Before an API's path, for clients whose key cannot be chosen."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ROLES = ("system", "user", "assistant", "tool")
"""Of messages, in OpenAI's form. A turn of a misspelt assistant would be none of the model's, and its path a fork."""
_FINAL = {"x-should-retry": "false"}
"""OpenAI's and Anthropic's clients try again after 429 and 5xx: what is refused here was tried already, or is spent."""
_ANTHROPIC = AnthropicMessages()
APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), _ANTHROPIC)


class Gateway:
    """Sessions by their keys, and the application that serves them.

    A key is made by `open_session`, and cannot be guessed unless the caller chose it; requests bring it as a bearer
    token, as ``X-Api-Key``, or in the path. Without one of a session that is open they get 401.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._stores: dict[str, dict[str, Any]] = {}

    def open_session(self, session: Session, key: str = "") -> str:
        """Its key from now on: ``key``, or one made at random. ValueError where a session of that is open."""
        key = key or f"{SESSION_KEY}{secrets.token_urlsafe(24)}"
        if key in self._sessions:
            raise ValueError("a session of this id is open: each has an id of its own")
        self._sessions[key], self._stores[key] = session, {}
        return key

    async def close_session(self, key: str, wait: float = 0.0) -> Session | None:
        """Have it refused from now on; turns under way may end within ``wait`` seconds. The session, if it was open."""
        session = self._sessions.pop(key, None)
        self._stores.pop(key, None)
        if session is not None:
            await session.close(wait)
        return session

    def app(self) -> web.Application:
        """The application. Run it with ``handler_cancellation``, so that a client that goes away ends its turn."""
        app = web.Application(client_max_size=_MOST_BYTES)
        for before in ("", _IN_PATH):
            for api in APIS:
                app.router.add_post(before + api.path, self._turn_of(api))
            app.router.add_post(f"{before}{_ANTHROPIC.path}/count_tokens", self._count_tokens)
            app.router.add_get(f"{before}/v1/models", self._models)
        for path in ("/healthz", "/"):  # Claude Code asks for the second before its first turn
            app.router.add_get(path, _health)
        app.router.add_route("*", "/{path:.*}", _nothing)
        return app

    # ---- who asks

    def _session_of(self, request: web.Request) -> tuple[Session, dict[str, Any]]:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        keys = (
            request.match_info.get("session"),
            bearer.strip() if scheme.lower() == "bearer" else None,
            request.headers.get("X-Api-Key"),
        )
        for key in keys:
            if key in self._sessions:
                assert key is not None
                return self._sessions[key], self._stores[key]
        raise SessionError(401, "no session of this key is open: use base_url as it was given, or session.key")

    # ---- what is asked

    def _turn_of(self, api: Api) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session, store = self._session_of(request)
                body = await _body_of(request)
                turn, reply = _read(api, body, store)
                if body.get("stream"):
                    return await self._stream(request, api, session, turn, reply)
                return web.json_response(reply.whole(await session.turn(turn)))
            except Exception as error:
                return _refusal(api, error)

        return handle

    async def _stream(
        self, request: web.Request, api: Api, session: Session, turn: Any, reply: Reply
    ) -> web.StreamResponse:
        queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.create_task(session.turn(turn, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            first = await queue.get()
            if first is None:
                await task  # nothing was sent: a refusal has a status of its own
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await _send(response, reply.begin())
            delta = first
            while delta is not None:
                await _send(response, reply.delta(delta))
                delta = await queue.get()
            await _send(response, _last(api, reply, task))
            return response
        finally:
            # A client that went away has had no turn.
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def _count_tokens(self, request: web.Request) -> web.Response:
        try:
            session, store = self._session_of(request)
            turn, _ = _read(_ANTHROPIC, await _body_of(request), store)
            return web.json_response({"input_tokens": len(session.memory.prompt(turn.messages, turn.tools).ids)})
        except Exception as error:
            return _refusal(_ANTHROPIC, error)

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session_of(request)
        except SessionError as error:
            return _refusal(APIS[0], error)
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "slime"}
        return web.json_response({"object": "list", "data": [model]})


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def _nothing(request: web.Request) -> web.Response:
    """A path that is none of the above: as a rule, of a client whose address has one ``/v1`` too few or too many."""
    paths = ", ".join(api.path for api in APIS)
    words = f"{request.method} of this path is not served, POST of {paths} is"
    hint = "OpenAI's clients take a base_url that ends in /v1 (base_url), Anthropic's one without it (session.url)"
    return _refusal(APIS[0], SessionError(404, f"{words}: {hint}"))


async def _body_of(request: web.Request) -> dict[str, Any]:
    try:
        text = await request.text()
        body = json.loads(text)
        if _SURROGATE.search(text):
            body = json.loads(well_formed(json.dumps(body, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise SessionError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise SessionError(400, "the body is not a JSON object")
    return body


def _read(api: Api, body: dict[str, Any], store: dict[str, Any]) -> tuple[TurnRequest, Reply]:
    """What a body asks for, and what its reply is written with."""
    try:
        turn = api.request(body, store)
        for number, message in enumerate(turn.messages):
            if isinstance(role := message.get("role"), str) and role not in _ROLES:
                raise SessionError(400, f"message {number} is of the role {role!r:.80}, which the API does not have")
        return turn, api.reply(body, turn, store)
    except (AttributeError, LookupError, TypeError) as error:
        raise SessionError(400, f"a part of the body is not what {api.path} takes there: {error}") from error


def _refusal(api: Api, error: Exception) -> web.Response:
    status, words = _told(error)
    return web.json_response(api.error(status, words), status=status, headers=_FINAL)


def _told(error: BaseException) -> tuple[int, str]:
    """Status and words for what went wrong."""
    if isinstance(error, SessionError):
        return error.status, str(error)
    if isinstance(error, asyncio.CancelledError):
        return 503, "the session is closed"
    if isinstance(error, web.HTTPException):  # aiohttp's, of a body that is too large
        return error.status, error.reason
    if isinstance(error, ValueError):
        return 400, str(error)
    logger.error("a turn has failed", exc_info=error)
    return 500, f"the turn has failed: {error!r:.300}"


def _last(api: Api, reply: Reply, task: asyncio.Task[TurnReply]) -> list[Event]:
    try:
        return reply.end(task.result())
    except (Exception, asyncio.CancelledError) as error:
        status, words = _told(error)
        return reply.fail(status, api.error(status, words))


async def _send(response: web.StreamResponse, events: list[Event]) -> None:
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        await response.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())
