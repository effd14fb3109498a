"""Saved rollouts: their samples, the lists that filters make of them, and one sample in full."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from slime.data import Sample
from slime.utils.errors import BadInputError
from tools.samples.safe_files import load_safe, to_json
from tools.samples.train_data import mean_gap, read_train_data

_COLUMNS = ("loss_mask", "rollout_log_probs", "teacher_log_probs")
_PREVIEW = 200
_LONGEST_CHARACTER = 8  # tokens; a byte-level one needs 4, and what follows no rule must end somewhere
_MARK = re.compile(r"(<[|\uff5c][^<>|\uff5c]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|</?s>|<sop>|\[gMASK\]|\[/?INST\])")
"""Special tokens of chat templates, as their text."""
_ROLES = ("system", "user", "assistant")
_ROLE = re.compile(
    r"\s*(system|developer|user|human|assistant|model|tool|observation)\b[ \t]*(?:\n|$|(?=<))", re.IGNORECASE
)
_SORTS = ("place", "reward", "length", "gap")


@dataclass(frozen=True)
class Rollout:
    """One file's samples, and of each the row that lists show."""

    rollout_id: Any
    samples: list[Sample]
    rows: list[dict[str, Any]]
    train: dict[int, dict[str, torch.Tensor]]
    """By place in the file: what the trainer computed of each response token."""

    @property
    def reward_keys(self) -> list[str]:
        """Where rewards are dicts: the entries that are numbers."""
        dicts = [s.reward for s in self.samples if isinstance(s.reward, dict)]
        return sorted({str(key) for reward in dicts for key, value in reward.items() if isinstance(value, Real)})


@dataclass(frozen=True)
class Query:
    """Which samples to list; None and empty text exclude none."""

    text: str = ""
    status: str = ""
    group: int | None = None
    reward_key: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    removed: bool = False
    versions: bool = False
    """Only samples of several versions."""
    sort: str = "place"
    descending: bool = False
    offset: int = 0
    limit: int = 100

    @classmethod
    def parse(cls, values: dict[str, str]) -> Query:
        """From a URL's query.

        Raises:
            BadInputError: an unknown name, or a value that is none.
        """
        kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": lambda text: text == "1"}
        types = {f.name: str(f.type).split(" ")[0] for f in fields(cls)}
        parsed = {}
        for name, value in values.items():
            try:
                parsed[name] = kinds.get(types[name], str)(value)
            except (KeyError, ValueError) as error:
                raise BadInputError(f"{name}={value!r} is not a filter") from error
        query = cls(**parsed)
        if query.sort not in _SORTS or query.offset < 0 or not 1 <= query.limit <= 1000:
            raise BadInputError(f"sort is one of {', '.join(_SORTS)}, offset at least 0, limit 1 to 1000")
        return query


def read_rollout(path: Path, train_files: Iterable[Path] = ()) -> Rollout:
    """The samples of a file of ``--save-debug-rollout-data``, with what ``train_files`` know of them.

    Raises:
        BadInputError: it is none, or one of the others is not a file of a training rank.
    """
    content = load_safe(path)
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise BadInputError(f"{path}: not a rollout's file: it has no list 'samples'")
    samples, rows = [], []
    for place, values in enumerate(content["samples"]):
        try:
            samples.append(_sample(values))
            rows.append(_row(place, samples[-1]))
        except (TypeError, ValueError, AttributeError) as error:
            raise BadInputError(f"{path}: not a rollout's file: sample {place}: {error}") from error
    train = read_train_data(train_files, content.get("rollout_id"), samples)
    for place, columns in train.items():
        rows[place]["gap"] = mean_gap(samples[place], _column(samples[place], "loss_mask"), columns.get("log_probs"))
    return Rollout(content.get("rollout_id"), samples, rows, train)


