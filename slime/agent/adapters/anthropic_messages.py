"""Anthropic's Messages: requests, replies and events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from slime.agent.adapters.api import Api, Event, Reply, not_text, only_functions, reminder, sampling_of
from slime.agent.parsing import Delta
from slime.agent.session import TurnReply, TurnRequest
from slime.data.rows.messages import Messages

_PARAMS = {"max_tokens": "max_new_tokens", "stop_sequences": "stop"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages(Api):
    """``POST /v1/messages``."""

    path = "/v1/messages"

    def request(self, body: Mapping[str, Any], store: MutableMapping[str, Any]) -> TurnRequest:
        """ValueError for what no turn can be made of."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("messages is not a list of objects")
        system = _text(body.get("system") or "", "system")
        made: Messages = [{"role": "system", "content": system}] if system else []
        for message in messages:
            made += _messages(message)
        choice = body.get("tool_choice") or {}
        kind = str(choice.get("type") or "auto")
        chosen = {"any": "required", "tool": "function"}.get(kind, kind)
        tools = only_functions({"tool_choice": chosen}, [_tool(tool) for tool in body.get("tools") or ()])
        return TurnRequest(made, tools, sampling_of(body, _PARAMS))

    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": message}}

    def reply(self, body: Mapping[str, Any], turn: TurnRequest, store: MutableMapping[str, Any]) -> Reply:
        """What a reply to a request is written with."""
        return _Reply(body)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise ValueError(f"tools: only the client's own are served, not {tool!r:.80}")
    named = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": named | {"parameters": tool.get("input_schema") or {}}}


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in OpenAI's form: one for each tool result, then one of the words."""
    content, role = message.get("content"), message.get("role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant", "system") or not isinstance(blocks, list):
        raise ValueError(f"a message needs a role, user or assistant, and a content, not {message!r:.80}")
    words, thoughts, calls = [], [], []
    # What a tool has read, such as a PDF, may stand beside its result.
    has_result = any(isinstance(block, Mapping) and block.get("type") == "tool_result" for block in blocks)
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            words.append(str(block.get("text", "")))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": _told(block.get("content"))}
        elif kind in ("image", "document") and has_result:
            words.append(not_text(block))
        elif kind != "redacted_thinking":
            raise ValueError(f"a block of type {kind!r} in a message of the {role} is not served: only text is")
    text = "".join(words) if role == "assistant" else "\n".join(words)
    if role == "system":  # Claude Code's, in mid conversation
        role, text = "user", reminder(text)
    said: dict[str, Any] = {"role": role, "content": text}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if words or calls or role != "user":
        yield said


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(block, Mapping) and block.get("type") == "text" for block in content
    ):
        raise ValueError(f"{what} is not text: only text is served")
    return "\n".join(str(block.get("text", "")) for block in content)


def _told(content: Any) -> str:
    """A tool's result; `_text` of it, with a word for each block that is none."""
    if not isinstance(content, list):
        return _text(content or "", "a tool result")
    return "\n".join(
        str(block.get("text", "")) if isinstance(block, Mapping) and block.get("type") == "text" else not_text(block)
        for block in content
    )


class _Reply(Reply):
    def __init__(self, body: Mapping[str, Any]) -> None:
        self._id, self._model = f"msg_{secrets.token_hex(12)}", str(body.get("model") or "slime")
        self._open = ""
        """The kind of the block that is being written."""
        self._index = -1

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        message, blocks = reply.message, []
        if thoughts := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        blocks += [_use(call, json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
        return self._message() | {"content": blocks} | _ended(reply) | {"usage": _usage(reply)}

    def begin(self) -> list[Event]:
        return [_event("message_start", message=self._message())]

    def delta(self, delta: Delta) -> list[Event]:
        part, text = delta
        if part == "reasoning":
            block, change = {"type": "thinking", "thinking": "", "signature": ""}, ("thinking_delta", "thinking")
        else:
            block, change = {"type": "text", "text": ""}, ("text_delta", "text")
        events = [] if self._open == part else [*self._close(), self._start(part, block)]
        kind, name = change
        return [*events, _event("content_block_delta", index=self._index, delta={"type": kind, name: text})]

    def end(self, reply: TurnReply) -> list[Event]:
        events = self._close()
        for call in reply.message.get("tool_calls", ()):
            events.append(self._start("call", _use(call, {})))
            change = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events.append(_event("content_block_delta", index=self._index, delta=change))
            events += self._close()
        return [*events, _event("message_delta", delta=_ended(reply), usage=_usage(reply)), _event("message_stop")]

    def _start(self, part: str, block: dict[str, Any]) -> Event:
        self._open, self._index = part, self._index + 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> list[Event]:
        was_open, self._open = self._open, ""
        return [_event("content_block_stop", index=self._index)] if was_open else []

    def _message(self) -> dict[str, Any]:
        named = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": []}
        return named | {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}


def _event(kind: str, **values: Any) -> Event:
    return kind, {"type": kind, **values}


def _use(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _ended(reply: TurnReply) -> dict[str, Any]:
    by_sequence = reply.finish == "stop" and reply.stop is not None
    return {"stop_reason": "stop_sequence" if by_sequence else _STOP[reply.finish], "stop_sequence": reply.stop}


def _usage(reply: TurnReply) -> dict[str, int]:
    """Anthropic counts tokens that were read from a cache apart."""
    fresh = {"input_tokens": reply.prompt_tokens - reply.cached, "output_tokens": reply.output_tokens}
    return fresh | {"cache_read_input_tokens": reply.cached, "cache_creation_input_tokens": 0}
