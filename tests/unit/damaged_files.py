"""Damaged data files: what a seeded generator makes of good rows, and which of them can still be read."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Damaged:
    """A file, and what reading it has to come to."""

    kind: str
    path: Path
    kept: list[str]
    """Labels of the rows that survive."""
    bad: list[int] | None
    """Lines or rows to blame, from 1; None: the file as a whole is refused."""


def good(rng: random.Random, n: int) -> list[dict[str, Any]]:
    """Rows whose labels tell them apart."""
    words = ["sum", "of", "é", "漢字", "🙂", "\\", '"', "{", "x=1", "\u2028"]
    return [
        {
            "prompt": f"question {i} " + " ".join(rng.choices(words, k=rng.randrange(1, 9))),
            "label": f"a{i}",
            "metadata": {"id": i, "deep": {"list": [1, 2.5, None, True]}},
        }
        for i in range(n)
    ]


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


LINES: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
    "cut in the middle": lambda row: json.dumps(row)[: len(json.dumps(row)) // 2],
    "cut by one": lambda row: json.dumps(row)[:-1],
    "one brace too many": lambda row: json.dumps(row) + "}",
    "two rows in a line": lambda row: json.dumps(row) * 2,
    "comma behind it": lambda row: json.dumps(row) + ",",
    "Python's quotes": lambda row: repr(row),
    "key without quotes": lambda row: json.dumps(row).replace('"prompt"', "prompt"),
    "a key twice": lambda row: json.dumps(row)[:-1] + ', "label": "other"}',
    "a nested key twice": lambda row: json.dumps(row).replace('{"id"', '{"id": 0, "id"'),
    "lone high surrogate in the prompt": lambda row: json.dumps(row | {"prompt": "a\ud83d"}),
    "lone low surrogate in the prompt": lambda row: json.dumps(row | {"prompt": "\udc00a"}),
    "surrogate in the label": lambda row: json.dumps(row | {"label": "\ud83d"}),
    "surrogate in the metadata": lambda row: json.dumps(row | {"metadata": {"a": ["\udfff"]}}),
    "surrogate in a key": lambda row: json.dumps(row | {"metadata": {"\ud800": 1}}),
    "surrogate in JSON text": lambda row: json.dumps(row | {"metadata": '{"a": "\\ud800"}'}),
    "100,000 brackets": lambda row: json.dumps(row)[:-1] + f', "x": {nested(100_000)}}}',
    "100,000 open brackets": lambda row: "[" * 100_000,
    "100,000 braces": lambda row: '{"a":' * 100_000,
    "label of 200 brackets": lambda row: '{"prompt": "p", "label": ' + nested(200) + "}",
    "JSON text of 100,000 brackets": lambda row: json.dumps(row | {"metadata": nested(100_000)}),
    "number of 5,000 digits": lambda row: json.dumps(row)[:-1] + f', "n": {"7" * 5000}}}',
    "JSON text with 5,000 digits": lambda row: json.dumps(row | {"metadata": '{"a": ' + "1" * 5000 + "}"}),
    "label NaN": lambda row: json.dumps(row | {"label": float("nan")}),
    "label -Infinity": lambda row: json.dumps(row | {"label": float("-inf")}),
    "label 1e999": lambda row: json.dumps(row | {"label": 0}).replace('"label": 0', '"label": 1e999'),
    "NaN in a list of labels": lambda row: json.dumps(row | {"label": ["a", float("nan")]}),
    "NaN in the metadata": lambda row: json.dumps(row | {"metadata": {"a": {"b": float("nan")}}}),
    "1e999 in JSON text": lambda row: json.dumps(row | {"metadata": '{"a": 1e999}'}),
    "invalid UTF-8": lambda row: json.dumps(row).encode().replace(b"question", b"quest\xffon"),
    "cut UTF-8": lambda row: json.dumps(row).encode().replace(b"question", b"quest\xe6\xbc"),
    "Latin-1": lambda row: b'{"prompt": "caf\xe9", "label": "x"}',
    "overlong UTF-8": lambda row: b'{"prompt": "\xc0\xaf", "label": "x"}',
    "UTF-8 surrogate": lambda row: b'{"prompt": "\xed\xa0\x80", "label": "x"}',
    "a NUL in text": lambda row: json.dumps(row).encode().replace(b"question", b"quest\0ion"),
    "a line of NULs": lambda row: b"\0" * 4096,
    "control character": lambda row: json.dumps(row).replace("question", "quest\x01ion"),
    "byte-order mark in the middle": lambda row: BOM + json.dumps(row).encode(),
    "an array": lambda row: json.dumps([row]),
    "a string": lambda row: json.dumps("row"),
    "a number": lambda row: "17",
    "null": lambda row: "null",
    "no JSON": lambda row: "prompt,label",
    "a bare word": lambda row: "NaN",
    "no prompt": lambda row: json.dumps({"label": "x"}),
    "no label": lambda row: json.dumps({"prompt": "x"}),
    "an empty object": lambda row: "{}",
    "prompt null": lambda row: json.dumps(row | {"prompt": None}),
    "prompt empty": lambda row: json.dumps(row | {"prompt": ""}),
    "prompt an object": lambda row: json.dumps(row | {"prompt": {"text": "x"}}),
    "prompt an empty list": lambda row: json.dumps(row | {"prompt": []}),
    "prompt a list of numbers": lambda row: json.dumps(row | {"prompt": [1, 2]}),
    "label null": lambda row: json.dumps(row | {"label": None}),
    "label an object": lambda row: json.dumps(row | {"label": {"answer": "x"}}),
    "metadata a list": lambda row: json.dumps(row | {"metadata": [1]}),
    "metadata a number": lambda row: json.dumps(row | {"metadata": 5}),
    "metadata no JSON": lambda row: json.dumps(row | {"metadata": "{'a': 1}"}),
    "metadata with a key twice": lambda row: json.dumps(row | {"metadata": '{"a": 1, "a": 2}'}),
    "tools an object": lambda row: json.dumps(row | {"tools": {"a": 1}}),
    "unknown rm_type": lambda row: json.dumps(row | {"metadata": {"rm_type": "bogus"}}),
    "rm_type no text": lambda row: json.dumps(row | {"metadata": {"rm_type": ["math"]}}),
}
"""What stands in place of one row, which is then bad."""

HARMLESS: dict[str, Callable[[list[bytes]], bytes]] = {
    "byte-order mark": lambda lines: BOM + b"\n".join(lines),
    "CRLF": lambda lines: b"\r\n".join(lines) + b"\r\n",
    "no line end at the end": lambda lines: b"\n".join(lines),
    "blank lines": lambda lines: b"\n\n  \n\t\n".join(lines) + b"\n\n",
    "spaces around": lambda lines: b"\n".join(b"  " + line + b" \t" for line in lines),
    "a huge line": lambda lines: b"\n".join([*lines, lines[0][:-1] + b', "unread": "' + b"x" * 3_000_000 + b'"}']),
    "odd values nobody reads": lambda lines: b"\n".join(line[:-1] + b', "\\ud800": [NaN, 1e999]}' for line in lines),
}
"""What looks like damage and is none."""

WHOLE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("x.jsonl", lambda content: b""),
    "only blank lines": ("x.jsonl", lambda content: b"\n \n\r\n\t\n"),
    "only a byte-order mark": ("x.jsonl", lambda content: BOM),
    "UTF-16": ("x.jsonl", lambda content: content.decode().encode("utf-16")),
    "UTF-16, big end first": ("x.jsonl", lambda content: b"\xfe\xff" + content.decode().encode("utf-16-be")),
    "gzip by another name": ("x.jsonl", gzip.compress),
    "gzip that is cut": ("x.jsonl.gz", lambda content: gzip.compress(content)[:-20]),
    "parquet by another name": ("x.json", lambda content: b"PAR1" + content),
    "no parquet": ("x.parquet", lambda content: content),
    "an empty parquet": ("x.parquet", lambda content: b""),
    "unknown suffix": ("x.csv", lambda content: content),
    "no suffix": ("x", lambda content: content),
}
"""Files that hold no row, or are of another kind than their names say."""


def damaged_files(directory: Path, seed: int) -> Iterator[Damaged]:
    """Write the files, a folder each."""
    rng = random.Random(seed)

    def place(name: str) -> Path:
        path = directory / f"{len(list(directory.iterdir()))}" / name
        path.parent.mkdir(parents=True)
        return path

    for kind, damage in LINES.items():
        rows = good(rng, rng.randrange(2, 8))
        lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5).encode() for row in rows]
        position = rng.randrange(1, len(rows))
        made = damage(rows[position])
        lines[position] = made if isinstance(made, bytes) else made.encode()
        path = place(rng.choice(("x.jsonl", "x.json", "x.ndjson")))
        path.write_bytes(b"\n".join(lines))
        kept = [row["label"] for row in rows if row is not rows[position]]
        yield Damaged(kind, path, kept, [position + 1])
    for kind, join in HARMLESS.items():
        rows = good(rng, 4)
        path = place("x.jsonl")
        path.write_bytes(join([json.dumps(row).encode() for row in rows]))
        kept = [row["label"] for row in rows]
        yield Damaged(kind, path, [*kept, "a0"] if kind == "a huge line" else kept, [])
    for kind, (name, change) in WHOLE.items():
        path = place(name)
        path.write_bytes(change(b"\n".join(json.dumps(row).encode() for row in good(rng, 3))))
        yield Damaged(kind, path, [], None)
    yield Damaged("a directory", place("x.jsonl/y").parent, [], None)
    yield from _parquet_files(rng, place)


def _parquet_files(rng: random.Random, place: Callable[[str], Path]) -> Iterator[Damaged]:
    import pyarrow
    import pyarrow.parquet

    rows = good(rng, 12)
    labels = [row["label"] for row in rows]
    columns = {
        "prompt": pyarrow.array([row["prompt"] + "p" * 300 for row in rows]),
        "label": pyarrow.array(labels),
        "metadata": pyarrow.array([json.dumps(row["metadata"]) for row in rows]),
        "unread": pyarrow.array(["u" * 300] * len(rows)),
    }

    def written(**changes: Any) -> bytes:
        path = place("whole.parquet")
        pyarrow.parquet.write_table(
            pyarrow.table(columns | changes), path, row_group_size=4, compression="none", use_dictionary=False
        )
        return path.read_bytes()

    def file(content: bytes) -> Path:
        path = place("x.parquet")
        path.write_bytes(content)
        return path

    whole = written()
    yield Damaged("parquet, cut behind", file(whole[:-9]), [], None)
    yield Damaged("parquet, cut in the middle", file(whole[: len(whole) // 2]), [], None)
    yield Damaged("parquet, cut in front", file(whole[100:]), [], list(range(1, 13)))
    yield Damaged("parquet, footer overwritten", file(whole[:-60] + b"\xff" * 50 + whole[-10:]), [], None)
    for group in range(3):
        broken = _broken(whole, place("whole.parquet"), group, 0)
        left = labels[: 4 * group] + labels[4 * group + 4 :]
        yield Damaged(f"parquet, page {group} broken", file(broken), left, list(range(4 * group + 1, 4 * group + 5)))
    broken = _broken(whole, place("whole.parquet"), 0, 3)
    yield Damaged("parquet, page of an unread column broken", file(broken), labels, [])
    text = [row["prompt"].encode() for row in rows]
    bad = rng.randrange(12)
    text[bad] = b"\xff\xfe"
    raw = pyarrow.array(text, pyarrow.binary())
    view = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    kept = [*labels[:bad], *labels[bad + 1 :]]
    yield Damaged("parquet, invalid UTF-8", file(written(prompt=view)), kept, [bad + 1])
    numbers = [1.5] * 12
    numbers[bad] = float("nan")
    yield Damaged("parquet, label NaN", file(written(label=pyarrow.array(numbers))), ["1.5"] * 11, [bad + 1])
    nothing: list[Any] = list(labels)
    nothing[bad] = None
    yield Damaged("parquet, label null", file(written(label=pyarrow.array(nothing))), kept, [bad + 1])
    pairs: list[Any] = [[("a", 1)]] * 12
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    yield Damaged("parquet, metadata a MAP", file(written(metadata=pyarrow.array(pairs, kind))), labels, [])
    pairs[bad] = [("a", 1), ("a", 2)]
    twice = pyarrow.array(pairs, kind)
    yield Damaged("parquet, MAP with a key twice", file(written(metadata=twice)), kept, [bad + 1])
    dates = pyarrow.array([2**62] * 12, pyarrow.timestamp("us"))
    yield Damaged("parquet, unread dates without a year", file(written(unread=dates)), labels, [])
    empty = place("x.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns).slice(0, 0), empty)
    yield Damaged("parquet without rows", empty, [], None)
    table = pyarrow.table([columns["prompt"], columns["label"], columns["label"]], names=["prompt", "label", "label"])
    twofold = place("x.parquet")
    pyarrow.parquet.write_table(table, twofold)
    yield Damaged("parquet, a column twice", twofold, [], None)
    raw = pyarrow.array([b"bytes"] * 12)
    yield Damaged("parquet, prompt of bytes", file(written(prompt=raw)), [], list(range(1, 13)))


def _broken(content: bytes, path: Path, group: int, column: int) -> bytes:
    """``content`` with the header of a column's first page in a row group overwritten."""
    import pyarrow.parquet

    path.write_bytes(content)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(group).column(column).data_page_offset
    return content[:start] + b"\xff" * 20 + content[start + 20 :]
