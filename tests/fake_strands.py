"""A package of strands-agents' names for hosts without it: an agent's loop over OpenAI's chat API, not streamed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import openai


class MaxTokensReachedException(Exception):
    """As strands': an answer was cut."""


class ContextWindowOverflowException(Exception):
    """As strands'."""


class OpenAIModel:
    """As strands'."""

    def __init__(self, *, client_args: dict[str, Any], model_id: str) -> None:
        self.client_args, self.model_id = client_args, model_id


class Agent:
    """As strands', of what the example uses."""

    def __init__(self, *, model: OpenAIModel, tools: list[Callable[..., Any]], system_prompt: str, **_: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self._model, self._tools, self._system = model, {tool.__name__: tool for tool in tools}, system_prompt

    async def invoke_async(self, prompt: str, limits: dict[str, int]) -> Any:
        """Go on until an answer calls no tool, or the limit of turns."""
        said: list[Any] = [{"role": "system", "content": self._system}, {"role": "user", "content": prompt}]
        self.messages.append({"role": "user", "content": [{"text": prompt}]})
        async with openai.AsyncOpenAI(**self._model.client_args) as client:
            for _ in range(limits["turns"]):
                reply = await client.chat.completions.create(
                    model=self._model.model_id, messages=said, tools=[_described(tool) for tool in self._tools.values()]
                )
                message = reply.choices[0].message
                said.append(message.model_dump(exclude_none=True))
                uses = [{"toolUse": call.function.name} for call in message.tool_calls or ()]
                self.messages.append({"role": "assistant", "content": [{"text": message.content or ""}, *uses]})
                if reply.choices[0].finish_reason == "length":
                    raise MaxTokensReachedException
                if not uses:
                    return SimpleNamespace(stop_reason="end_turn")
                for call in message.tool_calls or ():
                    try:
                        result = await self._tools[call.function.name](**json.loads(call.function.arguments))
                    except Exception as error:
                        result = f"Error: {error}"
                    said.append({"role": "tool", "tool_call_id": call.id, "content": result})
                self.messages.append({"role": "user", "content": [{"toolResult": {}} for _ in uses]})
        return SimpleNamespace(stop_reason="limit_turns")


def _described(tool: Callable[..., Any]) -> Any:
    names = list(inspect.signature(tool).parameters)
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    return {"type": "function", "function": {"name": tool.__name__, "parameters": schema}}


def modules() -> dict[str, ModuleType]:
    """By the names under which they are imported."""
    contents: dict[str, dict[str, Any]] = {
        "strands": {"Agent": Agent, "tool": lambda function: function},
        "strands.agent": {},
        "strands.agent.conversation_manager": {"NullConversationManager": SimpleNamespace},
        "strands.models": {},
        "strands.models.openai": {"OpenAIModel": OpenAIModel},
        "strands.types": {},
        "strands.types.exceptions": {
            "MaxTokensReachedException": MaxTokensReachedException,
            "ContextWindowOverflowException": ContextWindowOverflowException,
        },
    }
    made = {name: ModuleType(name) for name in contents}
    for name, values in contents.items():
        vars(made[name]).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return made
