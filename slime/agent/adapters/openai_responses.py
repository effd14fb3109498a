"""OpenAI's Responses: requests, replies and events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from slime.agent.adapters.api import (
    Api,
    Event,
    Reply,
    not_text,
    only_functions,
    reminder,
    sampling_of,
    text_only,
    warn_left_out,
)
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.parsing import Delta
from slime.agent.session import TurnReply, TurnRequest
from slime.data.rows.messages import Messages

_PARAMS = {"max_output_tokens": "max_new_tokens"}
_ASKED = ("instructions", "previous_response_id", "temperature", "top_p")
"""What of a request its response repeats."""
_TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Of OpenAI's codes for responses that have failed, by the status that a refusal would have; else ``server_error``."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Responses(Api):
    """``POST /v1/responses``. What ``previous_response_id`` names is kept with the session."""

    path = "/v1/responses"
    error = ChatCompletions.error

    def request(self, body: Mapping[str, Any], store: MutableMapping[str, Any]) -> TurnRequest:
        """ValueError for what no turn can be made of."""
        text_only(body)
        messages = _conversation(body, store)
        if instructions := body.get("instructions"):
            # Those of earlier responses do not count any more.
            messages = [{"role": "system", "content": str(instructions)}, *messages]
        tools = [function for function, *_ in _functions(body.get("tools") or ())]
        return TurnRequest(_one_system(messages), only_functions(body, tools), sampling_of(body, _PARAMS))

    def reply(self, body: Mapping[str, Any], turn: TurnRequest, store: MutableMapping[str, Any]) -> Reply:
        """What a reply to a request is written with."""
        return _Reply(body, store)


def _conversation(body: Mapping[str, Any], store: Mapping[str, Any]) -> Messages:
    """What was said, without instructions."""
    before = body.get("previous_response_id")
    if before is not None and before not in store:
        raise ValueError(f"previous_response_id {before!r:.80}: the session has no such response")
    return [*(store[before] if before is not None else ()), *_merged(_items(body.get("input")))]


def _one_system(messages: Messages) -> Messages:
    """With one system message at most, the first: many templates have no other. Codex sends several for developers, and
    more in mid conversation, which the user then says."""
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    words = "\n\n".join(message["content"] for message in messages[:first])
    begun: Messages = [{"role": "system", "content": words}] if first else []
    return begun + [
        {"role": "user", "content": reminder(message["content"])} if message["role"] == "system" else message
        for message in messages[first:]
    ]


def _functions(tools: Any, namespace: str = "") -> Iterator[tuple[dict[str, Any], Mapping[str, Any], str]]:
    """Of an agent's tools those that the model can call, each as a function, as it was given, and its namespace: a tool
    of plain text (``custom``) is a function of one string. Codex always sends others, such as its search of the web."""
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools is not a list of objects, but {tools!r:.80}")
    for tool in tools:
        kind, name = tool.get("type"), tool.get("name")
        if kind == "namespace":
            yield from _functions(tool.get("tools") or (), str(name))
        elif kind == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            yield {"type": kind, "function": function | {"name": _full(namespace, name)}}, tool, namespace
        elif kind == "custom":
            form = (tool.get("format") or {}).get("definition")
            words = [tool.get("description") or "", f"The input is text of this grammar:\n{form}" if form else ""]
            function = {"name": _full(namespace, name), "description": "\n".join(filter(None, words))}
            yield {"type": "function", "function": function | {"parameters": _TEXT_INPUT}}, tool, namespace
        else:
            warn_left_out(f"a tool of type {tool.get('type')!r:.80}")


def _items(given: Any) -> Iterator[dict[str, Any]]:
    """The messages of an input, one for each item."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise ValueError("input is neither text nor a list of items")
    for item in given:
        kind = item.get("type") or "message"
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            yield {"role": role, "content": _text(item.get("content"))}
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            yield {"role": "assistant", "content": "", "reasoning_content": _text(parts)}
        elif kind == "custom_tool_call":
            yield from _items(
                [item | {"type": "function_call", "arguments": json.dumps({"input": item.get("input") or ""})}]
            )
        elif kind == "function_call":
            function = {
                "name": _full(item.get("namespace"), item.get("name")),
                "arguments": item.get("arguments") or "{}",
            }
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            yield {"role": "tool", "tool_call_id": item.get("call_id", ""), "content": _told(item.get("output"))}
        else:
            raise ValueError(f"an item of type {kind!r} is not served")


def _merged(messages: Iterator[dict[str, Any]]) -> Messages:
    """The assistant's items that follow each other are one turn."""
    made: Messages = []
    for message in messages:
        if not made or message["role"] != "assistant" or made[-1]["role"] != "assistant":
            made.append(message)
            continue
        turn = made[-1]
        turn["content"] += message["content"]
        for name, empty in (("reasoning_content", ""), ("tool_calls", [])):
            if message.get(name):
                turn[name] = turn.get(name, empty) + message[name]
    return made


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") in _TEXTS for part in content
    ):
        raise ValueError(f"only text is served, not {content!r:.80}")
    return "".join(str(part.get("text", "")) for part in content)


