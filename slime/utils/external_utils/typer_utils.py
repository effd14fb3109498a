"""A function of one dataclass as a command of typer's, in which every field is a flag and a variable."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from slime.utils.errors import BadInputError


def dataclass_cli(func: Callable[[Any], Any], env_var_prefix: str = "SLIME_SCRIPT_") -> Callable[..., Any]:
    """For ``typer.run`` or ``app.command()``: field ``num_nodes`` is ``--num-nodes`` and ``SLIME_SCRIPT_NUM_NODES``.
    ``func`` has one parameter, annotated with the dataclass; the command returns what ``func`` does with it.
    BadInputError where it has not, or typer is not installed."""
    try:
        import typer
    except ModuleNotFoundError as error:
        raise BadInputError("dataclass_cli needs typer: pip install typer") from error
    parameters = list(inspect.signature(func).parameters)
    kind = get_type_hints(func, include_extras=True).get(parameters[0]) if len(parameters) == 1 else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise BadInputError(f"{func.__qualname__}: dataclass_cli takes a function of one parameter, a dataclass")
    hints = get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]

    def command(**values: Any) -> Any:
        return func(kind(**values))

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        option = typer.Option(envvar=f"{env_var_prefix}{field.name.upper()}")
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=Annotated[hints[field.name], option],
        )

    command.__name__, command.__qualname__, command.__doc__ = func.__name__, func.__qualname__, func.__doc__
    command.__signature__ = inspect.Signature([parameter(field) for field in fields])  # type: ignore[attr-defined]
    return command
