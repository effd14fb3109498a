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
    "kimi-k2-thinking": "1026.4",
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
"""Billions of parameters that the checkpoints have: an output layer that is the embedding counts once, and heads that
predict further tokens (MTP) do not. Of both Kimi K2 "1T" is published, which is half a trillion coarse: 1026.4 are in
the files of Kimi-K2-Instruct, and stand for Kimi-K2-Thinking too, whose files are packed in int4."""
PUBLISHED_WITH_HEADS = {"glm4.5-106B-A12B": "110", "glm4.5-355B-A32B": "358", "mimo-7B-rl": "7.83"}
"""The same with the heads, and with their copies of embedding and output layer where a head has such."""
SUPPORTED = shipped.supported()
Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Parameters of each supported model, of which the tensors' names and shapes were compared; and of its heads."""
    directory = tmp_path_factory.mktemp("counts")
    run_ranks(compare_all, (str(directory),), 1)
    return json.loads((directory / "counts.json").read_text())


def test_tensors_are_those_of_transformers(counts: Counts) -> None:
    assert list(counts) == SUPPORTED


def test_every_model_has_a_published_number() -> None:
    assert sorted(PUBLISHED | PUBLISHED_WITH_HEADS) == sorted(SUPPORTED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_as_published(name: str, counts: Counts) -> None:
    assert billions(counts[name]["model"], PUBLISHED[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_WITH_HEADS)
def test_as_many_as_published_with_heads(name: str, counts: Counts) -> None:
    published = PUBLISHED_WITH_HEADS[name]
    assert billions(counts[name]["model"], published) != published
    assert billions(counts[name]["model"] + counts[name]["heads"], published) == published


def billions(count: int, published: str) -> str:
    """As many digits as were published."""
    return f"{count / 1e9:.{len(published.partition('.')[2])}f}"


def compare_all(rank: int, directory: str) -> None:
    """In a process of its own, because Megatron's shim is for the whole process."""
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    counts = {}
    for name in SUPPORTED:
        ours, theirs = dict(tensors_of_tables(name)), dict(tensors_of_transformers(name))
        heads = dict(tensors_of_heads(name, ours))
        model = {tensor: shape for tensor, shape in ours.items() if tensor not in heads}
        assert model.keys() == theirs.keys(), f"{name}: {sorted(model.keys() ^ theirs.keys())[:10]}"
        other = {tensor: (shape, theirs[tensor]) for tensor, shape in model.items() if shape != theirs[tensor]}
        assert not other, f"{name}: {other}"
        counts[name] = {
            part: sum(shape.numel() * stands_for(tensor, name) for tensor, shape in tensors.items())
            for part, tensors in (("model", model), ("heads", heads))
        }
    Path(directory, "counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def tensors_of_tables(name: str) -> Iterator[tuple[str, torch.Size]]:
    """What the Megatron model becomes that is made from config.json, with its heads, through the family's table."""
    from slime.backends.megatron.layers import mtp
    from slime.backends.megatron.model import default_stage, transformer_config
    from slime.backends.megatron.weights.weights_io import global_weights
    from slime.models import family_of, weight_shape

    directory, config = shipped.CONFIGS / name, shipped.config(name)
    args = tiny.arguments(directory, hf_checkpoint=str(directory))
    family, shape = family_of(config), weight_shape(config, with_heads=True)
    nowhere = torch.device("meta")
    with (
        mock.patch("torch.cuda.current_device", return_value=nowhere),
        mock.patch("slime.utils.device.current_device", return_value=nowhere),
        mock.patch("slime.backends.megatron.model.Rotary"),  # computes frequencies, and has no parameters
    ):
        model = default_stage(args, transformer_config(args), True, True)
        if args.mtp_num_layers:
            mtp.attach(model, args)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel() > 10_000_000)
    for parameter, tensor in global_weights([model]):
        if stands_for(parameter, name):
            yield from ((hf, part.shape) for hf, part in family.join(parameter, [tensor], shape))


def tensors_of_heads(name: str, tensors: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Size]]:
    """Those of the checkpoint's heads: of the model, and what else the family's table says that heads have."""
    from slime.models import family_of

    config = shipped.config(name)
    family = family_of(config)
    heads = family.carried(config)
    yield from ((tensor, shape) for tensor, shape in tensors.items() if tensor.startswith(heads))
    for copy in family.heads.copies if family.heads else ():
        yield from ((head + copy, tensors["model.embed_tokens.weight"]) for head in heads)


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