def _told(output: Any) -> str:
    """A tool's result; `_text` of it, with a word for each part that is none."""
    if not isinstance(output, list):
        return _text(output)
    return "".join(
        str(part.get("text", "")) if isinstance(part, Mapping) and part.get("type") in _TEXTS else not_text(part)
        for part in output
    )


class _Reply(Reply):
    def __init__(self, body: Mapping[str, Any], store: MutableMapping[str, Any]) -> None:
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._model, self._body, self._store = str(body.get("model") or "slime"), body, store
        named = _functions(body.get("tools") or ())
        self._tools = {function["function"]["name"]: (tool, namespace) for function, tool, namespace in named}
        self._items: list[dict[str, Any]] = []
        self._open, self._text, self._number = "", "", 0

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        message = reply.message
        if thoughts := message.get("reasoning_content"):
            self._items.append(self._item("reasoning", thoughts))
        if message["content"]:
            self._items.append(self._item("content", message["content"]))
        self._items += [self._call(call) for call in message.get("tool_calls", ())]
        return self._done(reply)

    def begin(self) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, delta: Delta) -> list[Event]:
        part, text = delta
        events = [] if self._open == part else [*self._close(), *self._start(part)]
        self._text += text
        kind = "response.reasoning_text.delta" if part == "reasoning" else "response.output_text.delta"
        more: dict[str, Any] = {} if part == "reasoning" else {"logprobs": []}
        return [*events, self._event(kind, **self._place(), delta=text, **more)]

    def end(self, reply: TurnReply) -> list[Event]:
        events = self._close()
        for call in reply.message.get("tool_calls", ()):
            item, number = self._call(call), len(self._items)
            is_text = item["type"] == "custom_tool_call"
            part, kind = ("input", "custom_tool_call_input") if is_text else ("arguments", "function_call_arguments")
            place = {"item_id": item["id"], "output_index": number}
            done = place | {part: item[part]} | ({} if is_text else {"name": item["name"]})
            begun = item | {part: "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", output_index=number, item=begun),
                self._event(f"response.{kind}.delta", **place, delta=item[part]),
                self._event(f"response.{kind}.done", **done),
                self._event("response.output_item.done", output_index=number, item=item),
            ]
            self._items.append(item)
        response = self._done(reply)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, status: int, error: Mapping[str, Any]) -> list[Event]:
        told = {"code": _CODES.get(status, "server_error"), "message": error["error"]["message"]}
        return [self._event("response.failed", response=self._response("failed", error=told))]

    def _start(self, part: str) -> list[Event]:
        self._open, self._text = part, ""
        item = self._item(part, "") | {"content": [], "status": "in_progress"}
        self._item_id = item["id"]
        added = self._event("response.output_item.added", output_index=len(self._items), item=item)
        content = _part(part, "")
        return [added, self._event("response.content_part.added", **self._place(), part=content)]

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        part, place = self._open, self._place()
        kind = "response.reasoning_text.done" if part == "reasoning" else "response.output_text.done"
        more: dict[str, Any] = {} if part == "reasoning" else {"logprobs": []}
        item = self._item(part, self._text) | {"id": self._item_id}
        events = [
            self._event(kind, **place, text=self._text, **more),
            self._event("response.content_part.done", **place, part=_part(part, self._text)),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._open = ""
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    def _item(self, part: str, text: str) -> dict[str, Any]:
        if part == "reasoning":
            return {
                "id": f"rs_{secrets.token_hex(12)}",
                "type": "reasoning",
                "summary": [],
                "content": [_part(part, text)],
                "status": "completed",
            }
        named = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": "completed"}
        return named | {"content": [_part(part, text)]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function, number = call["function"], call["id"].removeprefix("call_")
        tool, namespace = self._tools.get(function["name"], ({"name": function["name"]}, ""))
        named = {"call_id": call["id"], "name": tool["name"]} | ({"namespace": namespace} if namespace else {})
        if tool.get("type") != "custom":
            item = {"id": f"fc_{number}", "type": "function_call", "arguments": function["arguments"]}
        else:
            given = json.loads(function["arguments"]).get("input", "")
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            item = {"id": f"ctc_{number}", "type": "custom_tool_call", "input": text}
        return named | item | {"status": "completed"}

    def _done(self, reply: TurnReply) -> dict[str, Any]:
        if self._body.get("store") is not False:
            self._store[self._id] = [*_conversation(self._body, self._store), reply.message]
        counts = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }
        if reply.finish == "length":
            return self._response("incomplete", usage=counts, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", usage=counts)

    def _response(self, status: str, **values: Any) -> dict[str, Any]:
        named = {"id": self._id, "object": "response", "created_at": self._created, "model": self._model}
        asked = {name: self._body.get(name) for name in _ASKED}
        fixed = {"error": None, "incomplete_details": None, "usage": None, "metadata": self._body.get("metadata") or {}}
        tools = {
            "tools": self._body.get("tools") or [],
            "tool_choice": self._body.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
        }
        return {**named, **asked, **fixed, **tools, "status": status, "output": list(self._items), **values}

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **values}


def _part(part: str, text: str) -> dict[str, Any]:
    if part == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _full(namespace: Any, name: Any) -> Any:
    """A function's name in the model's prompts."""
    return f"{namespace}.{name}" if namespace else name
