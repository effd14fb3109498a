"""A row of a prompt file as a prompt: checked, rendered by the chat template, and tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from slime.data.rows.conversation import ConversationEncoder, Encoded, render, with_answer
from slime.data.rows.messages import RowError, as_text, check_messages, messages_of_json, without_arrow_nulls
from slime.data.rows.reading import JsonError, RawRow, RowFile, parse_json, value_of, value_problem
from slime.data.rows.tokenizer import load_tokenizer
from slime.grading.answers import empty_label_problem, label_problem
from slime.grading.graders import rm_type_problem
from slime.grading.multiple_choice import choices_problem
from slime.options.checks.reward_rules import NEEDS_LABEL
from slime.options.flags.schema import flag_named
from slime.utils.errors import BadInputError


@dataclass(frozen=True)
class PromptSpec:
    """Where prompts are and how a row becomes a sample; hashable, so that a loaded data set can be cached by it."""

    path: str
    hf_checkpoint: str
    flag: str = "--prompt-data"
    """The flag that named the file, for error messages."""
    named_by: tuple[tuple[str, str], ...] = ()
    """For each of the options below that its own flag did not set, in error messages: what did."""
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    tool_key: str | None = "tools"
    apply_chat_template: bool = False
    chat_template_kwargs: str = "{}"
    """JSON object."""
    max_prompt_len: int | None = None
    """Tokens; rows with longer prompts are left out and counted."""
    skip_bad_rows: bool = False
    messages_allowed: bool = False
    """Whether someone downstream takes chat messages that no template was applied to."""
    trained_turns: Literal["all", "last"] | None = None
    """Rows are supervised conversations, of which these of the assistant's turns are trained."""
    built_in_reward: bool = False
    """Whether a built-in reward judges the labels as rows have them."""
    rm_type: str | None = None
    """The built-in reward of rows whose metadata names none."""
    rm_type_in_rows: bool = True
    """Whether the metadata of a row may name another."""
    unmet_rewards: tuple[tuple[str, str], ...] = ()
    """Those that it may not name, each with what it lacks."""

    @property
    def needs_rm_type(self) -> bool:
        """Whether every row's metadata must name its reward, as nothing else does."""
        return self.built_in_reward and self.rm_type is None

    def name_of(self, option: str) -> str:
        """How messages call an option, such as ``label_key``."""
        return dict(self.named_by).get(option) or flag_named(option)

    def at(self, option: str) -> str:
        """How messages call what is in the column that an option names."""
        return f"{getattr(self, option)!r} ({self.name_of(option)})"


@dataclass(frozen=True)
class PromptRow:
    """One row: its prompt, and the prompt's tokens (int32) where it is text, or its encoded conversation."""

    number: int
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tokens: np.ndarray | None = None
    encoded: Encoded | None = None

    def packed(self) -> tuple[Any, ...]:
        """Plain values, with arrays of numbers as their bytes, which take less room than arrays."""
        encoded = self.encoded and (_packed(self.encoded.tokens), self.encoded.mask.tobytes(), self.encoded.response)
        return self.number, self.prompt, self.label, self.metadata, _packed(self.tokens), encoded

    @classmethod
    def unpacked(cls, values: tuple[Any, ...]) -> PromptRow:
        """The inverse of `packed`."""
        number, prompt, label, metadata, tokens, encoded = values
        if encoded is not None:
            encoded = Encoded(_unpacked(encoded[0]), np.frombuffer(encoded[1], dtype=np.uint8), encoded[2])
        return cls(number, prompt, label, metadata, _unpacked(tokens), encoded)


def _packed(tokens: np.ndarray | None) -> tuple[str, bytes] | None:
    if tokens is None:
        return None
    kind = "<u2" if not len(tokens) or tokens.max() < 1 << 16 else "<i4"
    return kind, tokens.astype(kind).tobytes()


def _unpacked(packed: tuple[str, bytes] | None) -> Any:
    return None if packed is None else np.frombuffer(packed[1], dtype=packed[0]).astype(np.int32)


_NO_PROMPT = bytes(16)


