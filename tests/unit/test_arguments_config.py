"""What the command line takes from the model's config.json, and what it refuses beside it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests import shipped
from tests.command_line import QWEN3, Fails, Parse, write_model

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test."""
    return launch_directory


def test_shape_comes_from_the_config(parse: Parse, directory: Path) -> None:
    args = parse()
    assert args.hf_checkpoint == str(directory / "model")
    assert (args.num_layers, args.hidden_size, args.vocab_size, args.num_query_groups) == (4, 128, 300, 2)
    assert (args.swiglu, args.qk_layernorm, args.untie_embeddings_and_output_weights) == (True, True, False)
    assert args.rotary_base == 1000000
    assert args.params_dtype == "float32"
    assert parse("", "--fp32").params_dtype == "bfloat16"
    assert pickle.loads(pickle.dumps(args)) == args


@pytest.mark.parametrize("name", shipped.unsupported())
def test_a_model_that_slime_has_no_table_of(name: str, directory: Path, fails: Fails) -> None:
    shutil.copy(shipped.CONFIGS / name / "config.json", directory / "model")
    assert fails() == f"--hf-checkpoint {directory}/model: {shipped.refusal(name)}"


def test_config_mismatch(parse: Parse, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    agreed = (
        "--num-layers 4 --swiglu --norm-epsilon 1e-06 --rotary-base 10000 --rotary-base 1000000 --disable-bias-linear"
    )
    assert parse(agreed).num_layers == 4
    line = fails("--rotary-base 10000 --num-layers 36")
    assert "--rotary-base is 10000.0, config.json means 1000000" in line
    assert "--num-layers is 36, config.json means 4" in line
    assert f"flags contradict {os.path.abspath('model')}/config.json: " in line
    assert "--allow-config-mismatch" in line
    args = parse("--rotary-base 10000 --softmax-scale 0.5 --hidden-size 128 --allow-config-mismatch")
    assert (args.rotary_base, args.softmax_scale, args.hidden_size) == (10000, 0.5, 128)
    warning = capsys.readouterr().err
    assert f"warning: flags contradict {os.path.abspath('model')}/config.json: --" in warning
    assert "--softmax-scale is 0.5, config.json means none" in warning
    assert "--hidden-size" not in warning


def test_random_weights_are_of_the_model_that_engines_have(parse: Parse, fails: Fails) -> None:
    line = fails("--random-weights --num-layers 3 --allow-config-mismatch")
    assert "--num-layers is 3, config.json means 4; drop the flags" in line
    assert parse("--random-weights --num-layers 4").num_layers == 4


def test_rotary_factor_of_llama_scripts(parse: Parse, directory: Path, fails: Fails) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    llama = QWEN3 | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": rope}
    write_model(directory / "model", llama)
    assert parse("--use-rope-scaling --rotary-scaling-factor 32.0").rope_scaling_factor == 32.0
    assert "--rotary-scaling-factor is 8.0, config.json means 32.0" in fails("--rotary-scaling-factor 8")


def test_latent_attention_comes_from_the_config(parse: Parse, directory: Path, fails: Fails) -> None:
    """Kimi K2's launch script has a head width, of no meaning there, and no flags for the rest of YaRN's settings."""
    rope = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "beta_fast": 1.0}
    kimi = QWEN3 | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_scaling": rope,
        **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
        **{"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1},
        **{"moe_intermediate_size": 64, "first_k_dense_replace": 1},
    }
    del kimi["head_dim"]
    write_model(directory / "model", kimi)
    flags = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 "
    flags += "--v-head-dim 10 --kv-channels 64 --rotary-scaling-factor 32.0 --mscale 1.0 --mscale-all-dim 1.0"
    for words in ("", flags):
        args = parse(words)
        assert (args.multi_latent_attention, args.q_lora_rank, args.kv_lora_rank, args.v_head_dim) == (True, 24, 16, 10)
        assert (args.rope_type, args.rotary_scaling_factor, args.original_max_position_embeddings) == ("yarn", 32.0, 64)
        assert (args.beta_fast, args.mscale_all_dim, args.qk_layernorm) == (1.0, 1.0, True)
    assert "--q-lora-rank is 25, config.json means 24" in fails("--q-lora-rank 25")
    write_model(directory / "model", kimi | {"q_lora_rank": None, "rope_scaling": None})
    args = parse("--multi-latent-attention --rotary-scaling-factor 1 --mscale 1.0 --mscale-all-dim 1.0")
    assert (args.q_lora_rank, args.rope_type) == (None, "rope")
    assert "--q-lora-rank is 25, config.json means none" in fails("--q-lora-rank 25")


def test_engines_do_not_take_weights_for_quantized_ones(parse: Parse, directory: Path, fails: Fails) -> None:
    trains_only = "--debug-train-only --load-debug-rollout-data {rollout_id}.pt"
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for other in (
        {"quant_method": "compressed-tensors"},
        blocks | {"quant_method": "mxfp8"},
        blocks | {"weight_block_size": None},
        blocks | {"activation_scheme": "static"},
        blocks | {"fmt": "e5m2"},
    ):
        write_model(directory / "model", QWEN3 | {"quantization_config": other})
        assert "weights are pushed in one: quant_method fp8, fmt e4m3, activation_scheme dynamic" in fails("--bf16")
        assert not parse(f"{trains_only} --random-weights", "--colocate").pushes_float8
        assert not parse("--debug-rollout-only --rollout-num-gpus 2", "--colocate").pushes_float8


def test_engines_keep_no_copies_of_weights_that_are_pushed(fails: Fails) -> None:
    words = "--sglang-dcp-size 2 --sglang-dcp-comm-backend a2a --sglang-dcp-replicate-q-proj"
    assert "--sglang-dcp-replicate-q-proj: engines would keep copies of query projections" in fails(words)


def test_engines_take_weights_in_blocks_of_float8(parse: Parse, directory: Path, fails: Fails) -> None:
    assert not parse("--bf16").pushes_float8
    assert "--sglang-quantization fp8: engines hold the weights that are pushed" in fails("--sglang-quantization fp8")
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write_model(directory / "model", QWEN3 | {"quantization_config": blocks})
    assert parse("--bf16").pushes_float8
    assert parse("--bf16 --sglang-quantization fp8").pushes_float8
    assert "engines do not compute in float32: drop --fp32" in fails("--fp32")
    assert "--sglang-quantization awq: " in fails("--bf16 --sglang-quantization awq")
    assert not parse("--fp32 --debug-train-only --load-debug-rollout-data {rollout_id}.pt", "--colocate").pushes_float8


def test_unsupported_model(directory: Path, fails: Fails) -> None:
    (directory / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "model_type 'gpt2' is not supported" in fails()
