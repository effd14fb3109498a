"""tools/model_args.py and scripts/models: flags that say what config.json says, and what a contradiction reads like."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from slime.options.checks.model_shape import contradictions
from slime.options.flags.patterns import layer_pattern, written_pattern
from tests import shipped
from tools import model_args

NUM_GPUS = 0

UPSTREAM: dict[str, str] = json.loads(Path(__file__).with_name("test_options_shapes.json").read_text())
UPSTREAM_IS_WRONG = {
    "glm4-32B": {"num_layers", "num_query_groups"},
    "qwen2.5-1.5B": {"rotary_base"},
}
"""Flags of upstream's scripts that the published config.json contradicts."""
SUPPORTED = shipped.supported()
FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "partial_rotary_factor": "rotary_percent",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "num_experts"),
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
"""Numbers of config.json -> the Megatron argument that says the same."""
SAID_OTHERWISE = {
    "glm_moe_dsa": {"kv_channels", "moe_shared_expert_intermediate_size"},
    "minimax_m2": {"moe_ffn_hidden_size"},
    "qwen3_5_moe": {"ffn_hidden_size"},
}
"""By model_type, arguments for which config.json has another field or none: latent attention has no one width of heads,
shared experts are counted, and where all layers have experts there is one width of an MLP."""
ARCHITECTURES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def bash(program: str, **variables: str) -> list[str]:
    """The words that a program prints."""
    command = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    ran = subprocess.run([*command, "bash", "-euc", program], capture_output=True, text=True, timeout=300, check=True)
    return ran.stdout.split("\n")[:-1]


