"""The weight tables, both ways, against the models that transformers builds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from slime.models import Family, family_of, hf_config, shape_from_hf, weight_shape
from slime.models.family import Row, Shape, gate_up
from tests.command_line import QWEN3
from tests.parallel import tiny

NUM_GPUS = 0
FC1 = "mlp.linear_fc1.weight"


def checkpoint(kind: str) -> tuple[Family, Shape, dict[str, Tensor]]:
    """A random model under the tensor names of its files."""
    model = tiny.model(kind)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors.update(per_expert(name, tensor))
    config = tiny.config(kind)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return family_of(config), weight_shape(config), tensors


def per_expert(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """transformers 5 fuses experts in memory; files hold them one by one."""
    prefix, _, fused = name.rpartition(".experts.")
    if not prefix:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        parts = weight.chunk(2) if fused == "gate_up_proj" else (weight,)
        for part, of in zip(parts, fused.removesuffix("_proj").split("_"), strict=True):
            yield f"{prefix}.experts.{expert}.{of}_proj.weight", part


def whole(family: Family, name: str, tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """The uncut, unpadded Megatron parameter."""
    dim = family.row(name)[0].dim or 0
    sources = [tensors[hf] for hf in family.sources(name, shape)]
    full = list(sources[0].shape)
    full[dim] = sum(source.shape[dim] for source in sources)
    return family.shard(name, tensors.__getitem__, shape, full, 0)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_round_trip_is_exact(kind: str) -> None:
    family, shape, tensors = checkpoint(kind)
    back: dict[str, Tensor] = {}
    for name in family.parameters(shape):
        pairs = family.join(name, [whole(family, name, tensors, shape)], shape)
        assert [hf for hf, _ in pairs] == family.hf_names(name, shape)
        assert not back.keys() & dict(pairs).keys()
        back.update(pairs)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_is_in_order_is_its_tensors_one_after_the_other(kind: str) -> None:
    """Of a whole parameter, experts above all; padding, and pieces that change places or lie side by side, are not."""
    family, shape, tensors = checkpoint(kind)
    for name in family.parameters(shape):
        parameter = whole(family, name, tensors, shape)
        joined = [tensor.flatten() for _, tensor in family.join(name, [parameter], shape)]
        in_order = bool(joined) and torch.equal(torch.cat(joined), parameter.flatten())
        row, _ = family.row(name)
        assert row.in_order(shape, tuple(parameter.shape)) is (in_order or not joined), name
        assert in_order or ".experts." not in name


def test_padding_and_columns_side_by_side_are_not_in_order() -> None:
    family, shape, _ = checkpoint("qwen3")
    row, _ = family.row("output_layer.weight")
    assert row.in_order(shape, (131, 32))
    assert not row.in_order(shape, (136, 32))
    assert Row("rows", ("a", "b"), gate_up, dim=0).in_order(shape, (8, 8))
    assert not Row("columns", ("a", "b"), gate_up, dim=1).in_order(shape, (8, 8))


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_join_to_what_they_were_cut_from(kind: str, size: int) -> None:
    """Four ranks are more than the two query groups, and 131 words are padded."""
    family, shape, tensors = checkpoint(kind)
    for name in family.parameters(shape):
        row, _ = family.row(name)
        local = list(whole(family, name, tensors, shape).shape)
        if row.dim is not None:
            local[row.dim] = -(-local[row.dim] // size)
        shards = [family.shard(name, tensors.__getitem__, shape, local, rank) for rank in range(size)]
        assert all(list(shard.shape) == local for shard in shards)
        for hf, tensor in family.join(name, shards, shape):
            assert torch.equal(tensor, tensors[hf]), name


def test_query_groups_are_interleaved() -> None:
    family, shape, _ = checkpoint("qwen3")
    q, k, v = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", ""
    d = shape.kv_channels
    sources = {q: torch.arange(4 * d)[:, None], k: 1000 + torch.arange(2 * d)[:, None]}
    v = k.replace("k_proj", "v_proj")
    sources[v] = 2000 + torch.arange(2 * d)[:, None]
    merged = whole(family, "decoder.layers.0.self_attention.linear_qkv.weight", sources, shape)
    group = [torch.arange(2 * d), 1000 + torch.arange(d), 2000 + torch.arange(d)]
    second = [torch.arange(2 * d, 4 * d), 1000 + torch.arange(d, 2 * d), 2000 + torch.arange(d, 2 * d)]
    assert torch.equal(merged[:, 0], torch.cat(group + second))


def test_vocabulary_padding_is_zero_and_stripped() -> None:
    family, shape, tensors = checkpoint("qwen3")
    name = "output_layer.weight"
    shards = [family.shard(name, tensors.__getitem__, shape, (72, 64), rank) for rank in range(2)]
    assert not shards[1][131 - 72 :].any()
    [(hf, tensor)] = family.join(name, shards, shape)
    assert hf == "lm_head.weight"
    assert torch.equal(tensor, tensors[hf])


def test_tied_output_layer_is_read_from_the_embedding_and_not_written() -> None:
    family, shape, tensors = checkpoint("qwen3_tied")
    full = whole(family, "output_layer.weight", tensors, shape)
    assert torch.equal(full, tensors["model.embed_tokens.weight"])
    assert family.join("output_layer.weight", [full], shape) == []


def test_only_needed_slices_are_read() -> None:
    family, shape, tensors = checkpoint("qwen3")
    read: list[int] = []

    class Recorder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.shape = tensor, tensor.shape

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            part = self.tensor[index]
            read.append(part.numel())
            return part

    name = "decoder.layers.2.mlp.linear_fc1.weight"
    shard = family.shard(name, lambda n: Recorder(tensors[n]), shape, (48, 64), 3)
    assert sum(read) == shard.numel()


def test_shape_of_published_configs() -> None:
    llama = AutoConfig.for_model(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    shape = shape_from_hf(llama)
    assert shape["use_rope_scaling"] is True
    assert (shape["rope_scaling_factor"], shape["rotary_base"], shape["kv_channels"]) == (8.0, 500000, 128)
    assert (shape["num_query_groups"], shape["group_query_attention"], shape["ffn_hidden_size"]) == (8, True, 14336)
    moe = shape_from_hf(tiny.config("qwen3_moe"))
    assert moe["moe_layer_freq"] == [1, 0, 1, 1]
    assert (moe["num_experts"], moe["moe_router_topk"], moe["moe_router_pre_softmax"]) == (4, 2, False)
    assert shape_from_hf(tiny.config("qwen2"))["add_qkv_bias"] is True
    assert shape_from_hf(tiny.config("qwen3"))["qk_layernorm"] is True


def test_a_tensor_of_gate_and_up_is_cut_as_two_are() -> None:
    """Each rank's first half is of the gate."""
    family, shape, _ = checkpoint("glm4")
    fused = torch.arange(2 * 96)[:, None].expand(-1, 64)
    parts = [family.shard(f"decoder.layers.1.{FC1}", lambda _: fused, shape, (96, 64), rank)[:, 0] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), torch.cat([torch.arange(48), torch.arange(96, 144),
                                                    torch.arange(48, 96), torch.arange(144, 192)]))  # fmt: skip


