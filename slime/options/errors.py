"""The one error that options raise."""

from __future__ import annotations


class OptionError(ValueError):
    """An option, or a combination of options, cannot be used; the message is one line and names the flags."""
