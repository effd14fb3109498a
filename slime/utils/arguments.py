"""Upstream's name for `slime.entry.arguments`."""

from slime.entry.arguments import parse_args

__all__ = ["parse_args"]