def _sample(values: Any) -> Sample:
    if not isinstance(values, dict) or "tokens" not in values:
        raise ValueError("it has no tokens")
    for name in ("tokens", *_COLUMNS):
        value = values.get(name)
        if isinstance(value, dict):  # a file without code has a numpy array as a tensor with this name
            value = value.get("__numpy_array__")
        if isinstance(value, torch.Tensor):
            values[name] = value.tolist()
    sample = Sample.from_dict(values)
    tokens = sample.tokens
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int} or min(tokens, default=0) < 0:
        raise ValueError("its tokens are not a list of token ids")
    if not isinstance(sample.group_index, (int, type(None))):
        raise ValueError(f"group_index {sample.group_index!r}")
    if not isinstance(sample.response_length, int) or not 0 <= sample.response_length <= len(sample.tokens):
        raise ValueError(f"response_length {sample.response_length!r} of {len(sample.tokens)} tokens")
    return sample


def _column(sample: Sample, name: str) -> list[Any] | None:
    """None where the sample has none, or one of another length."""
    values = getattr(sample, name)
    return values if isinstance(values, list) and len(values) == sample.response_length else None


def _row(place: int, sample: Sample) -> dict[str, Any]:
    mask = _column(sample, "loss_mask")
    trained = sample.response_length if mask is None else sum(map(bool, mask))
    return {
        "place": place,
        "index": sample.index,
        "group": sample.group_index,
        "status": sample.status.value,
        "length": sample.response_length,
        "trained": 0 if sample.remove_sample else trained,
        "versions": list(dict.fromkeys(map(str, sample.weight_versions))),
        "removed": bool(sample.remove_sample),
        "prompt": " ".join(question(sample)[:_PREVIEW].split()),
        "response": " ".join(str(sample.response)[:_PREVIEW].split()),
        "gap": None,
    }


def prompt_text(sample: Sample) -> str:
    """The prompt; of chat messages what they say."""
    if isinstance(sample.prompt, list):
        return "\n".join(_said(message) for message in sample.prompt if isinstance(message, dict))
    return str(sample.prompt)


def question(sample: Sample) -> str:
    """What the prompt asks: its last turn of a user, without the marks of a chat template.

    A prompt that was rendered is taken apart at what looks like special tokens, as lists are made without a tokenizer.
    """
    if isinstance(sample.prompt, list):
        messages = [message for message in sample.prompt if isinstance(message, dict)]
        asked = [_said(message) for message in messages if message.get("role") == "user"]
        return asked[-1] if asked else prompt_text(sample)
    role, is_name, turns = "", False, []
    for number, part in enumerate(_MARK.split(str(sample.prompt))):
        if number % 2:  # a mark; one behind the name of a role only ends the name
            in_mark = next((word for word in _ROLES if word in part.lower()), "user" if part == "[INST]" else "")
            role, is_name = in_mark or (role if is_name else ""), False
            continue
        named = _ROLE.match(part) if number and not (role and part.strip().lower() != role) else None
        text = part[named.end() :].strip() if named else part.strip()
        role = named[1].lower() if named else role
        is_name = named is not None and not text
        if text:
            turns.append((role, text))
    asked = [text for role, text in turns if role in ("user", "human")]
    others = [text for role, text in turns if role not in ("system", "assistant")]
    return next(iter([*asked[::-1], *others[::-1]]), prompt_text(sample))


