"""Function paths of the command line: loaded once, before anything starts, and made what workers can load."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.options.errors import OptionError, naming
from slime.options.eval_datasets import EvalDataset, EvalOptions
from slime.options.flags.schema import flag_of, hook_fields
from slime.options.rollout import GROUP_REWARD_NAMES
from slime.utils.calls import Call, form_of
from slime.utils.misc import attribute_of, find_function, load_function, load_module, split_function_path

if TYPE_CHECKING:  # the documentation is built of the options without numpy
    from slime.data import Column

_DECLARED = "COLUMNS"
"""What a module of the user's calls the columns that it adds to those of `slime.data.columns`."""


def load_hooks(args: Namespace, given: set[str], groups: tuple[type, ...]) -> None:
    """Load the given function paths of these groups' options, and make them what workers can load; or OptionError."""
    args.column_modules = []
    for field in hook_fields(groups):
        value = getattr(args, field.name)
        if field.name not in given or value is None:
            continue
        flag, names, calls = flag_of(field), field.metadata["hook"], field.metadata["call"]
        if field.name == "custom_rm_path" and args.group_rm:
            names = GROUP_REWARD_NAMES
        if isinstance(value, list):  # the flag may be repeated
            found: Any = [_loaded(path, flag, names, calls) for paths in value for path in paths]
        else:
            found = _loaded(value, flag, names, calls)
        setattr(args, field.name, found)
        for path in [found] if isinstance(found, str) else found:
            _note_columns(args, path, f"{flag} {path}")
    _check_model_inputs(args)


def _note_columns(args: Namespace, path: str, where: str) -> None:
    from slime.data import Column, ColumnError
    from slime.data.columns import COLUMNS

    source, _ = split_function_path(path)
    if source in args.column_modules:
        return
    declared = attribute_of(load_module(source), _DECLARED, None, where)
    # A module may have something else of that name, or slime's own table.
    if declared is COLUMNS or not isinstance(declared, (tuple, list)):
        return
    are_columns = [isinstance(column, Column) for column in declared]
    if not any(are_columns):
        return
    if not all(are_columns):
        raise OptionError(f"{where}: {_DECLARED} of its module has Columns and other things")
    args.column_modules = [*args.column_modules, source]
    with naming(f"{where}:", ColumnError):
        columns_of(args)


def _check_model_inputs(args: Namespace) -> None:
    """slime's own models take tokens alone."""
    inputs = [c.name for c in columns_of(args) if c.model_input is not None or c.load is not None]
    if inputs and args.custom_model_provider_path is None:
        raise OptionError(f"column {inputs[0]} is for the model's forward call: add --custom-model-provider-path")


def columns_of(args: Namespace) -> tuple[Column, ...]:
    """The columns of a run with these options: slime's own, and those that modules of the user's functions declare."""
    from slime.data.columns import top_columns, with_declared
    from slime.data.routes import route_columns

    declared = (column for source in args.column_modules for column in getattr(load_module(source), _DECLARED))
    return with_declared(declared, (*route_columns(args), *top_columns(args)))


def _loaded(path: str, where: str, names: Sequence[str], calls: tuple[Call, ...]) -> str:
    """The path of a function that loads; a file's is absolute and names the function, since workers run elsewhere."""
    try:
        function, name = find_function(path, flag=where, default_names=names)
    except ValueError as error:
        raise OptionError(str(error)) from error
    form_of(function, calls, f"{where} {path}")
    source, _ = split_function_path(path)
    if not source.endswith(".py"):
        return path
    return f"{os.path.abspath(os.path.expanduser(source))}:{name}"


def load_evaluation_hooks(args: Namespace) -> None:
    """As `load_hooks`, for the functions of evaluation datasets."""
    datasets = []
    for dataset in args.eval_datasets:
        paths: dict[str, Any] = {}
        for field in hook_fields((EvalDataset,)):
            path, where = getattr(dataset, field.name), f"{dataset}: {field.name}"
            if path is not None:
                paths[field.name] = _loaded(path, where, field.metadata["hook"], field.metadata["call"])
        datasets.append(dataclasses.replace(dataset, **paths))
    args.eval_datasets = datasets


def check_evaluation_hook(args: Namespace, given: set[str]) -> None:
    """A rollout function that evaluates too must be told when."""
    if args.eval_interval is None or "eval_function_path" in given:
        return
    (field,) = (field for field in hook_fields((EvalOptions,)) if field.name == "eval_function_path")
    path = args.eval_function_path
    form_of(load_function(path), field.metadata["call"], f"--rollout-function-path {path}, which also evaluates")
