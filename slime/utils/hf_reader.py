"""Which file of a Hugging Face directory holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from slime.utils.hf_writer import INDEX_NAME


def tensor_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name.

    Raises:
        FileNotFoundError: neither an index nor a single safetensors file, or a file of the index is missing.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        missing = sorted({file for file in files.values() if not (directory / file).is_file()})
        if missing:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    single = directory / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{directory} has no {INDEX_NAME} and no model.safetensors")
    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), single.name)
