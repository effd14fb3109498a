"""Evaluation during training; its datasets, from ``--eval-prompt-data`` and ``--eval-config``, with their settings."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from slime.options.errors import OptionError, naming
from slime.options.flags.schema import beyond_bounds, flag_named, function_path, option
from slime.options.flags.values import problem_of, read_yaml
from slime.options.rollout import GENERATE_CALLS, REWARD_CALLS, REWARD_NAMES
from slime.options.rules import Rule

PAIRS, CONFIG = "--eval-prompt-data", "--eval-config"


@dataclass
class EvalOptions:
    """Eval: what is not set here is as for training."""

    eval_interval: int | None = option(None, "Evaluate every so many rollouts, and before the first.", at_least=1)
    skip_eval_before_train: bool = option(False, "No evaluation before the first rollout.")
    eval_prompt_data: list[list[str]] | None = option(
        None,
        "Datasets as pairs NAME PATH, several in one flag or the flag repeated; a PATH alone is named by its file.",
    )
    eval_config: str | None = option(
        None,
        "YAML file of datasets with settings of their own: defaults, and datasets by name; after --eval-prompt-data.",
    )
    eval_function_path: str | None = function_path(
        "(args, rollout_id, data_source, *, evaluation) -> RolloutFnEvalOutput",
        " that evaluates; default --rollout-function-path.",
        ("eval_rollout", "generate_rollout"),
    )
    eval_input_key: str | None = option(None, "Column of the prompt.")
    eval_label_key: str | None = option(None, "Column of the expected answer.")
    eval_tool_key: str | None = option(None, "Column of tool definitions.")
    n_samples_per_eval_prompt: int = option(1, "Responses for each prompt.", at_least=1)
    eval_temperature: float | None = option(None, "Sampling temperature; 0 is greedy.", at_least=0)
    eval_top_p: float | None = option(None, "Nucleus sampling.", above=0, at_most=1)
    eval_top_k: int | None = option(None, "Sample from the k most likely tokens.", at_least=-1)
    eval_max_response_len: int | None = option(None, "Tokens of one response at most.", at_least=1)
    eval_max_prompt_len: int | None = option(
        None, "Longer prompts are left out; at most one less than the context.", at_least=1
    )
    eval_max_context_len: int | None = option(
        None, "Prompt and response tokens together; at most what the engine's context leaves to requests.", at_least=1
    )
    eval_min_new_tokens: int | None = option(None, "Tokens of one response at least.", at_least=0)
    custom_eval_rollout_log_function_path: str | None = function_path(
        "(rollout_id, args, data, extra_metrics) -> bool",
        " that logs an evaluation; True: slime logs only times besides.",
        ("log_eval_rollout_data",),
        may_be_async=True,
    )


RULES = (
    Rule("eval_interval", "needs", "eval_prompt_data eval_config eval_function_path"),
    Rule("eval_min_new_tokens", "is more than", "eval_max_response_len"),
    Rule("eval_min_new_tokens", "is more than", "rollout_max_response_len", when="!eval_max_response_len"),
    Rule("eval_interval", "needs engines, and", "placement=train_only", " starts none", "!load_debug_rollout_data"),
)


@dataclass(frozen=True)
class EvalDataset:
    """An evaluation dataset as ``args.eval_datasets`` has it, every value resolved; the names are keys of the YAML.

    ``rm_type``, ``custom_rm_path`` and ``custom_generate_function_path`` are None where the dataset has none of its
    own: then it is judged, or generated, as training is.
    """

    name: str = option(None, "Its metrics are eval/<name>.")
    path: str = option(None, "JSONL or parquet file; path@[a:b] takes a slice of its rows.")
    rm_type: str | None = option(None, "Built-in reward, before --custom-rm-path and the rows' metadata.")
    custom_rm_path: str | None = option(None, "Reward function.", hook=REWARD_NAMES, call=REWARD_CALLS)
    input_key: str = option("input", "Column of the prompt.")
    label_key: str | None = option(None, "Column of the expected answer.")
    tool_key: str | None = option("tools", "Column of tool definitions.")
    metadata_key: str | None = option("metadata", "Column of further fields.")
    apply_chat_template: bool = option(False, "Render chat messages with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] | None = option(None, "Arguments of the chat template.")
    n_samples_per_eval_prompt: int = option(1, "Responses for each prompt.", at_least=1)
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy.", at_least=0)
    top_p: float = option(1.0, "Nucleus sampling.", above=0, at_most=1)
    top_k: int = option(-1, "Sample from the k most likely tokens; -1 is all.", at_least=-1)
    max_response_len: int | None = option(None, "Tokens of one response at most.", at_least=1)
    stop: list[str] | None = option(None, "Strings that end a response.")
    stop_token_ids: list[int] | None = option(None, "Token ids that end a response.", at_least=0)
    min_new_tokens: int | None = option(None, "Tokens of one response at least.", at_least=0)
    repetition_penalty: float | None = option(None, "SGLang's; 1 is none.", above=0, at_most=2)
    skip_special_tokens: bool = option(False, "Leave special tokens out of the response text.")
    no_stop_trim: bool = option(True, "Keep the stop string in the response text.")
    custom_generate_function_path: str | None = option(
        None, "Function that generates one sample.", hook=("generate", "custom_generate"), call=GENERATE_CALLS
    )
    metadata_overrides: dict[str, Any] | None = option(None, "Set in the metadata of every sample.")
    source: str = PAIRS
    """Who named it, for messages; no key."""
    named_by: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    """Its other keys, each with the flag, or the key of the file, that set it, for messages; no key."""

    def __str__(self) -> str:
        return f"{self.source} {self.name}"


FIELDS = {field.name: field for field in dataclasses.fields(EvalDataset) if field.metadata}
_HINTS = get_type_hints(EvalDataset)
_FLAGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}
"""Where a value comes from that neither dataset nor defaults set: the first of these that is not None."""
_REWARD = ("rm_type", "custom_rm_path")
_NO_EFFECT = (
    *("app_service", "eval_task_timeout", "min_eval_samples", "eval_early_stop_remaining", "message_processor"),
    *("eval_early_stop_idle_timeout", "reward_model", "remote_environment"),
)
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping of names"}


def eval_datasets(args: Namespace) -> list[EvalDataset]:
    """The datasets of ``--eval-prompt-data``, then of ``--eval-config``; OptionError: a bad file, key or value, a name
    twice."""
    datasets: dict[str, EvalDataset] = {}
    for dataset in [*_from_pairs(args), *_from_config(args)]:
        if dataset.name in datasets:
            other = datasets[dataset.name].source
            again = " twice" if other == dataset.source else f", and so does {other}"
            raise OptionError(f"{dataset.source} names {dataset.name!r}{again}")
        datasets[dataset.name] = dataset
    return list(datasets.values())


def data_file(flag: str, path: str) -> str:
    """The path of a data file, absolute, with its slice; OptionError where there is none."""
    file, bracket, rest = path.partition("@[")
    if not os.path.isfile(os.path.expanduser(file)):
        raise OptionError(f"{flag} {path}: there is no such file" + (f" as {file}" if bracket else ""))
    return os.path.abspath(os.path.expanduser(file)) + bracket + rest


def _from_pairs(args: Namespace) -> Iterator[EvalDataset]:
    for words in args.eval_prompt_data or []:
        if len(words) == 1:
            words = [Path(words[0].partition("@[")[0]).stem, words[0]]
        if len(words) % 2:
            raise OptionError(f"{PAIRS} takes pairs NAME PATH, not {len(words)} words: {' '.join(words)}")
        for name, path in zip(words[::2], words[1::2], strict=True):
            yield _resolved(args, {"name": name, "path": data_file(PAIRS, path)}, PAIRS)


def _from_config(args: Namespace) -> Iterator[EvalDataset]:
    if args.eval_config is None:
        return
    source = f"{CONFIG} {args.eval_config}:"
    content = _sections(args.eval_config, source)
    defaults = _values(content.get("defaults"), f"{source} defaults", without=("name", "path"))
    for name, entry in _named(content.get("datasets"), source):
        values = {"name": name} | _values(entry, f"{source} {name}")
        if "path" not in values:
            raise OptionError(f"{source} {name}: path is missing")
        values["path"] = data_file(f"{source} {name}: path", values["path"])
        if any(key in values for key in _REWARD):  # its own reward is not that of the defaults, whichever kind that is
            values = dict.fromkeys(_REWARD) | values
        dataset = _resolved(args, defaults | values, source)
        _check(dataset)
        yield dataset


def _sections(path: str, source: str) -> dict[str, Any]:
    """``defaults`` and ``datasets``, which may stand below ``eval``."""
    with naming(source):
        content = read_yaml(path)
    if isinstance(content, Mapping) and set(content) == {"eval"}:
        content = content["eval"]
    if not isinstance(content, Mapping) or not content.get("datasets"):
        raise OptionError(f"{source} there are no datasets in it: write `datasets:` (below `eval:`, if you like)")
    for key in content:
        if key not in ("defaults", "datasets"):
            raise OptionError(f"{source} unknown key {key!r}: there are defaults and datasets")
    return dict(content)


def _named(datasets: Any, source: str) -> Iterator[tuple[str, Any]]:
    """Name and settings of each dataset, of a list of mappings with a ``name`` or of a mapping by name."""
    if isinstance(datasets, Mapping):
        entries = list(datasets.items())
    elif isinstance(datasets, list):
        entries = [(entry.pop("name", None) if isinstance(entry, dict) else None, entry) for entry in datasets]
    else:
        raise OptionError(f"{source} datasets: neither a list nor a mapping by name, but {datasets!r:.60}")
    for position, (name, entry) in enumerate(entries):
        if isinstance(datasets, list) and not isinstance(entry, Mapping):
            raise OptionError(f"{source} dataset {position}: not a mapping (name, path, ...), but {entry!r:.60}")
        if not isinstance(name, str) or not name:
            raise OptionError(f"{source} dataset {position}: its name must be text, not {name!r}")
        if isinstance(entry, Mapping) and "name" in entry:
            raise OptionError(f"{source} {name}: a dataset by name has no key 'name'")
        yield name, entry


def _values(section: Any, where: str, without: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of one section, checked; what is null is not set."""
    if not isinstance(section or {}, Mapping):
        raise OptionError(f"{where}: not a mapping of keys to values, but {section!r:.60}")
    values = {}
    for key, value in (section or {}).items():
        field = None if key in without else FIELDS.get(key)
        if field is None:
            raise OptionError(f"{where}: {_explain(key, without)}")
        if value is not None:
            values[key] = _checked(field, value, f"{where}: {key}")
    if all(key in values for key in _REWARD):
        raise OptionError(f"{where}: rm_type and custom_rm_path exclude each other")
    return values


