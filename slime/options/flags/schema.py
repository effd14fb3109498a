"""From a documented dataclass field to a command-line flag: the one way in which slime's own options are declared."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slime.options.flags.values import json_value, problem_of
from slime.utils.calls import Call

LARGEST_SEED = 2**32 - 1
"""What numpy takes."""


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    hook: tuple[str, ...] | None = None,
    call: tuple[Call, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    bare: str | None = None,
) -> Any:
    """A dataclass field that becomes a flag.

    Args:
        default: the value where neither flag nor YAML sets it.
        help: what the flag means, for ``--help`` and for readers of the class.
        aliases: further names of the same flag.
        hook: the field holds a function path; the names that a bare file is searched for.
        call: the forms that this function may have.
        at_least: smallest allowed value.
        above: bound that the value must exceed.
        at_most: largest allowed value.
        bare: what the flag without a word means; of a field that is one of several words.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


def function_path(
    signature: str, help: str, names: tuple[str, ...], default: str | None = None, *, may_be_async: bool = False
) -> Any:
    """An `option` that is the path of a function with one form, ``(args) -> None``, with which its help begins."""
    parameters, _, returns = signature[1:].partition(") -> ")
    told = f"Function {signature.removesuffix(' -> None')}{help}"
    return option(default, told, hook=names, call=(Call(parameters, returns, may_be_async=may_be_async),))


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag of a field, ``--rollout-batch-size``."""
    return flag_named(field.name)


def flag_named(name: str) -> str:
    """The flag of an option by its name, such as ``rollout_batch_size``."""
    return "--" + name.replace("_", "-")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object given on the command line; else ArgumentTypeError."""
    try:
        value = json_value(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return value


def positive(text: str) -> int:
    """An int above 0 given on the command line; else ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def beyond_bounds(bounds: Mapping[str, Any], value: Any) -> str | None:
    """How a number breaks the bounds of a field's metadata; None where it does not."""
    at_least, above, at_most, below = (bounds.get(bound) for bound in ("at_least", "above", "at_most", "below"))
    if at_least is not None and not value >= at_least:
        return f"must be at least {at_least}, not {value}"
    if above is not None and not value > above:
        return f"must be above {above}, not {value}"
    if at_most is not None and not value <= at_most:
        return f"must be at most {at_most}, not {value}"
    if below is not None and not value < below:
        return f"must be below {below}, not {value}"
    return None


def bounded(scalar: Callable[[str], Any], bounds: Mapping[str, Any]) -> Callable[[str], Any]:
    """A converter that also checks the bounds, and refuses no text at all: a path of none is the working directory."""

    def convert(text: str) -> Any:
        if not text:
            raise argparse.ArgumentTypeError("is empty: is a shell variable unset?")
        value = scalar(text)
        if problem := problem_of(value) or beyond_bounds(bounds, value):
            raise argparse.ArgumentTypeError(problem)
        return value

    convert.__name__ = scalar.__name__
    return convert


def _add_list(
    group: Any, names: list[str], element: Any, field: dataclasses.Field[Any], common: dict[str, Any]
) -> None:
    """``--x a b`` for a list; for a list of lists every occurrence of the flag adds one."""
    if get_origin(element) is list:
        word = bounded(get_args(element)[0], field.metadata)
        shown = "PATH:FUNCTION" if field.metadata["hook"] is not None else "WORD"
        group.add_argument(*names, action="append", nargs="+", type=word, metavar=shown, **common)
    elif get_origin(element) is Literal:
        group.add_argument(*names, nargs="+", choices=get_args(element), **common)
    else:
        group.add_argument(
            *names, nargs="+", type=bounded(element, field.metadata), metavar=element.__name__.upper(), **common
        )


@functools.cache
def _hints(options: type) -> dict[str, Any]:
    return get_type_hints(options)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add every field of an options class to the parser, in a group titled by the class's docstring."""
    group = parser.add_argument_group((options.__doc__ or options.__name__).strip().rstrip("."))
    hints = _hints(options)
    for field in dataclasses.fields(options):
        annotation = hints[field.name]
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        names = [flag_of(field), *field.metadata["aliases"]]
        common = {"dest": field.name, "default": field.default, "help": field.metadata["help"]}
        if annotation is bool and field.default in (None, True):
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        elif annotation is bool:
            group.add_argument(*names, action="store_const", const=True, **common)
        elif get_origin(annotation) is Literal:
            bare = field.metadata["bare"]
            optional: dict[str, Any] = {} if bare is None else {"nargs": "?", "const": bare}
            group.add_argument(*names, choices=get_args(annotation), **optional, **common)
        elif get_origin(annotation) is list:
            _add_list(group, names, get_args(annotation)[0], field, common)
        elif get_origin(annotation) is dict:
            group.add_argument(*names, type=json_object, metavar="JSON", **common)
        else:
            metavar = "PATH:FUNCTION" if field.metadata["hook"] is not None else annotation.__name__.upper()
            group.add_argument(*names, type=bounded(annotation, field.metadata), metavar=metavar, **common)


def hook_fields(groups: tuple[type, ...]) -> Iterator[dataclasses.Field[Any]]:
    """The fields that hold function paths."""
    for group in groups:
        yield from (field for field in dataclasses.fields(group) if field.metadata.get("hook") is not None)
