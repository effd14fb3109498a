"""Loading a user's function by the path that a flag names, and running a command of the shell."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.elsewhere import elsewhere, hint_for, told
from slime.utils.errors import BadInputError, CommandError
from slime.utils.redaction import redacted_command

_HF_BY_ITS_OLD_NAME = 'huggingface-cli() { hf "$@"; }; '
"""Before commands that call it so: a hub of today has a program of this name that only says that it is no more."""
_SHOWN = 200
_ABSENT = object()


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Within the block a user's code may run: what that raises becomes a BadInputError of one line, after ``what``."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit too
        raise BadInputError(f"{what} {told(error)}") from error


def split_function_path(path: str) -> tuple[str, str | None]:
    """What to import, and the attribute to take from it; ValueError where the path names a module but no function.

    ``pkg.mod.fn`` and ``pkg.mod:fn`` give ``("pkg.mod", "fn")``, ``path/to/file.py:fn`` gives ``("path/to/file.py",
    "fn")``, and a bare ``path/to/file.py`` gives ``("path/to/file.py", None)``.
    """
    if path.endswith(".py"):
        return path, None
    separator = ":" if ":" in path else "."
    source, _, name = path.rpartition(separator)
    if not source or not name:
        raise ValueError(
            f"{path!r} names no function; write pkg.module.function, pkg.module:function or file.py:function"
        )
    return source, name


def load_module(source: str) -> ModuleType:
    """Import ``pkg.mod`` or ``path/to/file.py`` once per process, a file by its real path; ValueError if that fails."""
    if not source.endswith(".py"):
        return _import_by_name(source)
    file = Path(os.path.realpath(os.path.expanduser(source)))
    name = f"slime_user_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # also when an editor has just taken the file away
        return sys.modules[name]
    if not os.path.isfile(file):
        raise ValueError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with refusing(f"importing {file} failed:"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_by_name(name: str) -> ModuleType:
    try:
        with refusing(f"importing {name} failed:"):
            return importlib.import_module(name)
    except BadInputError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or not f"{name}.".startswith(f"{cause.name}."):
            raise
        missing = str(cause.name)
        hint = elsewhere(cause) or _near(missing, lambda: _sibling_modules(missing))
        raise BadInputError(f"there is no module {missing!r}{hint}") from cause


def _sibling_modules(name: str) -> list[str]:
    parent, _, _ = name.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", [])
    files = [file for place in places for file in Path(place).iterdir()]
    return [f"{parent}.{file.stem}" for file in files if file.suffix in ("", ".py")]


def _public_names(target: Any) -> list[str]:
    return [name for name in dir(target) if not name.startswith("_")]


def _near(name: str, candidates: Callable[[], Iterable[str]]) -> str:
    close = []
    with contextlib.suppress(Exception):  # of a __dir__ of its own, of packages in archives, of what is in their place
        close = difflib.get_close_matches(name, list(candidates()), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def attribute_of(target: Any, name: str, default: Any, where: str) -> Any:
    """An attribute of what is a user's, or ``default``; BadInputError, after ``where``, if asking for it raised."""
    with refusing(f"{where}: asking it for {name!r} raised"):
        return getattr(target, name, default)


def load_function(path: str, *, flag: str | None = None, default_names: Sequence[str] = ()) -> Any:
    """The function or class that ``path`` names: ``pkg.mod.fn``, ``pkg.mod:fn``, ``path/to/file.py:fn``, or
    ``path/to/file.py`` alone, in which the first of ``default_names`` is taken. BadInputError, with ``flag``, path,
    what is missing and near names, where it does not load."""
    return find_function(path, flag=flag, default_names=default_names)[0]


def find_function(path: str, *, flag: str | None = None, default_names: Sequence[str] = ()) -> tuple[Any, str]:
    """What `load_function` loads, and the name that it has in its module."""
    where = f"{flag} {path}" if flag else path
    try:
        source, name = split_function_path(path)
        module = load_module(source)
    except ValueError as error:
        raise BadInputError(f"{where}: {error}") from error
    if name is None:
        there = (n for n in default_names if attribute_of(module, n, _ABSENT, where) is not _ABSENT)
        name = next(there, None)
        if name is None:
            wanted = f"none of {', '.join(default_names)} is in it" if default_names else "which function of it?"
            raise BadInputError(f"{where}: {wanted}; write {path}:function")
    target: Any = module
    for part in name.split("."):
        holder, target = target, attribute_of(target, part, _ABSENT, where)
        if target is _ABSENT:
            hint = hint_for(f"{source}.{part}") or _near(part, functools.partial(_public_names, holder))
            raise BadInputError(f"{where}: {source} has no {part!r}{hint}")
    if not callable(target):
        raise BadInputError(f"{where}: {name!r} is a {type(target).__name__}, not a function or class")
    return target, name


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run ``cmd`` by ``bash -c``, and print it first, as ``EXEC: ...``, without its secrets; with ``capture_output``
    its standard output, which is then not let through. CommandError, a `subprocess.CalledProcessError` too, where its
    status is not 0."""
    shown = redacted_command(cmd)
    print(f"EXEC: {shown}", flush=True)
    known = _HF_BY_ITS_OLD_NAME + cmd if "huggingface-cli" in cmd and shutil.which("hf") else cmd
    ran = subprocess.run(["bash", "-c", known], capture_output=capture_output, text=True, errors="replace")
    if ran.returncode == 0:
        return ran.stdout
    said = (ran.stderr or "").strip().splitlines()[-1:]
    ended = f"signal {-ran.returncode}" if ran.returncode < 0 else f"status {ran.returncode}"
    why = "".join(f" ({redacted_command(line)})" for line in said)
    brief = " ".join(shown.split())
    raise CommandError(
        f"a command ended with {ended}{why}: {brief[:_SHOWN] + '...' if len(brief) > _SHOWN else brief}",
        ran.returncode,
        shown,
        ran.stdout,
        ran.stderr,
    )