@pytest.mark.parametrize("name", shipped.CHECKPOINTS)
def test_the_script_is_what_the_tool_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose family slime has no table of has no script, and the tool says why."""
    file, config = shipped.SCRIPTS / f"{name}.sh", shipped.CONFIGS / name
    if name in SUPPORTED:
        checkpoint = shipped.CHECKPOINTS[name]
        command = f"python3 tools/model_args.py {config} --name {checkpoint} > {file}"
        assert model_args.main([str(config), "--name", checkpoint]) == 0
        assert file.is_file(), f"make it: {command}"
        assert capsys.readouterr().out == file.read_text(), f"make it anew: {command}"
        assert model_args.main([str(config / "config.json"), "--check", str(file)]) == 0
    else:
        assert not file.exists()
        with pytest.raises(SystemExit) as stop:
            model_args.main([str(config)])
        assert stop.value.code == 2
        message = capsys.readouterr().err.partition("error: ")[2]
        assert message == f"{shipped.refusal(name)}\n"


def test_every_script_and_config_is_of_a_model_that_is_named() -> None:
    scripts = [file.stem for file in shipped.SCRIPTS.iterdir() if file.name != ".shellcheckrc"]
    assert sorted(scripts) == sorted(SUPPORTED)
    assert sorted(directory.name for directory in shipped.CONFIGS.iterdir()) == sorted(shipped.CHECKPOINTS)


def test_every_model_of_the_upstream_system_has_a_config() -> None:
    """Its own, or that of a model with the same flags, where it has flags of its own."""
    assert {*shipped.CHECKPOINTS, *shipped.ALIASES} == {*UPSTREAM, "llama3-8B", "llama3-70B"}
    for name, model in shipped.ALIASES.items():
        assert UPSTREAM[name] in ("", UPSTREAM[model])
        assert name not in shipped.CHECKPOINTS


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_flags_alone_mean_the_model(name: str) -> None:
    """For tools that do not read config.json: what the script leaves at its default is so in the config too.

    But for what the model does not have: no flag says so where Megatron's default is a number.
    """
    shape = model_args.read_shape(str(shipped.CONFIGS / name))
    _, defaults = model_args._megatron_flags()
    values = defaults | model_args.flags_of(shipped.SCRIPTS / f"{name}.sh")
    flags = {
        attribute: values[attribute] for attribute in shape if attribute in values and shape[attribute] is not None
    }
    assert set(contradictions(flags, shape)) <= set(model_args.LEFT_OUT)
    unset = {attribute for attribute in shape if values.get(attribute) is None and shape[attribute]}
    assert unset <= set(model_args.LEFT_OUT)


@pytest.mark.parametrize("name", [name for name in SUPPORTED if UPSTREAM.get(name)])
def test_scripts_of_the_upstream_system(name: str, tmp_path: Path) -> None:
    (tmp_path / "upstream.sh").write_text(f"MODEL_ARGS=({UPSTREAM[name]})")
    found = contradictions(
        model_args.flags_of(tmp_path / "upstream.sh"), model_args.read_shape(str(shipped.CONFIGS / name))
    )
    assert set(found) == UPSTREAM_IS_WRONG.get(name, set())


@pytest.mark.parametrize("name", shipped.unsupported())
def test_configs_of_other_models_say_what_upstream_says(name: str, tmp_path: Path) -> None:
    """All of it and nothing else, in fields that transformers' class of the model has."""
    kind, file, config = shipped.model_type(name), shipped.config_json(name), shipped.config(name)
    (tmp_path / "upstream.sh").write_text(f"MODEL_ARGS=({UPSTREAM[name]})")
    flags = model_args.flags_of(tmp_path / "upstream.sh")
    text = config.get_text_config()
    said = file | file.get("text_config", {})
    said.pop("text_config", None)
    assert said.pop("architectures") == [ARCHITECTURES[kind]]
    assert {field: getattr(text, field) for field in said} == said
    assert said.pop("model_type") == text.model_type
    said |= said.pop("rope_parameters")
    assert {FIELDS[field]: said.pop(field) for field in FIELDS if field in said} == {
        argument: value
        for argument, value in flags.items()
        if argument in FIELDS.values() and argument not in SAID_OTHERWISE.get(kind, ())
    }
    layers, width = flags.get("moe_layer_freq"), flags.get("moe_ffn_hidden_size")
    meant = {
        "rope_type": "default",
        "hidden_act": "silu" if flags["swiglu"] else "gelu",
        "attention_bias": flags["add_bias_linear"],
        "tie_word_embeddings": not flags.get("untie_embeddings_and_output_weights"),
        "norm_topk_prob": True,  # as Megatron's routers do
        "first_k_dense_replace": layers and layers.index(1),
        "n_shared_experts": width and flags.get("moe_shared_expert_intermediate_size", 0) // width,
    }
    assert {"hidden_act", "tie_word_embeddings"} <= said.keys()
    assert {field: meant[field] for field in said} == said


def test_sourcing() -> None:
    script = shipped.SCRIPTS / "qwen3-4B.sh"
    print_checkpoint = 'printf "%s\\n" "${CKPT_ARGS[@]}"'
    assert bash(f"source {script}; {print_checkpoint}") == ["--hf-checkpoint", "Qwen/Qwen3-4B"]
    assert bash(f"source {script}; {print_checkpoint}", HF_CHECKPOINT="/a b") == ["--hf-checkpoint", "/a b"]
    assert bash(f"CKPT_ARGS=(--load x); source {script}; {print_checkpoint}") == ["--load", "x"]
    added = bash(f'source {script}; MODEL_ARGS+=(--rotary-base 10000); printf "%s\\n" "${{MODEL_ARGS[@]}}"')
    assert added[-2:] == ["--rotary-base", "10000"]
    assert added.count("--rotary-base") == 2


