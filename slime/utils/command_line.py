"""Secrets on this process's command line, which others can read for as long as the process lives.

Those of a Ray job are not on it: its submitter leaves them with that Ray, and the driver takes them away. The job's
command line and its environment would not do: `ray job list` shows both, Ray's logs the second as well, and ps wherever
one of the job's workers starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.utils.errors import BadInputError
from slime.utils.redaction import REDACTED, is_flag, redacted_words

_ARG_START = 45
"""Place, behind the program's name in /proc/self/stat, of the address at which the command line begins."""
JOB_VARIABLE = "SLIME_JOB_SECRET_FLAGS"
"""Under which name its Ray keeps a job's flags, in the job's environment."""
_PROTOCOL = "gcs"
_FIRST = "the secret flags of a job"
"""In front, as Ray logs the first 15 bytes of a package that it could not keep."""
_ANSWER_S = 60


def strike_secrets() -> None:
    """Replace the values of flags that are named for secrets, such as ``--wandb-key``, once they have been parsed.

    In ``sys.argv``, which W&B records, and in the kernel's copy, which ``ps`` shows to every user of the host and from
    which Ray takes the name of a job.
    """
    sys.argv[1:] = redacted_words(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError, IndexError):  # of a kernel that has no such files, or hides them
        _overwrite()


def given_words() -> list[str]:
    """This command line with, once, what was left out of it if it is a job's; BadInputError if Ray has that no more."""
    place = os.environ.pop(JOB_VARIABLE, "")
    if not place:
        return sys.argv[1:]
    kept = _take(place)
    if kept is None:
        raise BadInputError(
            f"{JOB_VARIABLE}: this Ray has the job's secret flags no more; it keeps them for 10 minutes and for one "
            "start of train.py: submit the job again"
        )
    return [*sys.argv[1:], *(str(word) for word in json.loads(kept)[1:])]


def package(words: Sequence[str]) -> tuple[str, str, bytes]:
    """The value of `JOB_VARIABLE`, a path of a Ray's job server and bytes to PUT: it keeps words for 10 minutes."""
    name = f"slime_{secrets.token_hex(16)}"
    return f"{_PROTOCOL}://{name}", f"/api/packages/{_PROTOCOL}/{name}", json.dumps([_FIRST, *words]).encode()


def _take(place: str) -> bytes | None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    address = os.environ.get("RAY_ADDRESS", "")
    try:
        store = GcsClient(address=address)
        kept: bytes | None = store.internal_kv_get(place.encode(), timeout=_ANSWER_S)
        store.internal_kv_del(place.encode(), False, timeout=_ANSWER_S)
    except (RayError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise BadInputError(
            f"{JOB_VARIABLE}: the Ray at RAY_ADDRESS={address} does not give the job's secret flags ({why}): "
            "submit the job again"
        ) from error
    return kept


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
    """Where a word's value begins: behind ``--name=``; of what is no flag, or has none, at its begin."""
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