def _said(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def reward_of(sample: Sample, key: str | None) -> float | None:
    """The number in its reward, of a dict that of ``key``; None where there is none."""
    value: Any = sample.reward
    if isinstance(value, dict):
        value = value.get(key)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def list_samples(rollout: Rollout, query: Query) -> dict[str, Any]:
    """One page of the rows that ``query`` leaves, with what the filters can choose from."""
    keys = rollout.reward_keys
    key = query.reward_key or ("score" if "score" in keys else next(iter(keys), None))
    rewards = [reward_of(sample, key) for sample in rollout.samples]
    chosen = [row for row in rollout.rows if _fits(query, rollout.samples[row["place"]], row, rewards[row["place"]])]

    def order(row: dict[str, Any]) -> tuple[bool, float]:
        value = rewards[row["place"]] if query.sort == "reward" else row[query.sort]
        return value is None, 0.0 if value is None else -value if query.descending else value

    chosen.sort(key=order)
    page = chosen[query.offset : query.offset + query.limit]
    of_group: dict[Any, list[float]] = {row["group"]: [] for row in page}
    statuses: dict[str, int] = {}
    for row, reward in zip(rollout.rows, rewards, strict=True):
        statuses[row["status"]] = statuses.get(row["status"], 0) + 1
        if row["group"] in of_group and reward is not None:
            of_group[row["group"]].append(reward)
    means = {group: sum(values) / len(values) for group, values in of_group.items() if values}
    present = [reward for reward in rewards if reward is not None]
    return to_json(
        {
            "rollout_id": rollout.rollout_id,
            "total": len(rollout.rows),
            "matched": len(chosen),
            "train": bool(rollout.train),
            "statuses": statuses,
            "groups": len({row["group"] for row in rollout.rows}),
            "reward_keys": keys,
            "reward_key": key,
            "rewards": [min(present), sum(present) / len(present), max(present)] if present else None,
            "rows": [{**row, "reward": rewards[row["place"]], "group_mean": means.get(row["group"])} for row in page],
        }
    )


def _fits(query: Query, sample: Sample, row: dict[str, Any], reward: float | None) -> bool:
    low, high = query.reward_min, query.reward_max
    if reward is None:
        in_range = low is None and high is None
    else:
        in_range = (low is None or reward >= low) and (high is None or reward <= high)
    return (
        in_range
        and (not query.status or row["status"] == query.status)
        and (query.group is None or row["group"] == query.group)
        and (not query.removed or row["removed"])
        and (not query.versions or len(row["versions"]) > 1)
        and (not query.text or _says(sample, query.text.casefold()))
    )


def _says(sample: Sample, text: str) -> bool:
    return any(text in str(said).casefold() for said in (sample.response, prompt_text(sample), sample.label))


def show_sample(rollout: Rollout, place: int, tokenizer: Any) -> dict[str, Any]:
    """Everything about one sample, its tokens as columns; their texts are None without a tokenizer.

    Raises:
        BadInputError: there is none at ``place``.
    """
    if not 0 <= place < len(rollout.samples):
        raise BadInputError(f"there is no sample {place}: the rollout has {len(rollout.samples)}")
    sample = rollout.samples[place]
    start = len(sample.tokens) - sample.response_length
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} if tokenizer else set()
    columns = {name: _column(sample, name) for name in _COLUMNS} | {"version": sample.token_versions()}
    return to_json(
        {
            **rollout.rows[place],
            "tokens": sample.tokens,
            "texts": tokenizer and token_texts(_decoder(tokenizer), sample.tokens),
            "special": sorted(set(sample.tokens) & special),
            "start": start,
            "columns": {name: values for name, values in columns.items() if values is not None},
            "train": {name: values.tolist() for name, values in rollout.train.get(place, {}).items()},
            "problem": _problem(sample),
            "fields": {k: v for k, v in sample.to_dict().items() if k not in ("tokens", *_COLUMNS)},
        }
    )


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _problem(sample: Sample) -> str | None:
    try:
        sample.check()
    except ValueError as error:
        return str(error)
    return None


def token_texts(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str | None]:
    """Each token's own text; None of one that only begins a character, whose text the token that ends it has."""
    texts: list[str | None] = []
    before = done = 0  # tokens[before:done] are shown already; decoded again, they keep the space that follows them
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith("\ufffd") and end < len(tokens) and end - done < _LONGEST_CHARACTER:
            texts.append(None)
            continue
        texts.append(text[len(shown) :])
        before, done = done, end
        shown = decode(tokens[before:done])
    return texts
