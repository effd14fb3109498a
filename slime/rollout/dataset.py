"""Prompt files as samples: rendered, tokenised and checked once, before anything expensive starts."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from slime.options.rollout import SFT_ROLLOUT, generates_itself
from slime.options.validate import NEEDS_LABEL, may_set_labels
from slime.rollout.conversation import ConversationEncoder, Encoded, render, with_answer
from slime.rollout.messages import RowError, as_text, check_messages, messages_of_json, without_arrow_nulls
from slime.rollout.reading import Row, read_rows, split_slice
from slime.rollout.rm_hub.answers import label_problem
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_BATCH = 1024
_SHOWN = 5


@dataclass(frozen=True)
class PromptSpec:
    """Where prompts are and how a row becomes a sample; hashable, so that a loaded data set can be cached by it."""

    path: str
    hf_checkpoint: str
    flag: str = "--prompt-data"
    """The flag that named the file, for error messages."""
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


@dataclass(frozen=True)
class PromptRow:
    """One row: its prompt, and the prompt's tokens (int32) where it is text, or its encoded conversation."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tokens: np.ndarray | None = None
    encoded: Encoded | None = None

    def sample(self) -> Sample:
        """A fresh sample that shares nothing mutable with the row; ``source_row`` says where it came from."""
        sample = Sample(
            prompt=copy.deepcopy(self.prompt),
            tokens=[] if self.tokens is None else self.tokens.tolist(),
            label=copy.deepcopy(self.label),
            metadata=copy.deepcopy(self.metadata),
        )
        if self.encoded is not None:
            self.encoded.fill(sample)
        vars(sample)["source_row"] = self.where
        return sample


