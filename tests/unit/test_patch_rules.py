"""Packages are changed by records of patches alone, and docs/patches.md has all of these."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.driver.preflight import patch_report
from tools.website.observability_pages import with_tables
from tools.website.patches_page import PAGES, table

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang", "sglang_router", "megatron", "ray", "torch", "transformers")
SETTINGS = ("torch._dynamo.config",)
"""What a package offers to be set."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_has_the_patches_that_there_are(page: Path) -> None:
    assert page.read_text() == with_tables(page.read_text(), [table()]), "run python -m tools.website.patches_page"


def test_the_table_of_a_page_is_made_anew() -> None:
    page = PAGES[0].read_text()
    stale = page.replace("`stand_ins` | sglang", "`stand_ins` | another")
    assert stale != page
    assert with_tables(stale, [table()]) == page
    with pytest.raises(ValueError, match="1 tables too few"):
        with_tables("# No table\n", [table()])


def attributes_set(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and owner of each assignment to an attribute of a package's module or class, as far as names tell."""
    names: dict[str, str] = {}

    def dotted(node: ast.expr | None) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called == "getattr":
                return dotted(node.args[0])
            if called in ("importlib.import_module", "import_module"):
                return ast.unparse(node.args[0]).lstrip("f").strip("'\"")
        return ""

    def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            yield from zip(target.elts, values, strict=False)
        else:
            yield target, value

    set_here: list[tuple[int, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target, value in (pair for each in targets for pair in pairs(each, node.value)):
                if isinstance(target, ast.Attribute):
                    set_here.append((node.lineno, target.value))
                elif isinstance(target, ast.Name) and (owner := dotted(value)):
                    names[target.id] = owner
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            set_here.append((node.lineno, node.args[0]))
    for line, owner in ((line, dotted(node)) for line, node in set_here):
        if owner.split(".")[0] in PACKAGES and not owner.startswith(SETTINGS):
            yield line, owner


@pytest.mark.parametrize(
    ("code", "owner"),
    [
        ("import torch\ntorch.compile = None", "torch"),
        ("import torch.distributed as dist\ndist.all_gather, x = None, 1", "torch.distributed"),
        ("def f():\n    from megatron.core import random\n    random._set = None", "megatron.core.random"),
        ("m: Any = importlib.import_module('sglang.srt.x').Engine\nm.launch = None", "sglang.srt.x.Engine"),
        ("m = importlib.import_module(f'sglang.srt.{x}')\nr = getattr(m, x)\nr.forward = None", "sglang.srt.{x}"),
        ("import torch\nsetattr(torch.Tensor, 'pin_memory', None)", "torch.Tensor"),
        ("import torch\nx = torch.zeros(3)\nx.grad = None", None),
        ("from torch import _dynamo\n_dynamo.config.recompile_limit = 64", None),
        ("import argparse\nargparse.x = None", None),
        ("def f(self):\n    self.torch = None", None),
    ],
)
def test_attributes_that_are_set_are_found(code: str, owner: str | None) -> None:
    assert [found for _, found in attributes_set(ast.parse(code))] == ([owner] if owner else [])


def test_only_files_of_patches_change_packages() -> None:
    """Those of the functions that the records carry out."""
    files = {
        inspect.getsourcefile(inspect.unwrap(patch.apply)) for table in patch_report.TABLES.values() for patch in table
    }
    assert len(files) > 5
    changes = [
        f"{path.relative_to(ROOT)}:{line} sets an attribute of {owner}: make it a record of a patches.py"
        for path in sorted(ROOT.glob("slime/**/*.py"))
        if str(path) not in files
        for line, owner in attributes_set(ast.parse(path.read_text()))
    ]
    assert changes == []
    assert list(attributes_set(ast.parse((ROOT / "slime/backends/sglang/fixes.py").read_text())))
