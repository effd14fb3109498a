"""Small torch_dist checkpoints, as trainers write them, without a trainer: of models, adapters and critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from slime.files.checkpoints import LATEST, RUN_KEY
from slime.models import family_of, hf_config, weight_shape
from slime.models.adapters import adapter_family, targeted_sources
from slime.models.family import VALUE_HEAD_KEY

TARGETS = ("q_proj", "down_proj")
"""Modules that the adapters are of."""


def save(tensors: dict[str, torch.Tensor], directory: str, **common: Any) -> None:
    """A checkpoint, and beside it the file that names it."""
    path = Path(directory)
    dcp.save(tensors, checkpoint_id=path)
    common |= {RUN_KEY: True} if path.name.startswith("iter_") else {}
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text("{}")
    (path.parent / LATEST).write_text(path.name.removeprefix("iter_").lstrip("0"))


def save_model(model: str, directory: str, without: str = "", **more: torch.Tensor) -> None:
    """A torch_dist checkpoint of a model."""
    config = hf_config(model)
    family, shape = family_of(config), weight_shape(config)
    found = {name: t for path in Path(model).glob("*.safetensors") for name, t in load_file(path).items()}
    tensors: dict[str, torch.Tensor] = {}
    for name in family.parameters(shape):
        parts = [found[source] for source in family.sources(name, shape)]
        size = (sum(len(part) for part in parts), *parts[0].shape[1:])
        tensors[name] = family.shard(name, found.__getitem__, shape, size, 0)
    experts: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        before, _, after = name.partition(".experts.")
        experts.setdefault(f"{before}.experts.experts.{after.partition('.')[2]}", []).append(tensors.pop(name))
    stacked = {name: torch.stack(several) for name, several in experts.items()}
    tensors.pop(without, None)
    save(tensors | stacked | {"optimizer.x": torch.ones(1)} | more, directory)


def save_adapters(model: str, directory: str, *without: str) -> None:
    """A checkpoint of adapters of a model."""
    config = hf_config(model)
    family, shape = family_of(config), weight_shape(config)
    found = {name: t for path in Path(model).glob("*.safetensors") for name, t in load_file(path).items()}
    tensors = {}
    for name in adapter_family(family, TARGETS).parameters(shape):
        base = f"{name.rpartition('.lora.')[0]}.weight"
        row, sources = family.row(base)[0], [found[source] for source in family.sources(base, shape)]
        first = (4 * sum(targeted_sources(row, TARGETS)), sources[0].shape[1])
        size = first if name.endswith(".a") else (sum(len(source) for source in sources), 4)
        if name not in without:
            tensors[name] = torch.zeros(size)
    save(tensors, directory, adapters={"rank": 4, "alpha": 8.0, "target_modules": sorted(TARGETS)})


def save_critic(model: str, directory: str) -> None:
    """A checkpoint of a critic: with a value head in the place of the output layer."""
    save_model(model, directory, without="output_layer.weight", **{VALUE_HEAD_KEY: torch.ones(1, 64)})