def test_the_projection_of_mimos_heads_reads_the_embedding_first_as_megatrons() -> None:
    name, hf = "mtp.layers.0.eh_proj.weight", "model.mtp_layers.0.input_proj.weight"
    family, shape, _ = checkpoint("mimo")
    stored = torch.randn(64, 128)
    shards = [family.shard(name, {hf: stored}.__getitem__, shape, (64, 128), rank) for rank in range(2)]
    for shard in shards:
        assert torch.equal(shard, torch.cat([stored[:, 64:], stored[:, :64]], dim=1))
    ((written, tensor),) = family.join(name, shards, shape)
    assert written == hf
    assert torch.equal(tensor, stored)


def test_rows_of_arguments_that_are_off_do_not_exist() -> None:
    for kind, are_there in (("glm4_moe", True), ("glm4_moe_tied", False)):
        family, shape, _ = checkpoint(kind)
        names = set(family.parameters(shape))
        for name in ("q_layernorm.weight", "linear_qkv.bias"):
            assert (f"decoder.layers.0.self_attention.{name}" in names) == are_there
        assert "decoder.layers.0.mlp.router.expert_bias" not in names, "the first layer is dense"
        assert "decoder.layers.1.mlp.router.expert_bias" in names


DEEPSEEK: dict[str, object] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_theta": 50000.0,
}
MOONLIGHT = KIMI | {"model_type": "deepseek_v3", "q_lora_rank": None, "rope_scaling": None}


def written(values: dict[str, object], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "configuration_deepseek.py").write_text("raise AssertionError('the code of a checkpoint was run')\n")
    return directory


