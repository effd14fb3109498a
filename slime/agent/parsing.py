"""What a model wrote, as thoughts, words and tool calls: while it is written, and at its end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.arguments import argument, read_json

THINK, THOUGHT = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
TAGS = "tags"
"""The calls of Qwen's and GLM's models, and of Hermes': each between ``<tool_call>`` and ``</tool_call>``."""
_OF_TAGS = ("qwen", "qwen25", "qwen3_coder", "hermes", "glm", "glm45", "glm47", "step3p5")
"""SGLang's names for parsers of such calls, of whichever form within the tags."""
MARKERS: Mapping[str, str] = {
    **dict.fromkeys((TAGS, *_OF_TAGS), CALL),
    "deepseekv3": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "deepseekv31": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "minimax-m2": "<minimax:tool_call>",
}
"""Parser, by SGLang's name -> what its calls begin with. What other parsers may read is kept to the turn's end."""
_SIGNS: tuple[tuple[str, str], ...] = (
    (CALL, TAGS),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseekv31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("ipython", "llama3"),
)
"""What a chat template writes -> the parser of what its model does."""
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

Call = dict[str, Any]
"""``name``, and ``input``, an object."""
Delta = tuple[str, str]
"""What new text is, "reasoning" or "content", and the text."""


@dataclass
class ParsedModelOutput:
    """A turn.

    Attributes:
        reasoning: its thoughts.
        text: what it says.
        tool_uses: the tools that it calls.
        ill_formed: it began a call that cannot be read, which is part of ``text``.
    """

    reasoning: str = ""
    text: str = ""
    tool_uses: list[Call] = field(default_factory=list)
    ill_formed: bool = False


def parser_of(template: str) -> str | None:
    """The parser of the tool calls of the model that has this chat template, by SGLang's name or `TAGS`."""
    if "tool\u2581sep" in template and "```json" in template:
        return "deepseekv3"
    return next((parser for sign, parser in _SIGNS if sign in template), None)


class Splitter:
    """Tells thoughts from words while they come; what may be a tool call is kept back, and what may become a tag."""

    def __init__(self, *, opened: bool, marker: str | None) -> None:
        """``opened``: the prompt has begun the thoughts. ``marker`` is what tool calls begin with: None where there are
        none, empty where anything may be one."""
        self.reasoning, self.content, self.calls = "", "", ""
        """What came so far; ``calls`` from the first marker on."""
        self._part = "reasoning" if opened else "start"
        self._marker, self._held = marker, ""

    def feed(self, text: str) -> list[Delta]:
        """What can be told of new text and what was kept back."""
        self._held += text
        found: list[Delta] = []
        while (step := getattr(self, f"_{self._part}")(found)) is not None:
            self._part = step
        return found

    def finish(self) -> list[Delta]:
        """What is left, at the turn's end."""
        part = "reasoning" if self._part == "reasoning" else "content"
        if self._part == "tools":
            self.calls += self._held
            return []
        if part == "content" and self._marker == "":
            self.calls, self._held = self._held, ""
            return []
        found: list[Delta] = []
        self._give(found, part, self._held)
        self._held = ""
        return found

    def _start(self, found: list[Delta]) -> str | None:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            return "reasoning"
        return None if THINK.startswith(text) else "words"

    def _reasoning(self, found: list[Delta]) -> str | None:
        return "words" if self._upto(found, "reasoning", THOUGHT) else None

    def _words(self, found: list[Delta]) -> str | None:
        if self._marker == "":
            return None
        if self._marker is None:
            self._upto(found, "content", None)
            return None
        if not self._upto(found, "content", self._marker):
            return None
        self._held = self._marker + self._held
        return "tools"

    def _tools(self, found: list[Delta]) -> str | None:
        self.calls, self._held = self.calls + self._held, ""
        return None

    def _upto(self, found: list[Delta], part: str, tag: str | None) -> bool:
        """Give what comes before ``tag``, without white space next to it; whether that has come."""
        if tag is not None and tag in self._held:
            text, _, self._held = self._held.partition(tag)
            self._give(found, part, text.rstrip())
            return True
        kept = 0 if tag is None else overlap(self._held, tag)
        ready = self._held[: len(self._held) - kept].rstrip()
        self._give(found, part, ready)
        self._held = self._held[len(ready) :]
        return False

    def _give(self, found: list[Delta], part: str, text: str) -> None:
        before = getattr(self, part)
        text = text if before else text.lstrip("\n")
        if text:
            found.append((part, text))
            setattr(self, part, before + text)


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of ``tag``."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def well_formed(text: str) -> str:
    """A text whose halves of characters (lone surrogates, as a string of JavaScript cut anywhere has them) are U+FFFD:
    no tokenizer and no UTF-8 takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parsed(splitter: Splitter, read: Callable[[str], list[Call]]) -> ParsedModelOutput:
    """What a splitter has found, with its calls as ``read`` reads them, which raises ValueError where it cannot."""
    result = ParsedModelOutput(splitter.reasoning, splitter.content)
    if splitter.calls:
        try:
            result.tool_uses = read(splitter.calls)
        except ValueError:
            result.ill_formed = True
        if not result.tool_uses:
            result.text += ("\n" if result.text else "") + splitter.calls
    return result


def tagged_calls(text: str, tools: Iterable[Mapping[str, Any]] | None = None) -> list[Call]:
    """The calls in a text of `TAGS`, each a JSON object, or Qwen's or GLM's tags; ValueError where one cannot be read.
    What values of tags are, the tool's schema tells (`argument`)."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}
    calls = []
    for part in text.split(CALL)[1:]:
        body, end, _ = part.partition(CALL_END)
        if not end:
            raise ValueError("a tool call has no end")
        calls.append(_call(body.strip(), schemas))
    return calls


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """A whole turn, by upstream's name and form: thoughts between ``<think>`` and ``</think>`` where there is a
    reasoning parser, calls of `TAGS`. ValueError for another tool parser: engines have those."""
    if reasoning_parser_name is None:
        text, uses, ill_formed = parse_tool_uses(raw_output, tools_schema, tool_parser_name)
        return ParsedModelOutput("", text.strip(), uses, ill_formed)
    splitter = Splitter(opened=THOUGHT in raw_output and THINK not in raw_output, marker=None)
    splitter.feed(raw_output)
    splitter.finish()
    text, uses, ill_formed = parse_tool_uses(splitter.content, tools_schema, tool_parser_name)
    return ParsedModelOutput(splitter.reasoning, text.strip(), uses, ill_formed)


