"""Secrets on this process's command line, which others can read for as long as the process lives."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.utils.redaction import REDACTED, is_flag, redacted_words

_ARG_START = 45
"""Place, behind the program's name in /proc/self/stat, of the address at which the command line begins."""


def strike_secrets() -> None:
    """Replace the values of flags that are named for secrets, such as ``--wandb-key``, once they have been parsed: in
    ``sys.argv``, which W&B records, and in the kernel's copy, which ``ps`` shows to every user of the host and from
    which Ray takes the name of a job."""
    sys.argv[1:] = redacted_words(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError, IndexError):  # of a kernel that has no such files, or hides them
        _overwrite()


def show() -> None:
    """Copy a command line, whose words end with a zero byte, from standard input to output, without its secrets."""
    words = sys.stdin.buffer.read().decode(errors="surrogateescape").split("\0")
    shown = "\0".join(redacted_words(words))
    sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without the flags that are named for secrets, and those, each with its values."""
    groups: list[list[str]] = [[]]
    for word in words:
        if is_flag(word):
            groups.append([])
        groups[-1].append(word)
    shown = [word for group in groups if redacted_words(group) == group for word in group]
    return shown, [word for group in groups if redacted_words(group) != group for word in group]


def secrets_of(words: Sequence[str]) -> tuple[str, ...]:
    """The secrets themselves of a command line, those of JSON one by one: a log may show each alone."""
    pairs = zip(words, redacted_words(words), strict=True)
    return tuple(secret for word, shown in pairs if word != shown for secret in _struck(_value(word), _value(shown)))


def _struck(value: Any, shown: Any) -> Iterator[str]:
    """The texts in ``value`` that ``shown``, of the same shape, has not; a text that is JSON as what it says."""
    if value == shown or not value:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _struck(inner, shown[name] if isinstance(shown, dict) else REDACTED)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _struck(inner, shown[index] if isinstance(shown, list) else REDACTED)
    elif isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        yield value
        with contextlib.suppress(ValueError):
            yield from _struck(json.loads(value), REDACTED if shown == REDACTED else json.loads(shown))
    else:
        yield str(value)


def _value(word: str) -> str:
    return word[_value_start(word) :]


def _value_start(word: str) -> int:
    """Where a word's value begins: behind ``--name=``; of what is not a flag, or has none, at its begin."""
    return word.find("=") + 1 if is_flag(word) else 0


def _overwrite() -> None:
    line = Path("/proc/self/cmdline").read_bytes()
    address = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[_ARG_START])
    if address == 0 or ctypes.string_at(address, len(line)) != line:
        return
    words = line.split(b"\0")
    for word, shown in zip(words, redacted_words([each.decode("latin-1") for each in words]), strict=True):
        if shown != word.decode("latin-1"):
            kept = _value_start(word.decode("latin-1"))
            ctypes.memset(address + kept, ord("*"), len(word) - kept)
        address += len(word) + 1
