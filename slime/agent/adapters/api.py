"""What an API is to the gateway: how its requests are read, and its replies written, at once or as they are made."""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from slime.agent.parsing import Delta
from slime.agent.session import TurnReply, TurnRequest

logger = logging.getLogger(__name__)

Event = tuple[str | None, Any]
"""A server-sent event: its name, if it has one, and its data, JSON or text."""
_SAME = ("temperature", "top_p", "top_k", "stop", "presence_penalty", "frequency_penalty")


class Reply(abc.ABC):
    """One reply, written as its API has it."""

    @abc.abstractmethod
    def whole(self, reply: TurnReply) -> dict[str, Any]:
        """Of a request that is not streamed."""

    @abc.abstractmethod
    def begin(self) -> list[Event]:
        """Before the first token."""

    @abc.abstractmethod
    def delta(self, delta: Delta) -> list[Event]:
        """New words or thoughts."""

    @abc.abstractmethod
    def end(self, reply: TurnReply) -> list[Event]:
        """When all is made: tool calls, why it ended, and counts."""

    def fail(self, status: int, error: Mapping[str, Any]) -> list[Event]:
        """When it has begun and cannot be made to its end; ``error`` is the API's body of that, ``status`` the one that
        it would have had before."""
        return [("error", error)]


class Api(abc.ABC):
    """One API's way to ask for a turn."""

    path: str

    @abc.abstractmethod
    def request(self, body: Mapping[str, Any], store: MutableMapping[str, Any]) -> TurnRequest:
        """What a body asks for; ValueError for what no turn can be made of. ``store`` is what the API keeps with the
        session."""

    @abc.abstractmethod
    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""

    @abc.abstractmethod
    def reply(self, body: Mapping[str, Any], turn: TurnRequest, store: MutableMapping[str, Any]) -> Reply:
        """What the reply to a body is written with, of which `request` has made ``turn``."""


def sampling_of(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """SGLang's sampling parameters of a body; ``names`` are those that the API calls something else, the one that
    counts first. ValueError for a bound that is no positive number of tokens, and a stop string that is none."""
    params = {name: body[name] for name in _SAME if body.get(name) is not None}
    for theirs, ours in names.items():
        if body.get(theirs) is not None:
            params.setdefault(ours, body[theirs])
    stop = params.get("stop", "x")
    stops = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(each, str) and each for each in stops):
        raise ValueError(f"a stop string must be text, and not empty: {stop!r:.80}")
    bound = params.get("max_new_tokens", 1)
    if not isinstance(bound, int) or bound < 1:
        raise ValueError(f"the bound on new tokens must be a positive integer, not {bound!r:.80}")
    return params


def text_only(body: Mapping[str, Any], choices: str | None = None) -> None:
    """Raise ValueError for what would change how likely tokens are, or is no text."""
    if choices is not None and body.get(choices) not in (None, 1):
        raise ValueError(f"{choices} must be 1: ask again for another answer")
    wanted = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if wanted.get("type") not in (None, "text"):
        raise ValueError(
            f"responses of type {wanted['type']!r} are not served: a grammar would change the probabilities of the "
            "tokens that are trained"
        )


def reminder(text: str) -> str:
    """What agents' programs say as the system in mid conversation, where templates may have none, as the user's."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


@functools.lru_cache(maxsize=256)
def warn_left_out(what: str) -> None:
    """Say once that something that agents' programs send is not shown to the model."""
    logger.warning("%s is left out of the model's prompts: the gateway serves functions and text", what)


def not_text(part: Any) -> str:
    """What the model reads in place of a part of a tool's result that is none of text. An agent that looks at an image
    goes on, as it would not if the whole turn were refused."""
    kind = str(part.get("type") if isinstance(part, Mapping) else type(part).__name__)[:80]
    warn_left_out(f"a part of type {kind!r} in a tool's result")
    return f"[{kind} left out: only text can be read]"


def only_functions(body: Mapping[str, Any], tools: Any) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form, None where there are none, or none are to be called. ValueError for what is no function,
    and where one has to be called."""
    choice = body.get("tool_choice") or "auto"
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in ("auto", "none"):
        raise ValueError(
            f"tool_choice {kind!r} is not served, 'auto' and 'none' are: to force a call would change the "
            "probabilities of the tokens that are trained"
        )
    if not tools or kind == "none":
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance((tool.get("function") or {}).get("name"), str) for tool in tools
    ):
        raise ValueError("tools is not a list of functions, each with a name")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        _check_function(tool["function"], number, names)
    return [{"type": "function", "function": tool["function"]} for tool in tools]


def _check_function(function: Mapping[str, Any], number: int, names: set[str]) -> None:
    """ValueError for what templates render as nothing, or as something else than was meant; its name is added."""
    name, parameters = function["name"], function.get("parameters")
    where = f"tool {number} ({name:.80})"
    if not name.strip():
        raise ValueError(f"tool {number} has an empty name")
    if name in names:
        raise ValueError(f"{where}: another tool has this name, and a call could be of either")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"{where}: its parameters must be a JSON schema, an object, not {parameters!r:.80}")
    properties = (parameters or {}).get("properties") or {}
    if not isinstance(properties, Mapping) or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        told = f"{properties!r:.80}"
        raise ValueError(f"{where}: properties of its parameters must be an object of JSON schemas, not {told}")
    names.add(name)
