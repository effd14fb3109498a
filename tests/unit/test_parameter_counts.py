"""Models of the published shapes, without memory: the same tensors as transformers', and as many as published."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import shipped
from tests.parallel import tiny
from tests.ranks import run_ranks
from tests.unit.test_models import per_expert

NUM_GPUS = 0

PUBLISHED = {
    "glm4-32B": "32.57",
    "glm4-9B": "9.40",
    "glm4.7-30B-A3B": "30",
    "deepseek-v3": "671.0",
    "kimi-k2": "1026.4",
    "llama3-70B": "70.55",
    "llama3-8B": "8.03",
    "llama3.1-8B-Instruct": "8.03",
    "llama3.2-3B-Instruct": "3.21",
    "moonlight": "15.96",
    "qwen2.5-0.5B": "0.494",
    "qwen2.5-1.5B": "1.54",
    "qwen2.5-32B": "32.76",
    "qwen2.5-3B": "3.09",
    "qwen2.5-7B": "7.62",
    "qwen3-0.6B": "0.596",
    "qwen3-1.7B": "1.72",
    "qwen3-14B": "14.77",
    "qwen3-235B-A22B": "235.1",
    "qwen3-30B-A3B": "30.53",
    "qwen3-32B": "32.76",
    "qwen3-4B": "4.02",
    "qwen3-4B-Instruct-2507": "4.02",
    "qwen3-8B": "8.19",
}
"""Billions of parameters that the checkpoints have: an output layer that is the embedding counts once, and layers that
predict further tokens (MTP) do not."""
SUPPORTED = shipped.supported()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Parameters of each supported model, of which the tensors' names and shapes were compared."""
    directory = tmp_path_factory.mktemp("counts")
    run_ranks(compare_all, (str(directory),), 1)
    return json.loads((directory / "counts.json").read_text())


def test_tensors_are_those_of_transformers(counts: dict[str, int]) -> None:
    assert list(counts) == SUPPORTED


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name in PUBLISHED])
def test_as_many_as_published(name: str, counts: dict[str, int]) -> None:
    published = PUBLISHED[name]
    assert f"{counts[name] / 1e9:.{len(published.partition('.')[2])}f}" == published


def compare_all(rank: int, directory: str) -> None:
    """In a process of its own, because Megatron's shim is for the whole process."""
    from slime.backends.megatron import compat

    compat.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    counts = {}
    for name in SUPPORTED:
        ours, theirs = dict(tensors_of_tables(name)), dict(tensors_of_transformers(name))
        assert ours.keys() == theirs.keys(), f"{name}: {sorted(ours.keys() ^ theirs.keys())[:10]}"
        other = {tensor: (shape, theirs[tensor]) for tensor, shape in ours.items() if shape != theirs[tensor]}
        assert not other, f"{name}: {other}"
        counts[name] = sum(shape.numel() * stands_for(tensor, name) for tensor, shape in ours.items())
    Path(directory, "counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def tensors_of_tables(name: str) -> Iterator[tuple[str, torch.Size]]:
    """What the Megatron model becomes that is made from config.json, through the family's table."""
    from slime.backends.megatron.model import default_stage, transformer_config
    from slime.backends.megatron.weights_io import global_weights
    from slime.models import family_of, weight_shape

    args, config = tiny.arguments(shipped.CONFIGS / name), shipped.config(name)
    family, shape = family_of(config), weight_shape(config)
    nowhere = torch.device("meta")
    with (
        mock.patch("torch.cuda.current_device", return_value=nowhere),
        mock.patch("slime.utils.device.current_device", return_value=nowhere),
        mock.patch("slime.backends.megatron.model.Rotary"),  # computes frequencies, and has no parameters
    ):
        model = default_stage(args, transformer_config(args), True, True)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel() > 10_000_000)
    for parameter, tensor in global_weights([model]):
        if stands_for(parameter, name):
            yield from ((hf, part.shape) for hf, part in family.join(parameter, [tensor], shape))


def tensors_of_transformers(name: str) -> Iterator[tuple[str, torch.Size]]:
    """What files of transformers' own model hold."""
    from transformers import AutoModelForCausalLM

    config = shipped.config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for parameter, tensor in model.state_dict().items():
        if not (config.tie_word_embeddings and parameter == "lm_head.weight"):
            yield from ((hf, part.shape) for hf, part in per_expert(parameter, tensor) if stands_for(hf, name))


def stands_for(tensor: str, name: str) -> int:
    """How many tensors this one counts as: the first and the last of a layer's experts stand for all, to save time."""
    expert = re.search(r"\.experts\.(\d+)\.", tensor)
    if expert is None:
        return 1
    config = shipped.config_json(name)
    experts = config.get("num_experts") or config["n_routed_experts"]
    return experts // 2 if int(expert[1]) in (0, experts - 1) else 0
