"""Prompt files as samples: read, rendered, tokenised and checked once, before anything expensive starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import pickle
import re
import time
from argparse import Namespace
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.data import Sample
from slime.data.rows.prompt_rows import PromptRow, PromptSpec, RowEncoder
from slime.data.rows.reading import RawRow, RowFile, open_rows
from slime.data.rows.row_workers import FEWEST_BYTES, encodings, num_workers
from slime.options.checks.reward_rules import comes_before_reward, unmet_rewards
from slime.options.checks.validate import usable_context
from slime.options.rollout import SFT_ROLLOUT, generates_itself
from slime.utils.errors import BadInputError
from slime.utils.misc import attribute_of

logger = logging.getLogger(__name__)

_BATCH = 1024
_BATCH_BYTES = 2 << 20
_PROGRESS_S = 10.0
_SHOWN = 5
_CUT = re.compile(r": |; | at (?:position|byte|column) ")
_NUMBER = re.compile(r"\d+")


@dataclass
class Rejects:
    """The bad rows of a file: an error in the end, or counted where ``--skip-bad-rows`` says so."""

    count: int = 0
    shown: list[str] = field(default_factory=list)
    """A line each for the first few: file, row and problem."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many rows have which problem, without what differs from row to row."""

    def add(self, where: str, problem: str) -> None:
        self.count += 1
        self.reasons[reason(problem)] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{where}: {' '.join(problem.split())}")

    def by_reason(self) -> str:
        """The most frequent reasons, with how many rows have each."""
        most = self.reasons.most_common(2 * _SHOWN)
        rest = self.count - sum(count for _, count in most)
        return "; ".join([f"{count} x {name}" for name, count in most] + [f"{rest} x others"] * bool(rest))

    def refuse(self, flag: str, num_read: int) -> None:
        """Raise BadInputError if there are bad rows: one line, or one for each of the first and one with the count."""
        if not self.count:
            return
        if self.count == num_read > 1 and len(self.reasons) == 1:
            raise BadInputError(f"{flag} {self.shown[0]} (the same in all {num_read} rows)")
        lines = [f"{flag} {line}" for line in self.shown]
        way_out = "--skip-bad-rows leaves such rows out and counts them"
        if self.count == 1:
            raise BadInputError(f"{lines[0]} ({way_out})")
        first = f", the first {len(lines)} are above" if self.count > len(lines) else ""
        total = f"{flag}: {self.count} of {num_read} rows are bad{first} ({way_out}): {self.by_reason()}"
        raise BadInputError("\n".join([*lines, total]))


def reason(problem: str) -> str:
    """The kind of a problem: its text up to what tells of the one row."""
    parts = _CUT.split(problem)
    text = ": ".join(parts[:2]) if parts[0].startswith("not ") and len(parts) > 1 else parts[0]
    return _NUMBER.sub("N", text)[:120]