@dataclass
class Encoding:
    """What became of consecutive rows of a file."""

    rows: list[PromptRow] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Number and problem of rows that cannot be used."""
    num_too_long: int = 0
    columns: set[str] = field(default_factory=set)
    """The keys of the rows."""
    digests: list[bytes] = field(default_factory=list)
    """Of the prompt of every row, in their order; `_NO_PROMPT` of rows without one that reads."""


class RowEncoder:
    """Makes prompts of rows; what it makes of one depends on no other."""

    def __init__(self, spec: PromptSpec, file: RowFile) -> None:
        """BadInputError where there is no tokenizer, or it has no chat template and needs one."""
        self._spec = spec
        self._input = spec.name_of("input_key")
        self._file = file
        self._tokenizer = load_tokenizer(spec.hf_checkpoint)
        self._conversations = None
        if spec.apply_chat_template and not self._tokenizer.chat_template:
            template = spec.name_of("apply_chat_template")
            raise BadInputError(f"{template}: the tokenizer of {spec.hf_checkpoint} has no chat template")
        if spec.trained_turns is not None:
            last_only = spec.trained_turns == "last"
            self._conversations = ConversationEncoder(spec.hf_checkpoint, spec.chat_template_kwargs, last_only)

    def encode(self, raw_rows: list[RawRow]) -> Encoding:
        """Parse, check, render, tokenise and filter rows."""
        found = Encoding()
        parsed = []
        for raw in raw_rows:
            value, problem = value_of(raw)
            found.columns.update(value or ())
            digest = _NO_PROMPT
            try:
                if value is None:
                    raise RowError(problem)
                prompt = _take(value, self._spec.input_key, self._input)
                _check_value(prompt, self._spec.input_key, self._input)
                prompt = as_text(prompt)
                digest = _digest(prompt)
                parsed.append(_parse(raw.number, value, prompt, self._spec, self._tokenizer, self._file.is_parquet))
            except RowError as error:
                found.bad.append((raw.number, str(error)))
            found.digests.append(digest)
        sized = self._encoded(parsed, found) if self._conversations else self._tokenised(parsed, found)
        for row_, length in sized:
            if self._spec.max_prompt_len is not None and length > self._spec.max_prompt_len:
                found.num_too_long += 1
            else:
                found.rows.append(row_)
        found.bad.sort()
        return found

    def _encoded(self, rows: list[PromptRow], found: Encoding) -> Iterator[tuple[PromptRow, int]]:
        assert self._conversations is not None
        for row in rows:
            try:
                encoded = _tokenising(
                    self._conversations.encode, with_answer(row.prompt, row.label), row.metadata.get("tools")
                )
            except RowError as error:
                found.bad.append((row.number, str(error)))
            else:
                yield replace(row, encoded=encoded), len(encoded.tokens)

    def _tokenised(self, rows: list[PromptRow], found: Encoding) -> Iterator[tuple[PromptRow, int]]:
        """Rows with their tokens, and the prompts' lengths; messages stay text-less and are only measured."""
        spec = self._spec
        texts: list[tuple[PromptRow, str]] = []
        for row in rows:
            try:
                text = row.prompt if isinstance(row.prompt, str) else _measured_text(row, spec, self._tokenizer)
                texts.append((row, text))
            except RowError as error:
                found.bad.append((row.number, str(error)))
        for (row, _), tokens in zip(texts, self._ids([text for _, text in texts]), strict=True):
            if isinstance(tokens, RowError):
                found.bad.append((row.number, str(tokens)))
            elif not isinstance(row.prompt, str):
                yield row, len(tokens)
            elif tokens:
                yield replace(row, tokens=np.asarray(tokens, dtype=np.int32)), len(tokens)
            else:
                found.bad.append((row.number, f"{spec.at('input_key')} is empty"))

    def _ids(self, texts: list[str]) -> list[list[int] | RowError]:
        """The tokens of texts, all at once; one at a time where one of them is refused."""

        def ids(some: list[str]) -> list[list[int]]:
            return list(self._tokenizer(some, add_special_tokens=False)["input_ids"]) if some else []

        try:
            return list(_tokenising(ids, texts))
        except RowError as error:
            if len(texts) == 1:
                return [error]
        return [found for text in texts for found in self._ids([text])]


