"""Values that are written as small expressions on the command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from itertools import groupby

_MOST_LAYERS = 10_000


def layer_pattern(text: str) -> int | list[int]:
    """An interval ``4``, or one entry a layer: ``[0,1,1]``, ``([1]*3+[0]*1)*12``; else ArgumentTypeError."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"neither a number nor a list such as [0]*3+[1]*89: {text!r}") from error
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [item for element in node.elts if isinstance(item := _evaluate(element), int)]
        if len(items) == len(node.elts):
            return items
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > _MOST_LAYERS:
                raise ValueError("too many layers")
            return left * right
    raise ValueError(ast.dump(node))


def written_pattern(layers: Sequence[int]) -> str:
    """A list as `layer_pattern` reads it, its runs shortened: ``[0]*3+[1]*58``."""
    return "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(layers))
