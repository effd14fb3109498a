"""Exports of a model that flags give other layers than config.json: it can be loaded, by transformers and by slime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slime.models import family_of, hf_config, shape_from_hf, weight_shape
from slime.models.names import check_names
from slime.models.shape import other_layers
from slime.weights.hf_directory import stored_names
from tests.parallel import tiny
from tests.ranks import run_ranks

NUM_GPUS = 0
KINDS = {"qwen3": "layer_types", "glm4_moe_lite": "mlp_layer_types"}
"""With the list of layers in their config.json."""
COUNTS = (3, 6)
"""Of layers; config.json says 4."""


def _export(rank: int, work: str) -> None:
    from slime.backends.megatron import compat

    compat.install()
    from megatron.core import parallel_state

    from slime.backends.megatron import model, parallel, weights_io

    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=1)
    parallel_state.initialize_model_parallel()
    parallel.set_seeds(1)
    for kind in KINDS:
        for count in COUNTS:
            origin, target = Path(work, kind), Path(work, f"{kind}_{count}")
            changes = other_layers(hf_config(origin), count)
            shape = shape_from_hf(hf_config(origin, changes))
            chunks = model.build_model(tiny.arguments(origin, random_weights=True, **shape))
            target.mkdir()
            weights_io.save_hf(chunks, target, origin, changes)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Path:
    directory = tmp_path_factory.mktemp("layers")
    for kind in KINDS:
        (directory / kind).symlink_to(models(kind))
    run_ranks(_export, (str(directory),), 1)
    return directory


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_says_which_layers_it_holds(work: Path, kind: str, count: int) -> None:
    target = work / f"{kind}_{count}"
    values, config = json.loads((target / "config.json").read_text()), hf_config(target)
    assert (values["num_hidden_layers"], len(values[KINDS[kind]])) == (count, count)
    family, shape = family_of(config), weight_shape(config)
    names = stored_names(target)
    check_names(family, shape, names, target, ())
    assert any(name.startswith(f"model.layers.{count - 1}.") for name in names)
    _, found = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(found.values()), found


def test_the_config_of_as_many_layers_stays(models: Callable[[str], Path]) -> None:
    assert other_layers(hf_config(models("qwen3")), 4) == {}
