"""Values of users as files of debug data hold them: containers, numbers, strings and tensors, never code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.files import atomic_io
from slime.files.storage import writing
from slime.utils.errors import BadInputError

_ARRAY = "__numpy_array__"
_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_SHOWN = 200
logger = logging.getLogger(__name__)


def save_safe(path: Path, content: dict[str, Any], flag: str) -> None:
    """Write the file that ``flag`` asks for, whole or not at all, for `load_safe`; what is not plain as its text.
    StorageError where it cannot be written."""
    strange: dict[str, str] = {}
    values = _plain(content, "", strange)
    for kind, place in strange.items():
        logger.warning("%s: %s holds a %s, which a file without code cannot: its text is saved", flag, place, kind)
    with writing(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_file(path, lambda unfinished: torch.save(values, unfinished))


def load_safe(path: Path, flag: str) -> Any:
    """What a file of `save_safe` holds; reading it runs no code. BadInputError if it is none, or is not there."""
    if not path.is_file():
        raise BadInputError(f"{flag}: there is no file {path}")
    try:
        return _restored(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch has no type of its own for what is wrong with a file
        reason = " ".join([type(error).__name__, *str(error).split()])[:_SHOWN]
        raise BadInputError(f"{flag}: {path} is not a file of plain values as slime saves them: {reason}") from error


def _plain(value: Any, place: str, strange: dict[str, str]) -> Any:
    """``value`` of plain types only; ``strange`` gets the first place of every type that has no plain form."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        try:
            return {_ARRAY: torch.from_numpy(value.copy())}
        except (TypeError, ValueError):  # strings, objects, another byte order
            return _plain(value.tolist(), place, strange)
    if isinstance(value, Mapping):
        return {_plain(k, f"{place} key", strange): _plain(v, f"{place}[{k!r}]", strange) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [*value]
        if not set(map(type, items)) <= _ATOMS:  # a response's numbers need no look at each
            items = [_plain(item, f"{place}[{i}]", strange) for i, item in enumerate(items)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (set, frozenset)):
        return {_plain(item, f"{place} item", strange) for item in value}
    if isinstance(value, np.generic):
        return value.item()
    for kind, plain in ((str, str.__str__), (int, int), (float, float)):
        if isinstance(value, kind):  # an enumeration's
            return plain(value)
    strange.setdefault(type(value).__name__, place)
    return repr(value)[:_SHOWN]


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= _ATOMS:
        return type(value)(_restored(item) for item in value)
    return value
