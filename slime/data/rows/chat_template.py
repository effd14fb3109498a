"""A tokenizer's chat template: what it renders, where each message of it stands, and which data it reads."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import Template, TemplateError, nodes
from jinja2.visitor import NodeTransformer

from slime.data.rows.messages import Messages, RowError, content_text, with_arguments

logger = logging.getLogger(__name__)

SPOKEN = ("system", "user", "assistant")
"""Roles that every template knows."""
_PRIVATE = range(0xE000, 0xF900)
"""Characters of Unicode's private use area."""
_MARK = "slime_mark"
_UNSHOWN_KEYS = {"role", "content", "step_loss_mask", "name", "tool_call_id"}
"""Keys that no template has to read."""
_KEYS = ("content", "name", "reasoning", "reasoning_content", "role", "thinking", "tool_call_id", "tool_calls")
"""Keys that templates are known to read, for a message."""


@dataclass
class Marked:
    """A rendering of which it is known what came from which message."""

    text: str
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Message -> characters that the template's loop over the messages wrote for it; only where it wrote any."""
    repeated: set[int] = field(default_factory=set)
    """Messages that it wrote several pieces for."""
    tail: int = 0
    """Where what follows the last loop begins, as the generation prompt does."""
    head: int = 0
    """Where the first message begins."""
    generated: list[tuple[int, int]] = field(default_factory=list)
    """Characters in the template's own ``{% generation %}`` blocks."""