@dataclass
class PromptDataset:
    """Rows in file order; ``dataset[i]`` is a fresh sample that shares nothing with the row."""

    num_bad: int = 0
    """Rows that ``--skip-bad-rows`` left out."""
    num_too_long: int = 0
    """Rows whose prompt was longer than `PromptSpec.max_prompt_len`."""
    warnings: list[str] = field(default_factory=list)
    """What is not an error and may still be a mistake, one line each; logged when the file was read."""
    digest: str | None = None
    """Of the prompts of all rows that were read, in their order: the values at ``--input-key``, as JSONL and parquet
    alike have them before any other flag decides what becomes of them."""
    prompt_lengths: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of each prompt; 0 where it is messages."""
    file: RowFile | None = None
    _packed: list[bytes] = field(default_factory=list)
    """Rows as pickles: a tenth of the memory that their objects would take."""

    def append(self, row: PromptRow) -> None:
        tokens = row.tokens
        self.prompt_lengths.append(0 if tokens is None else len(tokens))
        self._packed.append(pickle.dumps(row.packed(), protocol=pickle.HIGHEST_PROTOCOL))

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> Sample:
        row = PromptRow.unpacked(pickle.loads(self._packed[index]))
        sample = Sample(
            prompt=row.prompt,
            tokens=[] if row.tokens is None else row.tokens.tolist(),
            label=row.label,
            metadata=row.metadata,
        )
        if row.encoded is not None:
            row.encoded.fill(sample)
        if self.file is not None:
            vars(sample)["source_row"] = self.file.where(row.number)
        return sample


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
        built_in_reward=not comes_before_reward(args) and args.custom_rm_path is None,
        rm_type=args.rm_type,
        unmet_rewards=unmet_rewards(args),
    )


def load_prompts(spec: PromptSpec) -> PromptDataset:
    """Read, check, render, tokenise and filter all rows of a file; large files in several processes, WorkerError where
    one of them died. BadInputError where the file does not read, rows are bad (the message names flag, file, row and
    what is wrong of the first, and how many there are), or no row is left."""
    try:
        file = open_rows(spec.path)
    except BadInputError as error:
        raise BadInputError(f"{spec.flag}: {error}") from error
    encoder = RowEncoder(spec, file)
    dataset, rejects, progress = PromptDataset(file=file), Rejects(), _Progress(spec, file)
    batches = _batches(spec, file, progress)
    columns, with_metadata, with_tools = set[str](), False, False
    unnamed: list[int] = []
    digest = hashlib.blake2b(digest_size=16)
    workers, batches = _workers(file, batches, progress)
    for found in encodings(spec, file, encoder, batches, workers):
        digest.update(b"".join(found.digests))
        columns |= found.columns
        for number, problem in found.bad:
            rejects.add(file.where(number), problem)
        for row in found.rows:
            dataset.append(row)
            if spec.needs_rm_type and not row.metadata.get("rm_type"):
                unnamed.append(row.number)
            with_tools = with_tools or "tools" in row.metadata
            with_metadata = with_metadata or bool(row.metadata.keys() - {"tools"})
        dataset.num_too_long += found.num_too_long
        progress.tell(rejects)
    if not spec.skip_bad_rows:
        rejects.refuse(spec.flag, progress.num_read)
    if unnamed:
        raise BadInputError(
            f"{spec.flag} {spec.path}: {len(unnamed)} of {len(dataset)} rows have no rm_type in "
            f"{spec.at('metadata_key')}, the first is {file.where(unnamed[0])}: name one for all rows by --rm-type, or "
            "give --custom-rm-path"
        )
    dataset.num_bad, dataset.digest = rejects.count, digest.hexdigest()
    _report(spec, dataset, progress.num_read, rejects)
    dataset.warnings += _empty_columns(spec, columns, with_metadata=with_metadata, with_tools=with_tools)
    for warning in dataset.warnings:
        logger.warning(warning)
    return dataset


@dataclass
class _Progress:
    spec: PromptSpec
    file: RowFile
    num_read: int = 0
    num_bytes: int = 0
    _told: float = field(default_factory=time.monotonic)

    def add(self, row: RawRow) -> int:
        size = len(row.content if isinstance(row.content, bytes) else repr(row.content))
        self.num_read += 1
        self.num_bytes += size
        return size

    def tell(self, rejects: Rejects) -> None:
        """Say how far it is, every few seconds."""
        if time.monotonic() - self._told < _PROGRESS_S:
            return
        self._told = time.monotonic()
        share = "" if self.file.is_parquet else f" of {self.file.path.stat().st_size / 1e6:.0f}"
        logger.info(
            *("%s %s: read %d rows, %.0f%s MB, %d bad", self.spec.flag, self.spec.path, self.num_read),
            *(self.num_bytes / 1e6, share, rejects.count),
        )


def _workers(file: RowFile, batches: Iterator[list[RawRow]], progress: _Progress) -> tuple[int, Iterator[list[RawRow]]]:
    """How many processes to make prompts in, and the batches: of a slice a part is read first, which may be all."""
    workers = num_workers(file.path)
    if not workers or file.bounds == slice(None):
        return workers, batches
    ahead: list[list[RawRow]] = []
    while progress.num_bytes < FEWEST_BYTES and (batch := next(batches, None)) is not None:
        ahead.append(batch)
    return workers if progress.num_bytes >= FEWEST_BYTES else 0, itertools.chain(ahead, batches)


def _batches(spec: PromptSpec, file: RowFile, progress: _Progress) -> Iterator[list[RawRow]]:
    keys = [key for key in (spec.input_key, spec.label_key, spec.metadata_key, spec.tool_key) if key]
    batch: list[RawRow] = []
    size = 0
    try:
        for row in file.raw_rows(keys):
            batch.append(row)
            size += progress.add(row)
            if len(batch) == _BATCH or size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    except BadInputError as error:
        raise BadInputError(f"{spec.flag}: {error}") from error
    if batch:
        yield batch


def _report(spec: PromptSpec, dataset: PromptDataset, num_read: int, rejects: Rejects) -> None:
    limit = "" if spec.max_prompt_len is None else f" longer than {spec.max_prompt_len} tokens"
    left_out = f"{dataset.num_bad} bad, {dataset.num_too_long}{limit or ' too long'}"
    if not len(dataset):
        reasons = f": {rejects.by_reason()}" if rejects.count else ""
        raise BadInputError(f"{spec.flag} {spec.path}: no row is left of {num_read} ({left_out}){reasons}")
    level = logging.WARNING if dataset.num_bad or dataset.num_too_long else logging.INFO
    logger.log(level, "%s %s: %d prompts of %d rows (%s)", spec.flag, spec.path, len(dataset), num_read, left_out)
    for line in rejects.shown:
        logger.warning("skipped: %s %s", spec.flag, line)
    if rejects.count > len(rejects.shown):
        logger.warning("skipped: %d rows of %s in all: %s", rejects.count, spec.path, rejects.by_reason())


def _empty_columns(spec: PromptSpec, columns: set[str], *, with_metadata: bool, with_tools: bool) -> Iterator[str]:
    """A line for a column that somebody asked for and no row has anything in."""
    for flag, key, default, found in (
        (spec.name_of("metadata_key"), spec.metadata_key, PromptSpec.metadata_key, with_metadata),
        (spec.name_of("tool_key"), spec.tool_key, PromptSpec.tool_key, with_tools),
    ):
        if key and key != default and not found:
            keys = ", ".join(map(repr, sorted(columns)))
            yield f"{spec.flag} {spec.path}: no row has anything at {key!r} ({flag}); the keys of its rows are {keys}"


def dataset_of(source: Any) -> PromptDataset | None:
    """The rows of ``--prompt-data``; None where ``source`` has not read them."""
    dataset = attribute_of(source, "dataset", None, f"{type(source).__name__} (--data-source-path)")
    return dataset if isinstance(dataset, PromptDataset) else None


def data_warnings(args: Namespace, source: Any) -> list[str]:
    """One line each, besides what reading the files has logged; none of a user's own data source, or where no rollout
    is made."""
    dataset = dataset_of(source)
    if dataset is None or not args.num_rollout:
        return []
    return [*_repeated_prompts(args, dataset), *_responses_cut(args, dataset)]


def _repeated_prompts(args: Namespace, dataset: PromptDataset) -> Iterator[str]:
    flag, drawn = "--rollout-batch-size", args.rollout_batch_size
    if args.over_sampling_batch_size:
        flag, drawn = "--over-sampling-batch-size", args.over_sampling_batch_size
    if len(dataset) < drawn:
        yield f"{flag} {drawn} is more than the {len(dataset)} prompts of --prompt-data: a rollout repeats prompts"


def _responses_cut(args: Namespace, dataset: PromptDataset) -> Iterator[str]:
    """Where the engine's context, not a limit that the user gave, ends responses."""
    longest, room = args.rollout_max_response_len, usable_context(args)
    if longest is None or not args.num_engines or args.loss_type == "sft_loss":
        return
    if args.rollout_max_context_len != room:
        return
    cut = sum(longest > room - length for length in dataset.prompt_lengths)
    if cut:
        yield (
            f"--rollout-max-response-len {longest} is more than an engine's context leaves to {cut} of {len(dataset)} "
            f"prompts: prompt and response end at {room} tokens together, which config.json (max_position_embeddings, "
            "rope_scaling) and --sglang-context-length decide"
        )
