"""Loading a user's function by the path that a flag names."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.elsewhere import elsewhere, hint_for
from slime.utils.errors import BadInputError


def split_function_path(path: str) -> tuple[str, str | None]:
    """Split a function path into what to import and the attribute to take from it.

    ``pkg.mod.fn`` and ``pkg.mod:fn`` give ``("pkg.mod", "fn")``, ``path/to/file.py:fn`` gives
    ``("path/to/file.py", "fn")``, and a bare ``path/to/file.py`` gives ``("path/to/file.py", None)``.

    Raises:
        ValueError: the path names a module but no function.
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
    """Import ``pkg.mod`` or ``path/to/file.py`` once per process, a file by its real path.

    Raises:
        ValueError: there is no such module or file, or importing it failed; the message says which.
    """
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
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"importing {file} failed: {type(error).__name__}: {error}{elsewhere(error)}") from error
    return module


def _import_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(missing + ".")):
            raise ValueError(f"importing {name} failed: {error}{elsewhere(error)}") from error
        hint = elsewhere(error) or _near(missing, _sibling_modules(missing))
        raise ValueError(f"there is no module {missing!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name} failed: {type(error).__name__}: {error}{elsewhere(error)}") from error


def _sibling_modules(name: str) -> list[str]:
    """Names of the modules beside ``name`` in its package, where that package is imported."""
    parent, _, _ = name.rpartition(".")
    package = sys.modules.get(parent)
    places = getattr(package, "__path__", [])
    return [f"{parent}.{file.stem}" for place in places for file in Path(place).iterdir() if file.suffix in ("", ".py")]


def _near(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def load_function(path: str, *, flag: str | None = None, default_names: Sequence[str] = ()) -> Any:
    """The function or class that ``path`` names.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn``, ``path/to/file.py:fn``, or ``path/to/file.py`` alone.
        flag: the command-line flag that carried the path, for the error message.
        default_names: for a file alone, the names to look for in it, first match wins.

    Raises:
        BadInputError: the path does not load; the message names flag, path and what is missing, with near names.
    """
    where = f"{flag} {path}" if flag else path
    try:
        source, name = split_function_path(path)
        module = load_module(source)
    except ValueError as error:
        raise BadInputError(f"{where}: {error}") from error
    if name is None:
        found = [candidate for candidate in default_names if hasattr(module, candidate)]
        if not found:
            wanted = f"none of {', '.join(default_names)} is in it" if default_names else "which function of it?"
            raise BadInputError(f"{where}: {wanted}; write {path}:function")
        name = found[0]
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            public = [n for n in dir(target) if not n.startswith("_")]
            hint = hint_for(f"{source}.{part}") or _near(part, public)
            raise BadInputError(f"{where}: {source} has no {part!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise BadInputError(f"{where}: {name!r} is a {type(target).__name__}, not a function or class")
    return target