class ChatTemplate:
    """One chat template, with the arguments that it is rendered with."""

    def __init__(self, tokenizer: Any, source: str, kwargs: str = "{}") -> None:
        self._tokenizer = tokenizer
        self.source = source
        self._kwargs: dict[str, Any] = json.loads(kwargs)
        self._warned: set[str] = set()
        self._roles: dict[str, bool] = {}

    # Rendering

    def text(self, messages: Messages, tools: Any = None, *, generation_prompt: bool = False) -> str:
        """The rendering of messages that `prepared` gave; RowError where the template refuses the conversation."""
        with _refusing():
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self._kwargs
            )
            return rendered

    def marked(self, messages: Messages, tools: Any = None, *, generation_prompt: bool = False) -> Marked:
        """`text`, and where in it each message is: the template writes marks as it begins a message."""
        with _refusing():
            written = json.dumps([messages, tools, self._kwargs], ensure_ascii=False, default=str)
        written += self.source
        left, right = itertools.islice((chr(code) for code in _PRIVATE if chr(code) not in written), 2)
        numbers = {id(message): number for number, message in enumerate(messages)}

        def mark(kind: str, loop: int, message: Any = None) -> str:
            if kind == "begin" and id(message) not in numbers:
                return ""
            return f"{left}{kind},{loop},{numbers.get(id(message), -1)}{right}"

        values = {"documents": None, **self._tokenizer.special_tokens_map, **self._kwargs}
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": generation_prompt, _MARK: mark}
        with _refusing():
            return _located(self._instrumented.render(**values), left, right)

    @functools.cached_property
    def has_generation_blocks(self) -> bool:
        """Whether the template itself says what is trained, by ``{% generation %}``."""
        return any(map(_is_generation_block, self._tree.find_all(nodes.CallBlock)))

    @functools.cached_property
    def role_tokens(self) -> dict[str, str]:
        """The token that begins a message of the user and of a tool behind the assistant's; empty where there is none.

        An engine stops at them where the template ends the assistant's turns by nothing (GLM: <|user|> after an answer,
        <|observation|> after a tool call). GLM-4's name for a tool's message is an observation.
        """
        tool = self._role_token("tool", _call({})) or self._role_token("observation", _TURN | {"metadata": "?"})
        return {"user": self._role_token("user", _TURN), "tool": tool}

    def _role_token(self, role: str, after: dict[str, Any]) -> str:
        try:
            marked = self.marked(self.prepared([_USER, after, {"role": role, "content": "?"}]))
        except RowError:
            return ""
        start, end = marked.pieces.get(2, (0, 0))
        piece = marked.text[start:end]
        known = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        match = re.match("|".join(map(re.escape, sorted(known, key=len, reverse=True))) or "(?!)", piece)
        match = match or re.match("<[|\uff5c][^<>\\s]+?[|\uff5c]>", piece)
        return match.group() if match else ""

    @property
    def _tree(self) -> nodes.Template:
        return _compiled(self.source).environment.parse(self.source)

    @functools.cached_property
    def _instrumented(self) -> Template:
        tree = _Marking().visit(self._tree)
        return _compiled(self.source).environment.from_string(tree)

    # Data

    def prepared(self, messages: Messages, *, warns: bool = True) -> Messages:
        """Messages, new objects, in the form that the template reads: contents as text, tool calls' arguments as it
        takes them. Keys of null are left out, as SGLang's server does. A key that the template does not read is warned
        of, once, if it ``warns``. RowError where a content is no text, a role none of the template's, or the arguments
        of a tool call no object."""
        prepared = [self._prepared(message, f"message {number}") for number, message in enumerate(messages)]
        for message in prepared if warns else ():
            self._warn(message)
        return prepared

    def _prepared(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        role, content = message["role"], content_text(message, where)
        if not self._role_is_shown(role):
            raise RowError(f"the chat template leaves out {where}: it does not know the role {role!r}")
        prepared = {key: value for key, value in message.items() if value is not None and key != "content"}
        if content is not None:
            prepared["content"] = [{"type": "text", "text": content}] if role in self._roles_of_parts else content
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = with_arguments(prepared["tool_calls"], where, as_json=self._arguments_as_json)
            prepared |= {} if content else self._no_content
        else:
            prepared.pop("tool_calls", None)
        return prepared

    def _warn(self, message: dict[str, Any]) -> None:
        for key in message:
            if key in self._read_keys or key in _UNSHOWN_KEYS or key in self._warned:
                continue
            self._warned.add(key)
            read = ", ".join(name for name in _KEYS if name in self._read_keys)
            logger.warning(
                "messages have the key %r, which the chat template does not read: it is not in the text; the template "
                "reads %s",
                key,
                read,
            )
        calling = "tool_calls" in message and bool(message.get("content"))
        if calling and "content" not in self._warned and not self._shows_content_of_calls:
            self._warned.add("content")
            logger.warning("the chat template leaves out the content of messages that have tool calls")

    @functools.cached_property
    def _read_keys(self) -> set[str]:
        """Every attribute, subscript and string in the template: it can read no key of another name."""
        tree = self._tree
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}

    def warn_of_tools(self) -> None:
        """Say, once, that the template does not show tools, where it does not."""
        if not self._reads_tools and "tools" not in self._warned:
            self._warned.add("tools")
            logger.warning("tools are given, but the chat template does not read them: the model is not told of any")

    @functools.cached_property
    def _reads_tools(self) -> bool:
        return any(node.name == "tools" for node in self._tree.find_all(nodes.Name))

    @functools.cached_property
    def _roles_of_parts(self) -> set[str]:
        """Roles whose contents the template takes as lists of parts only."""
        parts = [{"type": "text", "text": _TEXT}]
        return {role for role in SPOKEN if not self._shows(role, _TEXT) and self._shows(role, parts)}

    def _role_is_shown(self, role: str) -> bool:
        if role not in self._roles:
            self._roles[role] = role in SPOKEN or self._shows(role, _TEXT) is not False
        return self._roles[role]

    def _shows(self, role: str, content: Any) -> bool | None:
        message = {"role": role, "content": content}
        arguments = "{}" if self._arguments_as_json else {}
        before = {"system": [], "tool": [_USER, _call(arguments) | self._no_content]}.get(role, [_USER])
        text = self._try([*before, message, *([_USER] if role == "system" else [])])
        return None if text is None else _TEXT in text

    @functools.cached_property
    def _shows_content_of_calls(self) -> bool:
        text = self._try([_USER, _call("{}" if self._arguments_as_json else {}) | {"content": _TEXT}])
        return text is None or _TEXT in text

    @functools.cached_property
    def _arguments_as_json(self) -> bool:
        """Whether the template takes the arguments of tool calls as text only, as DeepSeek's do."""
        forms = ({"key": "value"}, '{"key": "value"}')
        as_object, as_text_ = (
            any(self._try([_USER, _call(form) | content]) for content in _NO_CONTENT) for form in forms
        )
        return as_text_ and not as_object

    @functools.cached_property
    def _no_content(self) -> dict[str, Any]:
        """What the message of a tool call has where it says nothing, so that the template writes the call alone."""
        arguments = '{"key": "value"}' if self._arguments_as_json else {"key": "value"}
        for content in _NO_CONTENT:
            text = self._try([_USER, _call(arguments) | content])
            if text is not None and _NAME in text and "None" not in text:
                return content
        return {"content": ""}

    def _try(self, messages: Messages) -> str | None:
        try:
            return self.text(messages)
        except RowError:
            return None


