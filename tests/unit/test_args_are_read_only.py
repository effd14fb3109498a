"""Nothing writes to the options after they were parsed: what follows later is a copy, or has a place of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PARSING = ("slime/options/", "slime/entry/", "slime/convert/arguments.py")
"""What parses is what makes them."""
FILES = [path for path in sorted(ROOT.glob("slime/**/*.py")) if not str(path.relative_to(ROOT)).startswith(PARSING)]
_NAMES = ("args", "_args")
_CHANGES = ("update", "pop", "setdefault", "clear")


def writes(tree: ast.AST) -> Iterator[str]:
    """By attribute, of ``args``, ``self._args`` or ``run.args``; by `setattr` and `delattr`; in the dict of `vars`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            target = node.value
            if isinstance(node, ast.Subscript):
                target = _behind_vars(target)
            if _is_args(target):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in ("setattr", "delattr") and _is_args(node.args[0]):
                yield ast.unparse(node)
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method and method.attr in _CHANGES and _is_args(_behind_vars(method.value)):
            yield ast.unparse(method)


def _is_args(node: ast.AST | None) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in _NAMES


def _behind_vars(node: ast.AST) -> ast.AST | None:
    """What ``vars(...)`` or ``....__dict__`` is of."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return node.args[0]
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__dict__" else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_writes_to_them(file: Path) -> None:
    assert list(writes(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("args.num_rollout = 3", True),
        ("self._args.a, b = 1, 2", True),
        ("run.args.a += 1", True),
        ("del args.a", True),
        ("setattr(self.args, name, 1)", True),
        ("vars(args)['a'] = 1", True),
        ("vars(args).update(a=1)", True),
        ("args.__dict__.pop('a')", True),
        ("self._args = Namespace(**vars(args) | {'a': 1})", False),
        ("own.a = args.a", False),
        ("args = run.start()", False),
    ],
)
def test_a_write_is_found(code: str, found: bool) -> None:
    assert bool(list(writes(ast.parse(code)))) == found
