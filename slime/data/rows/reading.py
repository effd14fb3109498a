"""Rows of JSONL and parquet files, one at a time, with ``path@[a:b]`` slices."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slime.utils.errors import BadInputError

_SLICE = re.compile(r"@\[\s*(-?\d{1,18})?\s*:\s*(-?\d{1,18})?\s*\]$")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_PARQUET_BATCH = 1024
_LONGEST_LINE = 1 << 30
_OTHER_FILES = {
    codecs.BOM_UTF16_LE: "is UTF-16: write it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16: write it as UTF-8",
    b"\x1f\x8b": "is compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: unpack it",
    b"PAR1": "is a parquet file: name it .parquet",
}


class RawRow(NamedTuple):
    """One row as a file has it: a line of JSONL, the values of a row of parquet, or what is wrong with it."""

    number: int
    """Of the line (JSONL) or row (parquet), from 1."""
    content: bytes | dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True)
class RowFile:
    """A file of rows, or a slice of them."""

    path: Path
    bounds: slice

    @property
    def is_parquet(self) -> bool:
        """Whether it is parquet, and not JSONL."""
        return self.path.suffix == ".parquet"

    def where(self, number: int) -> str:
        """How messages name a row."""
        return f"{self.path}, {'row' if self.is_parquet else 'line'} {number}"

    def raw_rows(self, keys: Iterable[str] | None = None) -> Iterator[RawRow]:
        """The rows in the order of the file; blank lines are none. Of parquet, columns that hold none of ``keys``
        (None: all are read) are None. BadInputError where the file cannot be read."""
        try:
            yield from _parquet(self, keys) if self.is_parquet else _json_lines(self)
        except OSError as error:
            raise BadInputError(f"{self.path} cannot be read: {_one_line(error)}") from error


def split_slice(path: str) -> tuple[Path, slice]:
    """``"data.jsonl@[10:-5]"`` as ``(Path("data.jsonl"), slice(10, -5))``; without a slice, all rows. BadInputError
    where what follows ``@[`` is not a slice of two integers."""
    match = _SLICE.search(path)
    if match is None:
        if "@[" in path:
            raise BadInputError(f"{path}: a slice is written path@[start:stop], with integers or nothing")
        return Path(os.path.expanduser(path)), slice(None)
    start, stop = (int(bound) if bound else None for bound in match.groups())
    return Path(os.path.expanduser(path[: match.start()])), slice(start, stop)


def open_rows(path: str) -> RowFile:
    """The file of ``path``, which may end in a slice. BadInputError where there is none, its suffix is unknown, or it
    is plainly another kind of file."""
    file, bounds = split_slice(path)
    try:
        found, is_directory = file.is_file(), file.is_dir()
    except (OSError, ValueError) as error:  # nothing that may be entered, or no name of a file
        raise BadInputError(f"{file}: {_one_line(error)}") from error
    if not found:
        raise BadInputError(f"{file} is a directory" if is_directory else f"there is no file {file}")
    if file.suffix != ".parquet" and file.suffix not in _JSON_SUFFIXES:
        raise BadInputError(f"{file}: unknown suffix {file.suffix!r}; use {', '.join(_JSON_SUFFIXES)} or .parquet")
    return RowFile(file, bounds)


def _start_stop(bounds: slice, total: int | None) -> tuple[int, int | None]:
    """Absolute bounds; ``total`` may be None where none is negative."""
    if total is None:
        return bounds.start or 0, bounds.stop
    start, stop, _ = bounds.indices(total)
    return start, max(start, stop)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _json_lines(source: RowFile) -> Iterator[RawRow]:
    with source.path.open("rb") as file:
        begin = file.read(4)
        for mark, problem in _OTHER_FILES.items():
            if begin.startswith(mark):
                raise BadInputError(f"{source.path} {problem}")
    total = None
    if min(source.bounds.start or 0, source.bounds.stop or 0) < 0:
        total = sum(1 for _ in _lines(source.path))
    start, stop = _start_stop(source.bounds, total)
    for number, line in itertools.islice(_lines(source.path), start, stop):
        yield RawRow(number, line)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without their ends and a byte-order mark, and their numbers."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE:
                raise BadInputError(f"{path}, line {number}: it is longer than {_LONGEST_LINE >> 30} GiB")
            # With its end, what breaks off there would be at column 1 of a line 2.
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip()
            if line:
                yield number, line


def value_of(row: RawRow) -> tuple[dict[str, Any] | None, str | None]:
    """The value of a row, or what is wrong with it."""
    line = row.content
    if not isinstance(line, bytes):
        return line, row.problem
    if b"\0" in line:
        return None, "not JSON: it has NUL bytes, as files have that were not written to their end"
    try:
        value = parse_json(line.decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start + 1} of the line"
    except JsonError as error:
        return None, f"not JSON: {error}; one object a line is expected"
    if not isinstance(value, dict):
        return None, f"a JSON object is expected, this is {_kind(value)}; one object a line (JSONL)"
    return value, None


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")


def _parquet(source: RowFile, keys: Iterable[str] | None) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(source.path, page_checksum_verification=True)
        names = table.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInputError(f"{source.path} is not a readable parquet file: {_one_line(error)}") from error
    # Keys are the names of columns or, where none has it, begin with one and a dot.
    wanted = names if keys is None else {key if key in names else key.partition(".")[0] for key in keys}
    columns = [name for name in names if name in wanted]
    for name in columns:
        if names.count(name) > 1:
            raise BadInputError(f"{source.path} has the column {name!r} twice")
    unread = dict.fromkeys(name for name in names if name not in columns)
    with table:
        start, stop = _start_stop(source.bounds, table.metadata.num_rows)
        first, stop = 0, table.metadata.num_rows if stop is None else stop
        for group in range(table.num_row_groups):
            end = first + table.metadata.row_group(group).num_rows
            if end > start and first < stop:
                for row in _row_group(table, group, columns, range(first + 1, end + 1)):
                    if start < row.number <= stop:
                        yield row._replace(content={**unread, **row.content}) if isinstance(row.content, dict) else row
            first = end


def _row_group(table: Any, group: int, columns: list[str], numbers: range) -> Iterator[RawRow]:
    """The rows of one group; from a page on that does not read, all have that problem."""
    import pyarrow

    done = 0
    if not columns:
        yield from (RawRow(number, {}) for number in numbers)
        return
    try:
        for batch in table.iter_batches(_PARQUET_BATCH, row_groups=[group], columns=columns):
            for row in _values(batch, numbers[done:]):
                yield row
                done += 1
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"row group {group} cannot be read from here on: {_one_line(error)}"
        yield from (RawRow(number, None, problem) for number in numbers[done:])


def _values(batch: Any, numbers: range) -> Iterator[RawRow]:
    try:
        values = batch.to_pylist(maps_as_pydicts="strict")
    except Exception:  # whatever one value does not become: text that is not UTF-8, a date beyond the year 9999
        values = [None] * batch.num_rows
    for position, (number, value) in enumerate(zip(numbers, values, strict=False)):
        yield RawRow(number, value) if value is not None else _one_value(batch.slice(position, 1), number)


def _one_value(batch: Any, number: int) -> RawRow:
    try:
        return RawRow(number, batch.to_pylist(maps_as_pydicts="strict")[0])
    except Exception as error:
        return RawRow(number, None, f"a value of it cannot be read: {_one_line(error)}")


_DEEPEST = 100
_NOT_FINITE = "which is not a number: write null, or leave such rows out"


class JsonError(ValueError):
    """Why a text is not JSON, in one line."""


def parse_json(text: str) -> Any:
    """What a JSON text holds; JsonError where it is not JSON, names a key twice, is nested too deeply, or has a number
    too long to be read."""
    try:
        return _DECODER.decode(text)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"{error.msg} at {at}") from error
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except ValueError as error:  # Python refuses to make an integer of so many digits
        raise JsonError("it has a number of too many digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise JsonError(f"it has the key {twice!r:.60} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def value_problem(value: Any, room: int = _DEEPEST) -> str | None:
    """Why no sample can carry a value, to follow its name; None where one can.

    Text with half of a surrogate pair is not UTF-8, so that no tokenizer, engine or log takes it. NaN and infinity are
    no JSON, and every comparison with them fails. What is nested very deeply cannot be copied between processes.
    """
    if isinstance(value, str):
        return None if value.isascii() else _surrogate(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is or holds {value}, {_NOT_FINITE}"
    if not isinstance(value, (dict, list, tuple)):
        return None
    if not room:
        return f"is nested more than {_DEEPEST} deep"
    if not isinstance(value, dict):
        return next(filter(None, (value_problem(item, room - 1) for item in value)), None)
    for key, item in value.items():
        if not isinstance(key, str):
            return f"has the key {key!r:.60}, which is not text"
        if (problem := _surrogate(key) or value_problem(item, room - 1)) is not None:
            return problem
    return None


def _surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half a character ({text[error.start]!a}, a surrogate without its pair) at position {error.start}"
    return None