@dataclass
class PromptDataset:
    """Rows in file order; ``dataset[i]`` is a fresh sample."""

    rows: list[PromptRow]
    num_bad: int = 0
    """Rows that ``--skip-bad-rows`` left out."""
    num_too_long: int = 0
    """Rows whose prompt was longer than `PromptSpec.max_prompt_len`."""
    warnings: list[str] = field(default_factory=list)
    """What is no error and may still be a mistake, one line each; logged when the file was read."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index].sample()


@dataclass
class _Rejects:
    """Bad rows: the first is an error, or all are counted where `PromptSpec.skip_bad_rows` says so."""

    spec: PromptSpec
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, problem: str) -> None:
        message = f"{self.spec.flag} {where}: {problem}"
        if not self.spec.skip_bad_rows:
            raise BadInputError(f"{message} (--skip-bad-rows leaves such rows out and counts them)")
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(message)


def train_prompt_spec(args: Namespace) -> PromptSpec:
    """The training prompts that ``args`` name; conversations of supervised training stay messages."""
    supervised = args.loss_type == "sft_loss"
    own_code = args.custom_generate_function_path is not None or not generates_itself(args.rollout_function_path)
    turns: Literal["all", "last"] = "last" if args.loss_mask_type == "distill_qwen" else "all"
    return PromptSpec(
        path=args.prompt_data,
        hf_checkpoint=args.hf_checkpoint,
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template and not supervised,
        chat_template_kwargs=json.dumps(args.apply_chat_template_kwargs or {}),
        max_prompt_len=args.rollout_max_prompt_len,
        skip_bad_rows=args.skip_bad_rows,
        messages_allowed=supervised or own_code,
        trained_turns=turns if args.rollout_function_path == SFT_ROLLOUT else None,
        built_in_reward=not may_set_labels(args) and args.custom_rm_path is None,
        rm_type=args.rm_type,
    )


def load_prompts(spec: PromptSpec) -> PromptDataset:
    """Read, check, render, tokenise and filter all rows of a file.

    Raises:
        BadInputError: the file does not read, a row is bad (the message names flag, file, row and what is wrong), or no
            row is left.
    """
    tokenizer = load_tokenizer(spec.hf_checkpoint)
    if spec.apply_chat_template and not tokenizer.chat_template:
        raise BadInputError(f"--apply-chat-template: the tokenizer of {spec.hf_checkpoint} has no chat template")
    rejects = _Rejects(spec)
    arrow = split_slice(spec.path)[0].suffix == ".parquet"
    encoder = None
    if spec.trained_turns is not None:
        encoder = ConversationEncoder(spec.hf_checkpoint, spec.chat_template_kwargs, spec.trained_turns == "last")
    dataset = PromptDataset([])
    num_read, columns = 0, set[str]()
    for batch in _batches(_rows(spec)):
        num_read += len(batch)
        columns.update(*(row.value or {} for row in batch))
        parsed = [row for row in (_parse(row, spec, tokenizer, rejects, arrow) for row in batch) if row is not None]
        sized = _encode(parsed, encoder, rejects) if encoder else _tokenise(parsed, spec, tokenizer, rejects)
        for row, length in sized:
            if spec.max_prompt_len is not None and length > spec.max_prompt_len:
                dataset.num_too_long += 1
            else:
                dataset.rows.append(row)
    dataset.num_bad = rejects.count
    _report(spec, dataset, num_read, rejects.shown)
    dataset.warnings += _empty_columns(spec, dataset, columns)
    for warning in dataset.warnings:
        logger.warning(warning)
    return dataset


def _rows(spec: PromptSpec) -> Iterator[Row]:
    try:
        yield from read_rows(spec.path)
    except ValueError as error:
        raise BadInputError(f"{spec.flag}: {error}") from error


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, _BATCH)):
        yield batch


def _report(spec: PromptSpec, dataset: PromptDataset, num_read: int, shown: list[str]) -> None:
    limit = "" if spec.max_prompt_len is None else f" longer than {spec.max_prompt_len} tokens"
    left_out = f"{dataset.num_bad} bad, {dataset.num_too_long}{limit or ' too long'}"
    if not dataset.rows:
        raise BadInputError(f"{spec.flag} {spec.path}: no row is left of {num_read} ({left_out})")
    level = logging.WARNING if dataset.num_bad or dataset.num_too_long else logging.INFO
    logger.log(level, "%s %s: %d prompts of %d rows (%s)", spec.flag, spec.path, len(dataset), num_read, left_out)
    for message in shown:
        logger.warning("skipped: %s", message)


def _empty_columns(spec: PromptSpec, dataset: PromptDataset, columns: set[str]) -> Iterator[str]:
    """A line for a column that somebody asked for and no row has anything in."""
    metadata = (row.metadata.keys() - {"tools"} for row in dataset.rows)
    tools = (row.metadata.keys() & {"tools"} for row in dataset.rows)
    for flag, key, default, found in (
        ("--metadata-key", spec.metadata_key, PromptSpec.metadata_key, metadata),
        ("--tool-key", spec.tool_key, PromptSpec.tool_key, tools),
    ):
        if key and key != default and not any(found):
            keys = ", ".join(map(repr, sorted(columns)))
            yield f"{spec.flag} {spec.path}: no row has anything at {key!r} ({flag}); the keys of its rows are {keys}"


def _parse(row: Row, spec: PromptSpec, tokenizer: Any, rejects: _Rejects, arrow: bool) -> PromptRow | None:
    try:
        if row.value is None:
            raise RowError(row.problem)
        prompt = as_text(_take(row.value, spec.input_key, "--input-key"))
        prompt = without_arrow_nulls(prompt) if arrow else prompt
        label = None if spec.label_key is None else _take(row.value, spec.label_key, "--label-key")
        label = without_arrow_nulls(label) if arrow else label
        if label is None and spec.label_key is not None and spec.trained_turns is None:
            raise RowError(f"{spec.label_key!r} (--label-key) is null")
        metadata = _metadata(row.value, spec, arrow)
        _check_label(label, metadata, spec)
        prompt = _prompt(prompt, metadata.get("tools"), spec, tokenizer)
    except RowError as error:
        rejects.add(row.where, str(error))
        return None
    return PromptRow(row.where, prompt, label, metadata)


def _steps(row: dict[str, Any], key: str) -> list[str]:
    """The way to a value: the name of a column or, where none has it, what stands between its dots."""
    return [key] if key in row else key.split(".")


def _take(row: dict[str, Any], key: str, flag: str) -> Any:
    """The value of a column, or of an object in one."""
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


def _check_label(label: Any, metadata: dict[str, Any], spec: PromptSpec) -> None:
    """Raise RowError for a label with which the row's built-in reward can compare nothing."""
    rm_type = str(metadata.get("rm_type") or spec.rm_type).removeprefix("boxed_")
    problem = label_problem(label) if spec.built_in_reward and rm_type in NEEDS_LABEL else None
    if problem is not None:
        raise RowError(f"{spec.label_key!r} (--label-key) {problem}")


