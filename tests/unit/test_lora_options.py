"""What a command line says of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.models import family_of, hf_config, weight_shape
from slime.models.adapters import last_names, linear_modules, module_names, targeted_sources
from slime.models.families import QWEN2
from tests.command_line import LATENT as LATENT_MODEL
from tests.command_line import Fails, Flags, Parse, refused, write_checkpoint, write_model
from tests.shipped import CONFIGS
from tests.unit.test_input_errors import MOE

NUM_GPUS = 0


@pytest.fixture
def directory(launch_directory: Path) -> Path:
    write_model(launch_directory / "moe", MOE)
    write_model(launch_directory / "latent", LATENT_MODEL)
    return launch_directory


def test_defaults_follow_from_the_rank_and_the_reference_is_free(directory: Path, parse: Parse) -> None:
    args = parse("--lora-rank 8 --use-kl-loss --kl-loss-coef 0.1")
    assert (args.lora_alpha, args.lora_target_modules) == (16.0, ["all-linear"])
    assert args.needs_reference
    assert args.ref_load is None
    args = parse("--lora-rank 8 --lora-alpha 4 --lora-target-modules q_proj mlp.down_proj")
    assert (args.lora_alpha, args.lora_target_modules) == (4.0, ["q_proj", "mlp.down_proj"])


@refused(
    """
--lora-alpha 4 -> --lora-alpha 4.0 needs --lora-rank
--lora-target-modules q_proj -> --lora-target-modules q_proj needs --lora-rank
--save-lora adapters --save-interval 1 -> --save-lora adapters needs --lora-rank
--lora-rank 0 -> argument --lora-rank: must be at least 1, not 0
--lora-rank 8 --lora-target-modules q_proj query
    -> --lora-target-modules query: the model has no such layer; there are q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj, down_proj, all-linear
--hf-checkpoint moe --lora-rank 8 --tensor-model-parallel-size 2 --sequence-parallel
    -> all-linear: experts with adapters must be whole; add --expert-tensor-parallel-size 1
--hf-checkpoint moe --lora-rank 8 --moe-router-bias-update-rate 0.001
    -> --moe-router-bias-update-rate 0.001 changes what --lora-rank 8 freezes: drop it
--lora-rank 8 --hf-checkpoint latent --lora-target-modules q_proj
    -> the model has no such layer; there are q_a_proj,
--lora-rank 8 --lora-target-modules lm_head -> --lora-target-modules lm_head: the model has no such layer
"""
)
def test_what_cannot_be(directory: Path, fails: Fails, flags: Flags, message: str) -> None:
    assert message in fails(*flags)


ADAPTERS = {"rank": 8, "alpha": 16.0, "target_modules": ["o_proj", "q_proj"]}


@refused(
    """
--load ckpt --lora-rank 4 --lora-alpha 16 --lora-target-modules q_proj o_proj
    -> --load {directory}/ckpt/iter_0000002 holds other adapters: go on with --lora-rank 8$
--load ckpt --lora-rank 8 --lora-target-modules q_proj
    -> iter_0000002 holds other adapters: go on with --lora-target-modules o_proj q_proj$
--load ckpt
    -> iter_0000002 holds adapters: go on with --lora-rank 8 --lora-alpha 16.0 --lora-target-modules o_proj q_p
--load whole --lora-rank 8 -> iter_0000002 holds a whole model, and this run trains adapters
--ref-load ckpt --lora-rank 8 -> --ref-load {directory}/ckpt holds adapters and no model
--ref-load ckpt/iter_0000002 -> --ref-load {directory}/ckpt/iter_0000002 holds adapters and no model
"""
)
def test_adapters_of_a_checkpoint_are_the_runs(
    directory: Path, fails: Fails, flags: Flags, message: str, parse: Parse
) -> None:
    write_checkpoint(directory / "ckpt", "2", {"adapters": ADAPTERS})
    write_checkpoint(directory / "whole", "2", {"adapters": None})
    said = fails(*flags)
    assert message.replace("{directory}", str(directory)) in f"{said}$"
    parse("--load ckpt --lora-rank 8 --lora-target-modules q_proj o_proj")
    parse("--load whole")


@pytest.mark.parametrize(
    ("model", "saved", "own", "differs"),
    [
        ("model", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", "all-linear", False),
        ("model", "all-linear", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", False),
        ("model", "down_proj", "mlp.down_proj", False),
        ("model", "q_proj k_proj v_proj o_proj gate_proj up_proj", "all-linear", True),
        ("moe", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", "all-linear", False),
        ("moe", "q_proj k_proj v_proj o_proj gate_proj up_proj", "all-linear", True),
    ],
)
def test_targets_are_compared_by_what_they_stand_for(
    directory: Path, model: str, saved: str, own: str, differs: bool, fails: Fails, parse: Parse
) -> None:
    adapters = {"rank": 8, "alpha": 16.0, "target_modules": sorted(saved.split())}
    write_checkpoint(directory / "ckpt", "2", {"adapters": adapters})
    flags = f"--hf-checkpoint {model} --load ckpt --lora-rank 8 --lora-target-modules {own}"
    if not differs:
        parse(flags)
        return
    expected = f"holds other adapters: go on with --lora-target-modules {' '.join(sorted(saved.split()))}"
    assert fails(flags).endswith(expected)


def test_targets_match_whole_parts_of_names() -> None:
    row, _ = QWEN2.row("decoder.layers.0.self_attention.linear_qkv.weight")
    assert targeted_sources(row, ["q_proj", "self_attn.v_proj"]) == (True, False, True)
    assert targeted_sources(row, ["proj", "mlp.q_proj"]) == (False, False, False)
    assert targeted_sources(row, ["all-linear"]) == (True, True, True)
    norm, _ = QWEN2.row("decoder.layers.0.input_layernorm.weight")
    assert targeted_sources(norm, ["all-linear"]) == (False,)


def test_files_name_modules_as_the_user_does_and_engines_by_their_last_names(directory: Path) -> None:
    shape = weight_shape(hf_config(directory / "model"))
    names = module_names(QWEN2, shape, ["mlp.down_proj", "q_proj", "q_proj"])
    assert names == ["mlp.down_proj", "q_proj"]
    assert last_names([*names, "self_attn.q_proj"]) == ["down_proj", "q_proj"]
    assert module_names(QWEN2, shape, ["all-linear"]) == linear_modules(QWEN2, shape)


GROUPED = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen2.5-0.5B", [*GROUPED, *MLP]),
        ("qwen3-4B", [*GROUPED, *MLP]),
        ("qwen3-30B-A3B", [*GROUPED, *MLP]),
        ("llama3-8B", [*GROUPED, *MLP]),
        ("glm4-9B", [*GROUPED, "gate_up_proj", "down_proj"]),
        ("glm4.5-355B-A32B", [*GROUPED, *MLP]),
        ("deepseek-v3", [*LATENT, *MLP]),
        ("kimi-k2", [*LATENT, *MLP]),
        ("glm4.7-30B-A3B", [*LATENT, *MLP]),
        ("moonlight", ["q_proj", *LATENT[2:], *MLP]),
    ],
)
def test_all_linear_is_every_matrix_that_the_model_has(name: str, modules: list[str]) -> None:
    config = hf_config(CONFIGS / name)
    assert linear_modules(family_of(config), weight_shape(config)) == modules
