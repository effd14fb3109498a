"""Rows of JSONL and parquet files, one at a time, with ``path@[a:b]`` slices."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import BadInputError

_SLICE = re.compile(r"@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]$")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_PARQUET_BATCH = 1024


@dataclass(frozen=True)
class Row:
    """One row of a file: its value, or what is wrong with it."""

    where: str
    """File and line (JSONL) or row (parquet), counted from 1."""
    value: dict[str, Any] | None
    problem: str | None = None


def split_slice(path: str) -> tuple[Path, slice]:
    """``"data.jsonl@[10:-5]"`` as ``(Path("data.jsonl"), slice(10, -5))``; without a slice, all rows.

    Raises:
        BadInputError: what follows ``@[`` is no slice of two integers.
    """
    match = _SLICE.search(path)
    if match is None:
        if "@[" in path:
            raise BadInputError(f"{path}: a slice is written path@[start:stop], with integers or nothing")
        return Path(path).expanduser(), slice(None)
    start, stop = (int(bound) if bound else None for bound in match.groups())
    return Path(path[: match.start()]).expanduser(), slice(start, stop)


def read_rows(path: str) -> Iterator[Row]:
    """The rows of ``path``, which may end in a slice; blank lines are no rows.

    Negative bounds count from the end, as in Python, and cost a first pass that counts.

    Raises:
        BadInputError: no such file, an unknown suffix, or a parquet file that does not open.
    """
    file, bounds = split_slice(path)
    if not file.is_file():
        raise BadInputError(f"there is no file {file}")
    if file.suffix == ".parquet":
        return _read_parquet(file, bounds)
    if file.suffix not in _JSON_SUFFIXES:
        raise BadInputError(f"{file}: unknown suffix {file.suffix!r}; use {', '.join(_JSON_SUFFIXES)} or .parquet")
    return _read_json_lines(file, bounds)


def _start_stop(bounds: slice, total: int | None) -> tuple[int, int | None]:
    """Absolute bounds; ``total`` may be None where none is negative."""
    if total is None:
        return bounds.start or 0, bounds.stop
    start, stop, _ = bounds.indices(total)
    return start, max(start, stop)


def _read_json_lines(file: Path, bounds: slice) -> Iterator[Row]:
    total = None
    if min(bounds.start or 0, bounds.stop or 0) < 0:
        with file.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
    start, stop = _start_stop(bounds, total)
    with file.open("rb") as lines:
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in itertools.islice(numbered, start, stop):
            yield _json_row(f"{file}, line {number}", line)


def _json_row(where: str, line: bytes) -> Row:
    try:
        value = json.loads(line.rstrip())  # with its end, what breaks off there would be at column 1 of a line 2
    except UnicodeDecodeError as error:
        return Row(where, None, f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        return Row(where, None, f"not JSON: {error.msg} at column {error.colno}; one object a line is expected")
    if not isinstance(value, dict):
        return Row(where, None, f"a JSON object is expected, this is {_kind(value)}; one object a line (JSONL)")
    return Row(where, value)


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")


def _read_parquet(file: Path, bounds: slice) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{file} is no readable parquet file: {error}") from error
    with table:
        start, stop = _start_stop(bounds, table.metadata.num_rows)
        values = (row for batch in table.iter_batches(_PARQUET_BATCH) for row in batch.to_pylist())
        for number, value in itertools.islice(enumerate(values, 1), start, stop):
            yield Row(f"{file}, row {number}", value)