def test_patterns_are_no_patterns_of_file_names(tmp_path: Path) -> None:
    """Users write ${MODEL_ARGS[@]} without quotes, in whatever directory."""
    shape = model_args.read_shape(str(shipped.CONFIGS / "qwen3-30B-A3B"))
    (tmp_path / "m.sh").write_text(model_args.script(shape | {"moe_layer_freq": [0] * 3 + [1] * 45}, "m"))
    for name in ("0+1", "0+145", "03+145", "1"):
        (tmp_path / name).touch()
    words = bash(f'cd {tmp_path}; source m.sh; printf "%s\\n" ${{MODEL_ARGS[@]}}')
    assert model_args.flags_of(tmp_path / "m.sh")["moe_layer_freq"] == [0] * 3 + [1] * 45
    assert len(words) == len(bash(f'source {tmp_path}/m.sh; printf "%s\\n" "${{MODEL_ARGS[@]}}"'))


@pytest.mark.parametrize("layers", [[0], [1, 1, 1], [0, 1, 1, 0], [0] * 3 + [1] * 58])
def test_patterns_are_read_as_they_were_written(layers: list[int]) -> None:
    assert layer_pattern(written_pattern(layers)) == layers


CHECKS: dict[str, tuple[str, list[str]]] = {
    "--num-attention-heads 20 --num-query-groups 4 --ffn-hidden-size 6912 --max-position-embeddings 32768 --bf16": (
        "qwen3-4B",  # the numbers of the API reference
        [
            "--ffn-hidden-size is 6912, config.json means 9728",
            "--max-position-embeddings is 32768, config.json means 40960",
            "--num-attention-heads is 20, config.json means 32",
            "--num-query-groups is 4, config.json means 8",
        ],
    ),
    "--rotary-base 5 --rotary-base 1000000": ("qwen3-4B", []),
    "--untie-embeddings-and-output-weights --no-qk-layernorm": (
        "qwen3-4B",
        [
            "--no-qk-layernorm is False, config.json means True",
            "--untie-embeddings-and-output-weights is True, config.json means False",
        ],
    ),
    "--num-experts 8": ("qwen3-4B", ["--num-experts is 8, config.json means none"]),
    "--moe-layer-freq 1": ("qwen3-30B-A3B", []),
    "--moe-layer-freq [0]*3+[1]*45": (
        "qwen3-30B-A3B",
        ["--moe-layer-freq is [0]*3+[1]*45, config.json means [1]*48"],
    ),
    "--use-rope-scaling --rotary-scaling-factor 8": (
        "llama3.2-3B-Instruct",
        ["--rotary-scaling-factor is 8.0, config.json means 32.0"],
    ),
}


@pytest.mark.parametrize("words", CHECKS)
def test_check_names_each_flag_with_both_values(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, expected = CHECKS[words]
    file = tmp_path / "my.sh"
    file.write_text(f"export MODEL_ARGS=(\n  --swiglu {words}\n)")
    assert model_args.main([str(shipped.CONFIGS / name), "--check", str(file)]) == (1 if expected else 0)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"{file}: {sentence}" for sentence in expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{qwen}", "--check", "{tmp}/none.sh"], "none.sh: there is no such file"),
        (["{qwen}", "--check", "{tmp}/empty.sh"], "empty.sh: it does not define MODEL_ARGS"),
        (["{qwen}", "--check", "{tmp}/broken.sh"], "broken.sh: it does not define MODEL_ARGS"),
        (["{qwen}", "--check", "{tmp}/unknown.sh"], "unknown flag --num-leyers; did you mean --num-layers?"),
        (["{tmp}"], "there is no config.json in it"),
        (["{tmp}/none"], "there is no such directory"),
        (["{qwen}", "--name", "$(rm x)"], "--name $(rm x): only letters"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {
        "empty": "MODEL_ARGS=()",
        "broken": "MODEL_ARGS=(--swiglu); false",
        "unknown": "MODEL_ARGS=(--num-leyers 3)",
    }
    for name, text in contents.items():
        (tmp_path / f"{name}.sh").write_text(text)
    filled: list[Any] = [word.format(qwen=shipped.CONFIGS / "qwen3-4B", tmp=tmp_path) for word in arguments]
    with pytest.raises(SystemExit) as stop:
        model_args.main(filled)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
