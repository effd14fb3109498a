"""Pages of the site that are made from the code: they are written at each build, and cannot be out of date."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.entry.arguments import GROUPS
from slime.options.flags.parser import StrictParser
from slime.options.flags.schema import add_options, flag_of, hook_fields

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "slime" / "data" / "sample.py"


def flags_page() -> str:
    """Every flag of slime's own, by the groups of ``--help``."""
    lines = [
        "# All flags",
        "",
        "Every flag of slime's own, as `python3 train.py --help` lists them; [flags by task](../flags.md) says which "
        "to take for what. `--help megatron`, `sglang` and `router` list those that the installed packages bring.",
    ]
    for title, actions in _groups():
        heading, _, rest = title.partition(": ")
        lines += ["", f"## {heading}", "", *([f"{rest[0].upper()}{rest[1:]}."] if rest else [])]
        for action in actions:
            lines += _flag(action)
    return "\n".join(lines) + "\n"


def _groups() -> Iterator[tuple[str, list[argparse.Action]]]:
    parser = StrictParser()
    for group in GROUPS:
        add_options(parser, group)
    yield from ((group.title or "", group._group_actions) for group in parser._action_groups if group._group_actions)


def _flag(action: argparse.Action) -> list[str]:
    """A heading of its own for each flag, which the search finds: so low that the page's contents leave it out."""
    name, *aliases = (f"`{name}`" for name in action.option_strings)
    told = [_takes(action), f"default: {_default(action)}", *(f"also {alias}" for alias in aliases)]
    return ["", f"#### {name}", "", "; ".join(filter(None, told)), "", _text(action.help or "")]


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "a switch"
    if action.choices is not None:
        takes = f"one of {', '.join(f'`{choice}`' for choice in action.choices)}"
    else:
        takes = f"`{action.metavar}`"
    if action.nargs == "?":
        return f"{takes}; alone it means `{action.const}`"
    return f"{takes}, one or more" if action.nargs == "+" else takes


def _default(action: argparse.Action) -> str:
    if action.default in (None, "", [], {}):
        return "not set"
    return "off" if action.default is False else f"`{action.default}`"


def hooks_page() -> str:
    """Every flag that takes a function's path: how the function is called, and what it is for."""
    lines = [
        "# Hooks",
        "",
        "Flags that take a function of yours, as `package.module:function` or `path/to/file.py:function`. "
        "[Your own reward and environment](../customize.md) has examples, and programs that check a function before "
        "a run.",
        "",
        "Parameters before `*` are passed by position, those behind it by name: one with a default only to functions "
        "that have it. `async` functions may be plain ones, too; `[async]` ones may be `async`.",
    ]
    for group in GROUPS:
        rows = [_hook_row(field) for field in hook_fields((group,))]
        if rows:
            heading = (group.__doc__ or group.__name__).partition(":")[0]
            lines += ["", f"## {heading}", "", "| flag | called as | |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _hook_row(field: dataclasses.Field[Any]) -> str:
    calls = "<br>".join(f"`{call}`" for call in field.metadata["call"])
    return _row(f"`{flag_of(field)}`", calls, _text(field.metadata["help"]))


def sample_page() -> str:
    """The fields of `Sample`: names, types and defaults of the class, words of docs/customize.md."""
    told = sample_words((ROOT / "docs" / "customize.md").read_text())
    rows, shown = [], dict[str, str]()
    for name, kind, default in sample_fields():
        first = shown.setdefault(told[name], name)
        rows.append(_row(f"`{name}`", f"`{kind}`", f"`{default}`", told[name] if first == name else f"see `{first}`"))
    lines = [
        "# Sample",
        "",
        "`slime.data.Sample` is one prompt and one response, or part of one: what generate functions, rewards and "
        "filters get. [How it is used](../customize.md#a-samples-fields).",
        "",
        "| field | type | default | |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def sample_fields() -> Iterator[tuple[str, str, str]]:
    """Name, type and default of each, read from the source: the site needs no numpy."""
    tree = ast.parse(SAMPLE.read_text())
    (sample,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Sample")
    for node in sample.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            made = re.fullmatch(r"field\(default_factory=(\w+)\)", ast.unparse(node.value))
            empty = {"list": "[]", "dict": "{}"}
            default = empty.get(made[1], f"{made[1]}()") if made else ast.unparse(node.value)
            yield node.target.id, ast.unparse(node.annotation), default


def sample_words(page: str) -> dict[str, str]:
    """What the table of fields in docs/customize.md says of each; a row may be about several."""
    (table,) = re.findall(r"^\| (?:field|字段) \| \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)
    return {name: words for names, words in rows for name in re.findall(r"`(\w+)`", names)}


def _text(words: str) -> str:
    """argparse's text as Markdown: flags are code, and nothing else is markup."""
    plain = words.replace("%%", "%").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return re.sub(r"(?<![\w-])--[a-z][\w\\-]+", lambda flag: f"`{flag[0]}`".replace("\\", ""), plain)


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(cell: str) -> str:
    return re.sub(r"(?<!\\)\|", "\\\\|", cell)


GENERATED: dict[str, Callable[[], str]] = {
    "docs/reference/flags.md": flags_page,
    "docs/reference/hooks.md": hooks_page,
    "docs/reference/sample.md": sample_page,
}
"""By the path that the page would have in the repository."""
