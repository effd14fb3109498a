"""What `torch.save` wrote, read without running any of it, and written as JSON."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from slime.utils.errors import BadInputError

# What tensors are made by, and in the pickles of torch bytes, sets and complex numbers.
_HARMLESS = {
    *(("torch._utils", f"_rebuild_tensor_v{version}") for version in (2, 3)),
    *((module, kind) for module in ("builtins", "__builtin__") for kind in ("set", "complex")),
    *(("collections", "OrderedDict"), ("_codecs", "encode"), ("torch.storage", "UntypedStorage")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
_MOST_VALUES, _LONGEST = 256, 200


class _Unpickler(pickle.Unpickler):
    """Plain values and tensors, as ``weights_only=True``, which takes ten times as long on lists of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}; only plain values and tensors are read")


def load_safe(path: Path) -> Any:
    """The content of a file of plain values and tensors.

    Raises:
        BadInputError: there is no such file, or it holds anything else.
    """
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    reader = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    try:
        if not zipfile.is_zipfile(path):  # torch's older format would be read by more than `_Unpickler`
            raise ValueError("torch.save did not write it, or not to its end")
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
    except Exception as error:  # broken pickles raise whatever they stumble over
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{path}: not a file of saved samples: {reason}") from error


def to_json(value: Any) -> Any:
    """``value`` as JSON has it; the numbers that it lacks and long tensors become text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json(item) for item in value]
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_VALUES:
        return to_json(value.tolist())
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}, shape {list(value.shape)}"
    return repr(value)[:_LONGEST]