def _explain(key: Any, without: Iterable[str]) -> str:
    if key == "multimodal_keys":
        return "multimodal_keys is not available yet in this version"
    if key in _NO_EFFECT:
        return f"{key} has no effect in the upstream system and none here: drop it"
    close = difflib.get_close_matches(str(key), [name for name in FIELDS if name not in without], n=3, cutoff=0.6)
    return f"unknown key {key!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _checked(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    hint = _HINTS[field.name]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    is_list = get_origin(hint) is list
    kind = get_args(hint)[0] if is_list else get_origin(hint) or hint
    values = value if is_list and isinstance(value, list) else [value]
    if not all(_is(item, kind) for item in values):
        raise OptionError(f"{where} must be {'a list, each ' if is_list else ''}{_KINDS[kind]}, not {value!r:.60}")
    if "" in values:
        raise OptionError(f"{where} {'has an empty text in it' if is_list else 'is empty'}: drop it, or write null")
    problem = problem_of(value) or next((bad for item in values if (bad := beyond_bounds(field.metadata, item))), None)
    if problem is not None:
        raise OptionError(f"{where} {problem}")
    return values if is_list else value


def _is(value: Any, kind: type) -> bool:
    if kind is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _resolved(args: Namespace, values: dict[str, Any], source: str) -> EvalDataset:
    by_flag, named_by = {}, {}
    for key, flags in _FLAGS.items():
        found = [flag for flag in flags if getattr(args, flag) is not None]
        if found:
            by_flag[key], named_by[key] = getattr(args, found[0]), flag_named(found[0])
    named_by |= {key: key for key in values}
    return EvalDataset(source=source, named_by=tuple(named_by.items()), **(by_flag | values))


def _check(dataset: EvalDataset) -> None:
    if dataset.top_k == 0:
        raise OptionError(f"{dataset}: top_k must be -1 (all) or at least 1, not 0")
    least, most = dataset.min_new_tokens, dataset.max_response_len
    if least is not None and most is not None and least > most:
        raise OptionError(f"{dataset}: min_new_tokens {least} is more than max_response_len {most}")
