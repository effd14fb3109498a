"""Make training files of ReTool's conversations (JoeYing/ReTool-SFT), whose assistants run Python.

    hf download --repo-type dataset JoeYing/ReTool-SFT --local-dir ReTool-SFT
    python3 examples/retool/sft_data_processing.py ReTool-SFT/data/*.parquet --output-dir data/retool

INPUT are files of rows with chat messages ``messages``, parquet or JSONL, the last message the assistant's. DIR gets
two files with all of them:

    ReTool-SFT.parquet  {"messages": [...]}, role and content: for slime.rollout.sft_rollout, which trains on every word
                        of the assistant's turn, the interpreter's too
    ReTool-SFT.jsonl    {"prompt": [...], "metadata": {"demonstration": [[text, is the model's], ...]}}: for
                        examples.demonstrations, which does not train on the interpreter's words
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.rows.reading import open_rows
from slime.files.storage import reported, write_text, writing

Message = dict[str, str]

NAME = "ReTool-SFT"
_SAID_BY_THE_INTERPRETER = re.compile(r"(\n*<interpreter>.*?</interpreter>\n*)", re.DOTALL)


def conversations(files: Iterable[str]) -> Iterator[list[Message]]:
    """The messages of every row, their roles and contents.

    Raises:
        ValueError: a row without them, or whose last message is not the assistant's; a file that cannot be read.
    """
    for name in files:
        file = open_rows(name)
        for raw in file.raw_rows(["messages"]):
            try:
                row: Any = raw.content if isinstance(raw.content, dict) else json.loads(raw.content or b"null")
                messages = [{key: str(message[key]) for key in ("role", "content")} for message in row["messages"]]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{file.where(raw.number)} has no chat messages under 'messages': {error!r}"
                ) from error
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise ValueError(f"{file.where(raw.number)}: the last of its messages is not an assistant's answer")
            yield messages


def demonstration(answer: str) -> list[tuple[str, bool]]:
    """The assistant's answer in parts, each with whether it is the model's."""
    parts = _SAID_BY_THE_INTERPRETER.split(answer)
    return [(text, number % 2 == 0) for number, text in enumerate(parts) if text]


def write(rows: list[list[Message]], output: Path) -> None:
    """Write both files."""
    import pyarrow
    import pyarrow.parquet

    demonstrated = (
        {"prompt": messages[:-1], "metadata": {"demonstration": demonstration(messages[-1]["content"])}}
        for messages in rows
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in demonstrated)
    write_text("--output-dir", output / f"{NAME}.jsonl", lines)
    with writing("--output-dir", output):
        pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), output / f"{NAME}.parquet")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", help="parquet or JSONL files")
    parser.add_argument("--output-dir", type=Path, default=Path("data/retool"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        rows = list(conversations(args.input))
    except ValueError as error:
        parser.exit(2, f"sft_data_processing.py: error: {error}\n")
    if not rows:
        parser.exit(2, f"sft_data_processing.py: error: no row in {', '.join(args.input)}\n")
    with reported("sft_data_processing.py"):
        write(rows, args.output_dir)
    print(f"{len(rows)} conversations in {args.output_dir}/{NAME}.parquet and {NAME}.jsonl")


if __name__ == "__main__":
    main()
