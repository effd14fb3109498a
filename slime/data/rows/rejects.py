"""Rows of a data file that cannot be used: shown and counted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from slime.utils.errors import BadInputError

_SHOWN = 5
_CUT = re.compile(r": |; | at (?:position|byte|column) ")
_NUMBER = re.compile(r"\d+")


@dataclass
class Rejects:
    """The bad rows of a file: an error in the end, or counted where ``--skip-bad-rows`` says so."""

    count: int = 0
    shown: list[str] = field(default_factory=list)
    """A line each for the first few: file, row and problem."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many rows have which problem, without what differs from row to row."""

    def add(self, where: str, problem: str) -> None:
        """Take note of one bad row, in the order of the file."""
        self.count += 1
        self.reasons[reason(problem)] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{where}: {' '.join(problem.split())}")

    def by_reason(self) -> str:
        """The most frequent reasons, with how many rows have each."""
        most = self.reasons.most_common(_SHOWN)
        rest = self.count - sum(count for _, count in most)
        return "; ".join([f"{count} x {name}" for name, count in most] + [f"{rest} x others"] * bool(rest))

    def refuse(self, flag: str, num_read: int) -> None:
        """Raise BadInputError if there are bad rows: one line, or one for each of the first and one with the count."""
        if not self.count:
            return
        lines = [f"{flag} {line}" for line in self.shown]
        way_out = "--skip-bad-rows leaves such rows out and counts them"
        if self.count == 1:
            raise BadInputError(f"{lines[0]} ({way_out})")
        first = f", the first {len(lines)} are above" if self.count > len(lines) else ""
        total = f"{flag}: {self.count} of {num_read} rows are bad{first} ({way_out}): {self.by_reason()}"
        raise BadInputError("\n".join([*lines, total]))


def reason(problem: str) -> str:
    """The kind of a problem: its text up to what tells of the one row."""
    parts = _CUT.split(problem)
    text = ": ".join(parts[:2]) if parts[0].startswith("not ") and len(parts) > 1 else parts[0]
    return _NUMBER.sub("N", text)[:120]