def parse_tool_uses(
    body_text: str, tools_schema: Sequence[Mapping[str, Any]] | None, tool_parser_name: str | None
) -> tuple[str, list[Call], bool]:
    """The words of a text without its calls, the calls, and whether one cannot be read, which stays among the words."""
    if tool_parser_name not in (None, TAGS, *_OF_TAGS):
        raise ValueError(f"tool parser {tool_parser_name!r} is an engine's: a session of the gateway asks one")
    words, begins, calls = body_text.partition(CALL)
    if not tools_schema or not begins:
        return body_text, [], False
    try:
        uses = tagged_calls(begins + calls, tools_schema)
    except ValueError:
        return body_text, [], True
    return words + calls.rpartition(CALL_END)[2], uses, False


def parse_xml_tool_uses(body_text: str, tools_schema: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """The words of a text without its calls of tools that there are, and these calls."""
    known = {tool["function"]["name"] for tool in tools_schema}
    words, uses = [], []
    for part in re.split(f"({CALL}.*?{CALL_END})", body_text, flags=re.DOTALL):
        found: list[Call] = []
        with contextlib.suppress(ValueError):
            found = [call for call in tagged_calls(part, tools_schema) if call["name"] in known]
        uses += found
        words += [] if found else [part]
    return "".join(words), uses


def _call(body: str, schemas: Mapping[str, Any]) -> Call:
    if body.startswith("{"):
        value = read_json(body)
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = read_json(arguments or "{}")
    else:
        if match := _FUNCTION.fullmatch(body):
            name, pairs = match[1], _PARAMETER.findall(match[2])
        else:
            name, pairs = body.partition("<arg_key>")[0].strip(), _ARGUMENT.findall(body)
        arguments = {key.strip(): argument(text, schemas.get(name), key.strip()) for key, text in pairs}
    if not isinstance(name, str) or not re.fullmatch(r"[^\s<>]+", name) or not isinstance(arguments, dict):
        raise ValueError("a tool call has no name, or its arguments are no object")
    return {"name": name, "input": arguments}
