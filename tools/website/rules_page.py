"""The table of docs/option_rules.md and docs/zh/option_rules.md, made from the rules that slime/options declares.

    python -m tools.website.rules_page

writes it into both pages. Every module there is looked through, so that a new table is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import slime.options
from slime.options.checks.unheeded import Unheeded
from slime.options.rules import Rule
from tools.website.observability_pages import with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "option_rules.md", ROOT / "docs" / "zh" / "option_rules.md")
_WORDS = {
    "no --asynchronous": "train.py",
    "--needs-reference": "use of a reference model",
    "--reward-baseline": "rewards compared within a group",
    "no --use-critic": "no critic",
    "--use-critic": "a critic",
    "--params-dtype bfloat16": "bfloat16",
    "--placement other than rollout_only": "no --debug-rollout-only",
    "--placement other than train_only": "no --debug-train-only",
    "--placement colocate or disaggregate": "training and engines",
    "--placement disaggregate": "slots kept apart",
}
"""What rows call by an attribute that is derived, and so is not a flag."""
_DERIVED = re.compile("|".join(map(re.escape, _WORDS)))
_TWO_SPELLINGS = re.compile(r"([\w.]+)\.(\w+) or \1:\2")
_CODE = re.compile(r"(?<![\w`-])--[a-z][\w-]*|\b[\w]+(?:\.[\w]+){2,}|\btrain(?:_async)?\.py\b")


def rules() -> Iterator[tuple[str, Rule]]:
    """Each row once, with the path of its module below slime/options: the groups' first, then those of checks."""
    found: dict[Rule, str] = {}
    for module in sorted(_modules(), key=_order):
        for table in vars(module).values():
            for row in filter(None, map(_rule, table)) if isinstance(table, tuple) else ():
                found.setdefault(row, module.__name__.removeprefix("slime.options.").replace(".", "/") + ".py")
    for row, path in found.items():
        yield path, row


def _order(module: ModuleType) -> tuple[bool, int, str]:
    name = module.__name__
    return ".checks." in name, name.count("."), name


def _rule(row: object) -> Rule | None:
    """A row of any table, if it is about options."""
    if isinstance(row, Unheeded):
        return Rule(row.names, "is ignored", why=f": {row.why}", when=row.when)
    return row if isinstance(row, Rule) else None


def _modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(slime.options.__path__, "slime.options."):
        yield importlib.import_module(module.name)


def table() -> str:
    """The table's rows: where each is declared, what it says, and when."""
    lines = []
    for path, row in rules():
        sentence = str(replace(row, when=""))
        when = str(row).removesuffix(sentence).removeprefix("With ").removesuffix(": ")
        cells = (f"`{path}`", _markdown(sentence), _markdown(when))
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return "".join(f"{line}\n" for line in lines)


def _markdown(sentence: str) -> str:
    words = _DERIVED.sub(lambda found: _WORDS[found[0]], sentence)
    words = _TWO_SPELLINGS.sub(r"\1.\2", words)
    return _CODE.sub(lambda found: f"`{found[0]}`", words)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), [table()]))
