"""Megatron's flags, made from the dataclasses of the installed megatron-core, and the way back into them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from slime.options.flags.installed import PendingFlags
from slime.options.flags.megatron_names import BOUNDS, DEFAULTS, DEST_OF, FLAGS, HIDDEN
from slime.options.flags.schema import bounded, flag_named

PACKAGE = "megatron-core"
READER = "import sys; from slime.options.flags.megatron import write_fields; write_fields(sys.argv[1])"

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def write_fields(path: str) -> None:
    """Write a record of every field that can be a flag; imports megatron-core, so it runs in a process of its own."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    records: dict[str, dict[str, Any]] = {}
    for cls in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        docs = _field_docs(cls)
        for field in dataclasses.fields(cls):
            record = _record(field, docs.get(field.name, ""))
            if record is not None and field.name not in records and field.name not in HIDDEN:
                records[field.name] = record
    Path(path).write_text(json.dumps(list(records.values())))


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field, of the class and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return docs


def _record(field: dataclasses.Field[Any], doc: str) -> dict[str, Any] | None:
    """What a flag for this field looks like, or None where no flag can stand for its type."""
    kind, nargs, choices = _kind(field.type)
    if kind is None or field.name.startswith("_"):
        return None
    default: Any = None
    if field.default is not dataclasses.MISSING:
        default = field.default
    if isinstance(default, enum.Enum):
        default = default.name
    elif kind == "dtype":
        default = next((short for short, long in _DTYPES.items() if str(default) == f"torch.{long}"), None)
    flags = [flag_named(field.name)]
    return {
        "flags": flags,
        "field": field.name,
        "kind": kind,
        "nargs": nargs,
        "choices": choices,
        "default": default,
        "help": doc,
    }


def _kind(annotation: Any) -> tuple[str | None, str | None, list[Any] | None]:
    """Converter, nargs and choices of a type; no converter for a type that is not written on a command line."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in get_args(annotation) if a is not type(None)]
        lists = [a for a in members if get_origin(a) is list]
        if len(members) == 2 and len(lists) == 1:  # a value, or a list of such values
            kind, _, choices = _kind(next(a for a in members if a is not lists[0]))
            return kind, "+", choices
        return _kind(members[0]) if len(members) == 1 else (None, None, None)
    if get_origin(annotation) is Literal:
        return "str", None, list(get_args(annotation))
    if get_origin(annotation) is list:
        kind, _, choices = _kind(get_args(annotation)[0])
        return kind, "*", choices
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "str", None, [member.name for member in annotation]
    if str(annotation) == "<class 'torch.dtype'>":
        return "dtype", None, list(_DTYPES)
    simple = {bool: "bool", int: "int", float: "float", str: "str"}
    return (simple.get(annotation), None, None) if isinstance(annotation, type) else (None, None, None)


def add_megatron_flags(parser: argparse.ArgumentParser, pending: PendingFlags, taken: set[str]) -> None:
    """Add the table's flags and one for every field that neither the table nor ``taken`` (slime's options) declares."""
    records = pending.result()
    group = parser.add_argument_group("Megatron: flags of Megatron-LM")
    for flag in FLAGS:
        common: dict[str, Any] = {"dest": flag.dest, "default": flag.default, "help": flag.help}
        if flag.const is not None:
            group.add_argument(flag.name, action="store_const", const=flag.const, **common)
        else:
            metavar = None if flag.choices else flag.convert.__name__.upper()
            group.add_argument(
                flag.name, type=_checked(flag.convert, flag.dest), choices=flag.choices, metavar=metavar, **common
            )
    declared = {flag.dest for flag in FLAGS if flag.const is None} | set(DEST_OF) | taken
    group = parser.add_argument_group("Megatron configuration: fields of megatron-core's dataclasses")
    existing = set(parser._option_string_actions)
    for record in records:
        if record["field"] not in declared:
            _add_field(group, record, existing)


def _add_field(group: Any, record: dict[str, Any], existing: set[str]) -> None:
    name, flag = record["field"], record["flags"][0]
    default = DEFAULTS.get(name, record["default"])
    common = {"dest": name, "default": default, "help": record["help"].replace("%", "%%")}
    if record["kind"] != "bool":
        converters: dict[str, Callable[[str], Any]] = {"int": _integer, "float": float}
        convert = _checked(converters.get(record["kind"], str), name)
        metavar = None if record["choices"] else record["kind"].upper()
        group.add_argument(
            flag, type=convert, nargs=record["nargs"], choices=record["choices"], metavar=metavar, **common
        )
        return
    group.add_argument(flag, action="store_const", const=True, **common)
    opposite = "--no-" + flag[2:]
    if opposite not in existing:
        common["help"] = f"The opposite of {flag}."
        group.add_argument(opposite, action="store_const", const=False, **common)


def _checked(convert: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    return bounded(convert, BOUNDS.get(name, {"at_least": 0})) if convert in (int, float, _integer) else convert


def _integer(text: str) -> int:
    """An integer; 1e6 is one too."""
    value = float(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"not an integer: {text!r}")
    return int(text) if text.lstrip("+-").isdigit() else int(value)


def config_kwargs(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The arguments for a megatron-core dataclass, by its own field names: whatever differs from the field's default.

    ``args`` holds Megatron-LM's names; ``--swiglu``, the precision and renamed fields are translated.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    kwargs: dict[str, Any] = {}
    for name, field in fields.items():
        value = getattr(args, DEST_OF.get(name, name), None)
        if name not in HIDDEN and value is not None:
            value = _to_field(value, field)
            if value != field.default:
                kwargs[name] = value
    return kwargs | {name: value for name, value in _computed(args).items() if name in fields}


def _to_field(value: Any, field: dataclasses.Field[Any]) -> Any:
    if isinstance(field.default, enum.Enum):
        return type(field.default)[value]
    if isinstance(value, str) and value in _DTYPES and str(field.type) == "<class 'torch.dtype'>":
        import torch

        return getattr(torch, _DTYPES[value])
    members = get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else ()
    takes_one = any(get_origin(a) is not list for a in members if a is not type(None))
    return value[0] if takes_one and isinstance(value, list) and len(value) == 1 else value


def _computed(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, args.params_dtype)
    computed: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": args.params_dtype == "bfloat16",
        "fp16": args.params_dtype == "float16",
    }
    if args.swiglu:
        computed |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return computed
