"""The one error that options raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class OptionError(ValueError):
    """An option, or a combination of options, cannot be used; the message is one line and names the flags."""


class Reasons:
    """All reasons why a command line is refused, so that nobody learns them one a try.

    A rule that raises `OptionError` leaves values unset that later rules need: what those then stumble over is no
    reason of its own.
    """

    def __init__(self, found: Iterable[str] = ()) -> None:
        self._found = list(found)

    def of(self, rule: Callable[..., Any], *values: Any) -> Any:
        """What a rule returns, or None where it or one before it refuses."""
        try:
            return rule(*values)
        except OptionError as error:
            self._found.append(str(error))
        except Exception:
            if not self._found:
                raise
        return None

    def end(self) -> None:
        """Refuse the command line if there is any reason.

        Raises:
            OptionError: with all of them.
        """
        if self._found:
            raise OptionError("; ".join(dict.fromkeys(self._found)))
