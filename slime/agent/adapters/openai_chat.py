"""OpenAI's Chat Completions: requests, replies and chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from slime.agent.adapters.api import Api, Event, Reply, only_functions, sampling_of, text_only
from slime.agent.parsing import Delta
from slime.agent.session import TurnReply, TurnRequest

_PARAMS = {"max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens"}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
_ROLES = {"developer": "system", "function": "tool"}


class ChatCompletions(Api):
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"

    def request(self, body: Mapping[str, Any], store: MutableMapping[str, Any]) -> TurnRequest:
        """ValueError for what no turn can be made of."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("messages is not a list of objects")
        text_only(body, choices="n")
        for message in messages:
            message["role"] = _ROLES.get(str(message.get("role")), message.get("role"))
            _check_calls(message.get("tool_calls") or [])
        return TurnRequest(messages, only_functions(body, body.get("tools")), sampling_of(body, _PARAMS))

    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        kind = _TYPES.get(status, "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def reply(self, body: Mapping[str, Any], turn: TurnRequest, store: MutableMapping[str, Any]) -> Reply:
        """What a reply to a request is written with."""
        return _Reply(body)


def _check_calls(calls: Any) -> None:
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    ):
        raise ValueError(f"tool_calls of a message is not a list of calls, but {calls!r:.80}")


class _Reply(Reply):
    def __init__(self, body: Mapping[str, Any]) -> None:
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._model = str(body.get("model") or "slime")
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        message = {"content": None, "refusal": None, **reply.message}
        message["content"] = message["content"] or (None if message.get("tool_calls") else "")
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        return self._body("chat.completion", [choice]) | {"usage": usage_of(reply)}

    def begin(self) -> list[Event]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, delta: Delta) -> list[Event]:
        part, text = delta
        return [self._chunk({"reasoning_content" if part == "reasoning" else "content": text})]

    def end(self, reply: TurnReply) -> list[Event]:
        calls = [{"index": number, **call} for number, call in enumerate(reply.message.get("tool_calls", ()))]
        events = [self._chunk({"tool_calls": calls})] if calls else []
        events.append(self._chunk({}, finish=reply.finish))
        if self._usage:
            events.append((None, self._body("chat.completion.chunk", []) | {"usage": usage_of(reply)}))
        return [*events, (None, "[DONE]")]

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return None, self._body("chat.completion.chunk", [choice])

    def _body(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }


def usage_of(reply: TurnReply) -> dict[str, Any]:
    """Tokens, as Chat Completions count them."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
    }
