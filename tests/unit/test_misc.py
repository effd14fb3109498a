"""Function paths: every accepted form, and an error that says what is missing."""

from __future__ import annotations

import collections
import secrets
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slime.utils import misc
from slime.utils.errors import BadInputError
from slime.utils.misc import load_function

NUM_GPUS = 0


@pytest.fixture
def hook_file(tmp_path: Path) -> Path:
    file = tmp_path / f"hook_{secrets.token_hex(4)}.py"
    file.write_text(
        "COUNT = [1]\n"
        "def reward_func(x):\n    return x + 1\n"
        "class Box:\n    @staticmethod\n    def open():\n        return 'open'\n"
    )
    return file


@pytest.mark.parametrize("path", ["collections.OrderedDict", "collections:OrderedDict"])
def test_dotted_and_colon_form(path: str) -> None:
    assert load_function(path) is collections.OrderedDict


def test_file_form_is_loaded_once(hook_file: Path) -> None:
    function = load_function(f"{hook_file}:reward_func")
    assert function(41) == 42
    assert load_function(f"{hook_file}:reward_func") is function
    assert load_function(f"{hook_file}:Box.open")() == "open"
    assert function.__globals__["COUNT"] == [1]


def test_relative_file_and_absolute_file_are_one_module(hook_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hook_file.parent)
    assert load_function(f"{hook_file.name}:reward_func") is load_function(f"{hook_file}:reward_func")


def test_one_relative_path_in_two_directories_is_two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(f"def reward_func():\n    return {name!r}\n")
        monkeypatch.chdir(tmp_path / name)
        found.append(load_function("own.py:reward_func")())
    assert found == ["a", "b"]


def test_a_loaded_file_that_goes_away_stays_loaded(hook_file: Path) -> None:
    function = load_function(f"{hook_file}:reward_func")
    hook_file.unlink()
    assert load_function(f"{hook_file}:reward_func") is function


def test_bare_file_takes_the_first_default_name(hook_file: Path) -> None:
    assert load_function(str(hook_file), default_names=("custom_rm", "reward_func", "Box"))(1) == 2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("collections.OrderedDcit", "collections has no 'OrderedDcit'; did you mean OrderedDict"),
        ("slime.utils.tipes.Sample", "there is no module 'slime.utils.tipes'; did you mean slime.utils.types"),
        (
            "slime.utils.processing_utils.load_tokenizer",
            "there is no module 'slime.utils.processing_utils'; slime.rollout",
        ),
        ("no_such_package.sub.fn", "there is no module 'no_such_package'"),
        ("/no/such/file.py:fn", "there is no file /no/such/file.py"),
        ("function", "names no function"),
        ("sys:version", "'version' is a str, not a function or class"),
    ],
)
def test_error_names_flag_path_and_what_is_missing(path: str, expected: str) -> None:
    import slime.utils  # noqa: F401  the near names come from the imported parent package

    with pytest.raises(ValueError, match="--custom-rm-path") as error:
        load_function(path, flag="--custom-rm-path")
    assert path in str(error.value)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_bare_file_without_a_match(hook_file: Path) -> None:
    with pytest.raises(ValueError, match=r"none of generate, custom_generate is in it; write .*:function"):
        load_function(str(hook_file), default_names=("generate", "custom_generate"))


def test_failing_import_tells_the_cause(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_dependency_of_a_hook\n")
    with pytest.raises(ValueError, match=r"importing .*broken.py failed: ModuleNotFoundError: .*no_such_dependency"):
        load_function(f"{broken}:fn", flag="--custom-rm-path")
    with pytest.raises(ValueError, match="no_such_dependency"):
        load_function(f"{broken}:fn")


# ---- modules and objects that raise when they are asked for something


ODD = """
class Mute(Exception):
    def __str__(self): raise RuntimeError
class Meta(type):
    def __getattr__(cls, name): raise KeyError(name)
class Holder(metaclass=Meta): pass
class Secret:
    def __dir__(self): raise RuntimeError
secret = Secret()
def __getattr__(name):
    match name:
        case "ends": raise SystemExit(3)
        case "mute": raise Mute
        case "upstreams": from slime.utils.misc import SingletonMeta
        case "lazy": raise RuntimeError("no GPU")
    raise AttributeError(name)
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (":lazy", ": asking it for 'lazy' raised RuntimeError: no GPU"),
        (":ends", ": asking it for 'ends' raised SystemExit: 3"),
        (":mute", ": asking it for 'mute' raised Mute: its message cannot be read"),
        (":Holder.call", ": asking it for 'call' raised KeyError: 'call'"),
        (
            ":upstreams",
            "cannot import name 'SingletonMeta' from 'slime.utils.misc' ({}); functools.cache on",
        ),
        (":secret.call", ": {} has no 'call'"),
        (":reward_func", ": {} has no 'reward_func'"),
        ("", ": asking it for 'lazy' raised RuntimeError: no GPU"),
    ],
)
def test_what_raises_when_it_is_asked_for_a_function(tmp_path: Path, names: str, expected: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    with pytest.raises(BadInputError) as error:
        load_function(f"{file}{names}", flag="--custom-rm-path", default_names=("custom_rm", "lazy"))
    message = str(error.value)
    assert message.startswith(f"--custom-rm-path {file}{names}: ")
    assert expected.format(misc.__file__ if "SingletonMeta" in expected else file) in message
    assert "\n" not in message


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "import asyncio\nraise asyncio.CancelledError(3)"])
def test_an_import_may_raise_anything(tmp_path: Path, statement: str) -> None:
    file = tmp_path / "ends.py"
    for _ in range(2):  # what has failed is not a module
        file.write_text(statement)
        with pytest.raises(BadInputError, match=rf"importing {file} failed: (SystemExit|CancelledError): 3"):
            load_function(f"{file}:fn")
    file.write_text("def fn(): pass")
    assert load_function(f"{file}:fn").__name__ == "fn"


def test_a_package_that_lists_no_modules_gives_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("zipped_package")
    package.__path__ = ["/no/such/archive.zip"]
    monkeypatch.setitem(sys.modules, "zipped_package", package)
    with pytest.raises(BadInputError, match=r"there is no module 'zipped_package\.own'$"):
        load_function("zipped_package.own:fn")