def _tokenising(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RowError:
        raise
    except Exception as error:
        raise RowError(f"the tokenizer fails: {type(error).__name__}: {error}"[:300]) from error


def _digest(prompt: Any) -> bytes:
    """Of the value of a prompt, whichever kind of file it is from."""
    text = json.dumps(without_arrow_nulls(prompt), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=len(_NO_PROMPT)).digest()


def _parse(number: int, row: dict[str, Any], prompt: Any, spec: PromptSpec, tokenizer: Any, arrow: bool) -> PromptRow:
    label_named = spec.name_of("label_key")
    label = None if spec.label_key is None else _take(row, spec.label_key, label_named)
    if arrow:
        prompt, label = without_arrow_nulls(prompt), without_arrow_nulls(label)
    if label is None and spec.label_key is not None and spec.trained_turns is None:
        raise RowError(f"{spec.at('label_key')} is null")
    metadata = _metadata(row, spec, arrow)
    _check_reward(label, metadata, spec)
    _check_value(label, spec.label_key, label_named)
    prompt = _prompt(prompt, metadata.get("tools"), spec, tokenizer)
    return PromptRow(number, prompt, label, metadata)


def _check_value(value: Any, key: str | None, flag: str) -> None:
    if (problem := value_problem(value)) is not None:
        raise RowError(f"{key!r} ({flag}) {problem}")


def _steps(row: dict[str, Any], key: str) -> list[str]:
    """The way to a value: the name of a column or, where none has it, what stands between its dots."""
    return [key] if key in row else key.split(".")


def _take(row: dict[str, Any], key: str, flag: str) -> Any:
    parts = _steps(row, key)
    named = flag if len(parts) == 1 else f"{flag} {key}"
    value: Any = row
    for depth, part in enumerate(parts):
        above = repr(".".join(parts[:depth]))
        if not isinstance(value, dict):
            raise RowError(f"{above} ({named}) is a {type(value).__name__}, not an object")
        if part not in value:
            where = f" in {above}" if depth else ""
            keys = ", ".join(map(repr, sorted(value)))
            raise RowError(f"there is no key {part!r}{where} ({named}); the keys are {keys}")
        value = value[part]
    return value


def _check_reward(label: Any, metadata: dict[str, Any], spec: PromptSpec) -> None:
    if not spec.built_in_reward:
        return
    rm_type = spec.rm_type
    if spec.rm_type_in_rows and metadata.get("rm_type"):
        rm_type = metadata["rm_type"]
        if (problem := rm_type_problem(rm_type)) is not None:
            raise RowError(f"{spec.at('metadata_key')} has an {problem}")
        if (problem := dict(spec.unmet_rewards).get(rm_type.removeprefix("boxed_"))) is not None:
            raise RowError(f"{spec.at('metadata_key')} names rm_type {rm_type}, which {problem}")
    rm_type = str(rm_type).removeprefix("boxed_")
    if rm_type == "gpqa" and (problem := choices_problem(metadata.get("choices"))) is not None:
        raise RowError(f"'choices' in {spec.at('metadata_key')} {problem}")
    if rm_type in NEEDS_LABEL and (problem := label_problem(label) or empty_label_problem(label)) is not None:
        raise RowError(f"{spec.at('label_key')} {problem}")


def _metadata(row: dict[str, Any], spec: PromptSpec, arrow: bool) -> dict[str, Any]:
    metadata, tools = (
        _decoded(_optional(row, key, flag), key, flag, arrow)
        for key, flag in ((spec.metadata_key, spec.name_of("metadata_key")), (spec.tool_key, spec.name_of("tool_key")))
    )
    metadata = metadata or {}
    if not isinstance(metadata, dict):
        raise RowError(f"{spec.at('metadata_key')} is a {type(metadata).__name__}, not an object")
    if tools is None or tools == []:
        _check_own_tools(metadata, spec)
        return metadata
    if not isinstance(tools, list):
        raise RowError(f"{spec.at('tool_key')} is a {type(tools).__name__}, not a list of tools")
    return {**metadata, "tools": tools}


def _check_own_tools(metadata: dict[str, Any], spec: PromptSpec) -> None:
    """Raise RowError where the chat template would be given tools of the metadata that are none."""
    tools = metadata.get("tools")
    rendered = spec.apply_chat_template or spec.trained_turns is not None
    if rendered and tools is not None and not isinstance(tools, list):
        raise RowError(f"'tools' in {spec.at('metadata_key')} is a {type(tools).__name__}, not a list of tools")


def _optional(row: dict[str, Any], key: str | None, flag: str) -> Any:
    """`_take` of what a row may lack, or have null on the way to: then None."""
    if not key:
        return None
    value: Any = row
    for part in _steps(row, key):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise RowError(f"{key!r} ({flag}) leads into a {type(value).__name__}, not an object")
        value = value.get(part)
    return value


def _decoded(value: Any, key: str | None, flag: str, arrow: bool) -> Any:
    """``value``, parsed where it is a string of JSON; an empty string is nothing."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except JsonError as error:
            raise RowError(f"{key!r} ({flag}) is a string that is not JSON: {error}") from error
    elif arrow:
        value = without_arrow_nulls(value)
    _check_value(value, key, flag)
    return value


def _prompt(prompt: Any, tools: Any, spec: PromptSpec, tokenizer: Any) -> str | list[dict[str, Any]]:
    named = spec.at("input_key")
    if spec.apply_chat_template or spec.trained_turns is not None:
        prompt = messages_of_json(prompt, named)
    if isinstance(prompt, str):
        if not spec.apply_chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    check_messages(prompt, named)
    if spec.apply_chat_template:
        return render(tokenizer, prompt, tools, spec.chat_template_kwargs)
    if not spec.messages_allowed:
        raise RowError(f"{named} holds chat messages: add {spec.name_of('apply_chat_template')}")
    return prompt


def _measured_text(row: PromptRow, spec: PromptSpec, tokenizer: Any) -> str:
    if spec.max_prompt_len is None or not tokenizer.chat_template:
        return ""
    assert isinstance(row.prompt, list)
    open_turn = row.prompt[-1]["role"] != "assistant"
    tools = row.metadata.get("tools")
    return render(tokenizer, row.prompt, tools, spec.chat_template_kwargs, generation_prompt=open_turn)
