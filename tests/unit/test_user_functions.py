"""Errors of users' functions: whose it is, how it is called, what it raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.utils.errors import BadInputError, HookError
from slime.utils.user_functions import call_user_function

NUM_GPUS = 0


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from slime.utils.errors import BadInputError\n"
        "def adds(a, b, *, c=0): return a + b + c\n"
        "def deep(a, b):\n    return inner(a)\n"
        "def inner(a):\n    raise KeyError('boom')\n"
        "def ours(a, b): raise BadInputError('row 3')\n"
        "async def later(a, b): pass\n"
        "def hides(a, b): return later(a, b)\n"
        "class Callable:\n    def __init__(self, a, b): self.sum = a + b\n"
    )
    return path


def test_values_by_position_and_keywords_by_name(functions: Path) -> None:
    path = f"{functions}:adds"
    assert call_user_function("--flag", path, {"x": 1, "y": 2}) == 3
    assert call_user_function("--flag", path, {"x": 1, "y": 2}, {"c": 4}) == 7
    assert call_user_function("--flag", f"{functions}:Callable", {"x": 1, "y": 2}).sum == 3


def test_what_it_raises_comes_with_its_own_traceback(functions: Path) -> None:
    with pytest.raises(HookError) as error:
        call_user_function("--flag", f"{functions}:deep", {"args": 1, "samples": 2})
    lines = str(error.value).splitlines()
    assert lines[0] == f"--flag {functions}:deep raised KeyError: 'boom'"
    assert [line.split(", in ")[1] for line in lines if line.startswith("  File")] == ["deep", "inner"]
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(HookError, match=re.escape(f"--flag {functions}:ours raised BadInputError: row 3")):
        call_user_function("--flag", f"{functions}:ours", {"args": 1, "samples": 2})


def test_a_path_that_is_not_there(functions: Path) -> None:
    with pytest.raises(BadInputError, match=r"--flag .*mine.py:add: .*did you mean adds"):
        call_user_function("--flag", f"{functions}:add", {})


@pytest.mark.filterwarnings("error")
def test_a_coroutine_is_not_dropped_in_silence(functions: Path) -> None:
    with pytest.raises(HookError, match=r"^--flag .*mine.py:hides returned a coroutine, which nobody awaits here"):
        call_user_function("--flag", f"{functions}:hides", {"args": 1, "samples": 2})