def test_shape_of_deepseek_and_its_kin(tmp_path: Path) -> None:
    """The flags that their launch scripts have upstream, and names for what config.json says in its older form."""
    shape = shape_from_hf(hf_config(written(DEEPSEEK, tmp_path)))
    wanted: dict[str, object] = {"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512}
    wanted |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True}
    wanted |= {"mscale": 1.0, "mscale_all_dim": 1.0, "rotary_scaling_factor": 40.0, "rotary_base": 10000}
    wanted |= {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    wanted |= {"position_embedding_type": "rope", "group_query_attention": False, "num_query_groups": 128}
    wanted |= {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_layer_freq": [0] * 3 + [1] * 58}
    assert {name: shape[name] for name in wanted} == wanted
    assert "kv_channels" not in shape
    kimi = shape_from_hf(hf_config(written(KIMI, tmp_path)))
    assert (kimi["rotary_base"], kimi["rope_type"], kimi["num_experts"]) == (50000, "yarn", 384)
    moonlight = shape_from_hf(hf_config(written(MOONLIGHT, tmp_path)))
    assert (moonlight["q_lora_rank"], moonlight["rope_type"], moonlight["rotary_scaling_factor"]) == (None, "rope", 1.0)


def test_kimi_is_read_as_deepseek_and_runs_no_code(tmp_path: Path) -> None:
    directory = written(KIMI, tmp_path)
    before = (directory / "config.json").read_bytes()
    config = hf_config(directory)
    assert type(config).__name__ == "DeepseekV3Config"
    assert config.model_type == "deepseek_v3"
    assert family_of(config).model_types == ("deepseek_v3", "kimi_k2")
    assert (directory / "config.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"model_type 'some_other' is not supported; supported are llama, .*, kimi_k2"):
        hf_config(written(KIMI | {"model_type": "some_other"}, tmp_path))


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_scaling_of_positions_that_lacks_a_key(kind: str, tmp_path: Path) -> None:
    """Which transformers finds."""
    with pytest.raises(ValueError, match=rf"{tmp_path}: .*'rope_type'='{kind}': {{'factor'}}") as refused:
        hf_config(written(DEEPSEEK | {"rope_scaling": {"type": kind}}, tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 6, "layer_types": ["full_attention"] * 4}, "`num_hidden_layers` (6) must be equal to"),
        ({"num_hidden_layers": "four"}, "Field 'num_hidden_layers' expected int, got str"),
    ],
)
def test_values_that_contradict_each_other(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"config.json of {tmp_path}: {reason}")) as refused:
        hf_config(written(QWEN3 | changes, tmp_path))
    assert "\n" not in str(refused.value)


def rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}

YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
YARN = rope(**YARN_ROPE)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("gpt2", {}, "model_type 'gpt2' is not supported; supported are llama, qwen2, mimo, qwen3, qwen3_moe"),
        ("llama", rope(rope_type="yarn", factor=4.0), "rope_type 'yarn' is not supported"),
        ("llama", rope(**LLAMA3, high_freq_factor=8.0), "rope_type llama3 with {'high_freq_factor': 8.0}"),
        ("deepseek_v3", rope(rope_type="linear", factor=4.0), "rope_type 'linear' is not supported with multi-latent"),
        ("deepseek_v3", YARN | {"rope_interleave": False}, "deepseek_v3 with rope_interleave=false is not supported"),
        ("deepseek_v3", rope(**YARN_ROPE, mscale_all_dim=1.0), "yarn with mscale_all_dim 1.0 and no mscale"),
        ("deepseek_v3", rope(**YARN_ROPE, truncate=False), "yarn with truncate=False is not supported"),
        ("deepseek_v3", rope(**YARN_ROPE, attention_factor=2.0), "yarn with attention_factor=2.0 is not supported"),
        ("llama", {"attention_bias": True}, "llama with attention_bias=true is not supported"),
        ("llama", {"mlp_bias": True}, "llama with mlp_bias=true is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("glm4_moe", {"n_group": 4, "topk_group": 2}, "ranks groups by their 4 best experts"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok 8"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok 1"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace 2 and mlp_layer_types, by default one"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types has 2 entries for 47 layers"),
        ("glm4_moe_lite", rope(partial_rotary_factor=0.5), "glm4_moe_lite with partial_rotary_factor 0.5"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_attention"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    model_type: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        shape_from_hf(AutoConfig.for_model(model_type, **options))


def test_unknown_parameter_and_wrong_shape_are_named() -> None:
    family, shape, tensors = checkpoint("qwen3")
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.mlp\.linear_fc3\.weight"):
        family.row("decoder.layers.0.mlp.linear_fc3.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 64)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight \[7, 64\]"):
        family.shard("decoder.layers.0.mlp.linear_fc1.weight", tensors.__getitem__, shape, (96, 64), 0)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in it"):
        hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"the config\.json of .* should hold an object"):
        hf_config(tmp_path)
