"""The one error that options raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.utils.errors import BadInputError


class OptionError(BadInputError):
    """An option, or a combination of options, cannot be used; the message is one line and names the flags."""


@contextmanager
def naming(what: str, *others: type[Exception]) -> Iterator[None]:
    """Within the block a ValueError, or one of these others, becomes an OptionError that begins with ``what``."""
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        raise OptionError(f"{what} {' '.join(str(error).split())}") from error


class Reasons:
    """All reasons why a command line is refused, so that nobody learns them one a try.

    A rule that refuses leaves values unset that later rules need: what those then stumble over is no
    reason of its own.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def of(self, rule: Callable[..., Any], *values: Any) -> Any:
        """What a rule returns, or None where it or one before it refuses."""
        try:
            return rule(*values)
        except BadInputError as error:
            self._found.append(str(error))
        except Exception:
            if not self._found:
                raise
        return None

    def end(self) -> None:
        """Raise an OptionError with all reasons, if there is any."""
        if self._found:
            raise OptionError("; ".join(dict.fromkeys(self._found)))