def _metadata(row: dict[str, Any], spec: PromptSpec, arrow: bool) -> dict[str, Any]:
    metadata, tools = (
        _decoded(_optional(row, key, flag), key, flag, arrow)
        for key, flag in ((spec.metadata_key, "--metadata-key"), (spec.tool_key, "--tool-key"))
    )
    metadata = metadata or {}
    if not isinstance(metadata, dict):
        raise RowError(f"{spec.metadata_key!r} (--metadata-key) is a {type(metadata).__name__}, not an object")
    if tools is None or tools == []:
        return metadata
    if not isinstance(tools, list):
        raise RowError(f"{spec.tool_key!r} (--tool-key) is a {type(tools).__name__}, not a list of tools")
    return {**metadata, "tools": tools}


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
    if not isinstance(value, str):
        return without_arrow_nulls(value) if arrow else value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{key!r} ({flag}) is a string that is no JSON: {error}") from error


def _prompt(prompt: Any, tools: Any, spec: PromptSpec, tokenizer: Any) -> str | list[dict[str, Any]]:
    if spec.apply_chat_template or spec.trained_turns is not None:
        prompt = messages_of_json(prompt)
    if isinstance(prompt, str):
        if not spec.apply_chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    check_messages(prompt, f"{spec.input_key!r} (--input-key)")
    _check_contents(prompt, f"{spec.input_key!r} (--input-key)")
    if spec.apply_chat_template:
        return render(tokenizer, prompt, tools, spec.chat_template_kwargs)
    if not spec.messages_allowed:
        raise RowError(f"{spec.input_key!r} (--input-key) holds chat messages: add --apply-chat-template")
    return prompt


def _check_contents(messages: list[dict[str, Any]], what: str) -> None:
    """Raise RowError for a message that says nothing: templates render it as an empty turn, or fail."""
    for position, message in enumerate(messages):
        if message.get("content") is None and not message.get("tool_calls"):
            raise RowError(f"message {position} of {what} has neither 'content' nor 'tool_calls': {message!r:.80}")


def _tokenise(
    rows: list[PromptRow], spec: PromptSpec, tokenizer: Any, rejects: _Rejects
) -> Iterator[tuple[PromptRow, int]]:
    """Rows with their tokens, and the prompts' lengths; messages stay text-less and are only measured."""
    texts: list[tuple[PromptRow, str]] = []
    for row in rows:
        try:
            texts.append((row, row.prompt if isinstance(row.prompt, str) else _measured_text(row, spec, tokenizer)))
        except RowError as error:
            rejects.add(row.where, str(error))
    ids = tokenizer([text for _, text in texts], add_special_tokens=False)["input_ids"] if texts else []
    for (row, _), tokens in zip(texts, ids, strict=True):
        if not isinstance(row.prompt, str):
            yield row, len(tokens)
        elif tokens:
            yield replace(row, tokens=np.asarray(tokens, dtype=np.int32)), len(tokens)
        else:
            rejects.add(row.where, f"{spec.input_key!r} (--input-key) is empty")


def _encode(rows: list[PromptRow], encoder: ConversationEncoder, rejects: _Rejects) -> Iterator[tuple[PromptRow, int]]:
    """Rows with their conversations' tokens, and how many these are."""
    for row in rows:
        try:
            encoded = encoder.encode(with_answer(row.prompt, row.label), row.metadata.get("tools"))
        except RowError as error:
            rejects.add(row.where, str(error))
        else:
            yield replace(row, encoded=encoded), len(encoded.tokens)


def _measured_text(row: PromptRow, spec: PromptSpec, tokenizer: Any) -> str:
    if spec.max_prompt_len is None or not tokenizer.chat_template:
        return ""
    assert isinstance(row.prompt, list)
    open_turn = row.prompt[-1]["role"] != "assistant"
    tools = row.metadata.get("tools")
    return render(tokenizer, row.prompt, tools, spec.chat_template_kwargs, generation_prompt=open_turn)