_NAME = "slime_function"
_TEXT = "slime-content"
_USER = {"role": "user", "content": "?"}
_TURN = {"role": "assistant", "content": "?"}
_NO_CONTENT: tuple[dict[str, Any], ...] = ({"content": ""}, {"content": None}, {})


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


_cached = functools.lru_cache(maxsize=32)(ChatTemplate)


def chat_template(tokenizer: Any, tools: Any, kwargs: str, *, warns: bool = True) -> ChatTemplate:
    """The template of a tokenizer, which may have another one for conversations with tools; RowError where it has
    none. Where it shows no tools, and some are given, a warning says so, if it ``warns``: not of tools to try it by."""
    try:
        source = tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        raise RowError(str(error)) from error
    template = _cached(tokenizer, source, kwargs)
    if tools and warns:
        template.warn_of_tools()
    return template


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, RuntimeError, ArithmeticError) as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error


# Instrumentation


def _compiled(source: str) -> Template:
    """The template as transformers compiles it: its environment has the functions and tags that templates use."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template: Template = _compile_jinja_template(source)
    return template


def _is_generation_block(node: nodes.CallBlock) -> bool:
    called = node.call.node
    return isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation_support"


class _Marking(NodeTransformer):
    """Writes a mark at the beginning of every round of a loop, and behind loops and ``{% generation %}`` blocks."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        number = next(self._numbers)
        self.generic_visit(node)
        if isinstance(node.target, nodes.Name):
            node.body.insert(0, _mark(node, "begin", number, nodes.Name(node.target.name, "load")))
        return [node, _mark(node, "end", number)]

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node | list[nodes.Node]:
        self.generic_visit(node)
        if not _is_generation_block(node):
            return node
        return [_mark(node, "open", 0), node, _mark(node, "close", 0)]


def _mark(at: nodes.Node, kind: Literal["begin", "end", "open", "close"], number: int, *more: nodes.Expr) -> nodes.Node:
    arguments = [nodes.Const(kind), nodes.Const(number), *more]
    call = nodes.Call(nodes.Name(_MARK, "load"), arguments, [], None, None)
    output: nodes.Node = nodes.Output([call]).set_lineno(at.lineno)
    if at.environment is not None:
        output.set_environment(at.environment)
    return output


def _located(marked: str, left: str, right: str) -> Marked:
    result, parts, length = Marked(""), [], 0
    begun: dict[str, tuple[int, int]] = {}  # loop -> the message that it is at, and where that began
    opened = 0

    def finish(loop: str) -> None:
        message, start = begun.pop(loop, (-1, length))
        if length > start:
            if message in result.pieces:
                result.repeated.add(message)
            result.pieces[message] = start, length

    position = 0
    for match in re.finditer(f"{left}(begin|end|open|close),([0-9]+),(-?[0-9]+){right}", marked):
        parts.append(marked[position : match.start()])
        length += match.start() - position
        position = match.end()
        kind, loop, message = match.groups()
        if kind == "open":
            opened = length
        elif kind == "close":
            result.generated.append((opened, length))
        else:
            finish(loop)
            if kind == "begin":
                begun[loop] = int(message), length
            result.tail = length
    parts.append(marked[position:])
    result.text = "".join(parts)
    result.head = min((start for start, _ in result.pieces.values()), default=result.tail)
    return result
