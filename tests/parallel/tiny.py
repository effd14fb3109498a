"""Tiny Hugging Face models of every family with random weights, and what transformers computes with them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slime.models import family_of, hf_config, shape_from_hf

VOCAB = 131
LENGTHS = [[16, 32, 8], [24, 8, 8], [40, 16], [8, 48]]
"""Tokens of each sequence of each micro-batch: multiples of 8, so that every layout can cut them."""

_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 2.4,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}

KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": False},
    "qwen3_tied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_tied": {
        "model_type": "glm4_moe",
        "head_dim": 24,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    },
    "glm4": {
        "model_type": "glm4",
        "pad_token_id": None,
        "head_dim": 24,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "glm4_tied": {
        "model_type": "glm4",
        "pad_token_id": None,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 40,
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v3_dense": {
        **_LATENT,
        "q_lora_rank": 40,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
        "first_k_dense_replace": 4,
    },
    "glm4_moe_lite": {
        **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 40,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "num_nextn_predict_layers": 1,
    },
    "moonlight": {**_LATENT, "q_lora_rank": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-3},
}
# The first of two pipeline stages has no experts.
KINDS["dense_first"] = KINDS["qwen3_moe"] | {"mlp_only_layers": [0, 1]}
KINDS["mimo"] = {"model_type": "qwen2", "num_nextn_predict_layers": 2, "tie_word_embeddings": False}
KINDS["mimo_tied"] = KINDS["mimo"] | {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}
KINDS["llama_tied"] = KINDS["llama"] | {"tie_word_embeddings": True}
KINDS["qwen3_moe_tied"] = KINDS["qwen3_moe"] | {"tie_word_embeddings": True}


def config(kind: str) -> Any:
    """The transformers config of a kind."""
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        **KINDS[kind],
    }
    return AutoConfig.for_model(**options)


def model(kind: str, seed: int = 1) -> PreTrainedModel:
    """A model with random weights, norms and biases included."""
    return random_model(kind, config(kind), seed)


def random_model(kind: str, config: Any, seed: int = 1) -> PreTrainedModel:
    """The same of another config."""
    torch.manual_seed(seed + list(KINDS).index(kind))
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 0.1)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return made


def save(kind: str, directory: Path) -> None:
    """Write the model to ``directory`` and, beside it, inputs, logits and the gradients of
    ``(logits * coefficients).sum()``."""
    directory.mkdir()
    made = model(kind)
    made.save_pretrained(directory)
    add_next_token_layers(directory, made.config)
    reference: dict[str, torch.Tensor] = {}
    for i, lengths in enumerate(LENGTHS):
        sequences = [torch.randint(0, VOCAB, (length,)) for length in lengths]
        logits = torch.cat([made(sequence[None]).logits[0] for sequence in sequences])
        coefficients = torch.randn_like(logits)
        (logits * coefficients).sum().backward()
        reference |= {f"tokens{i}": torch.cat(sequences), f"coefficients{i}": coefficients, f"logits{i}": logits}
    grads = made.state_dict()
    grads.update({name: p.grad for name, p in made.named_parameters() if p.grad is not None})
    made.load_state_dict(grads)
    made.save_pretrained(directory / "grads")
    save_file({k: v.detach().contiguous() for k, v in reference.items()}, directory / "reference.safetensors")


def add_next_token_layers(directory: Path, config: Any) -> None:
    """Add to a model's file what checkpoints of its family hold beyond the decoder, in another type."""
    path = directory / "model.safetensors"
    more = {
        prefix + name: torch.randn(shape, dtype=torch.bfloat16)
        for prefix in family_of(config).carried(config)
        for name, shape in (("eh_proj.weight", (64, 128)), ("enorm.weight", (64,)))
    }
    if more:
        save_file(load_file(path) | more, path, metadata={"format": "pt"})


def reference(directory: Path) -> dict[str, torch.Tensor]:
    """What `save` wrote beside the model."""
    return load_file(directory / "reference.safetensors")


def arguments(directory: Path, **options: Any) -> Namespace:
    """Options of one training rank for the model in ``directory``, as `parse_args` would make them."""
    return Namespace(
        **{
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "microbatch_group_size_per_virtual_pipeline_stage": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "sequence_parallel": False,
            "make_vocab_size_divisible_by": 8,
            "padded_vocab_size": None,
            "attention_backend": "auto",
            "attention_dropout": 0.0,
            "deterministic_mode": False,
            "use_dynamic_batch_size": False,
            "rollout_max_context_len": None,
            "rollout_max_prompt_len": None,
            "rollout_max_response_len": None,
            "hidden_dropout": 0.0,
            "num_experts": None,
            "bias_activation_fusion": True,
            "optimizer_cpu_offload": False,
            "optimizer_offload_fraction": 1.0,
            "overlap_cpu_optimizer_d2h_h2d": False,
            "pin_cpu_params": True,
            "distributed_timeout_minutes": 2,
            "seed": 1234,
            "column_modules": [],
            "use_routing_replay": False,
            "true_on_policy_mode": False,
            "use_rollout_routing_replay": False,
            "moe_router_bias_update_rate": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_deepep": False,
            "random_weights": False,
            "on_bad_step": "stop",
            "bad_step_factor": None,
            "custom_model_provider_path": None,
            "transformer_impl": "local",
            "params_dtype": "float32",
            "rope_scaling_factor": 8.0,
            "rotary_seq_len_interpolation_factor": None,
            "enable_mtp_training": False,
            "pushes_heads": False,
            **shape_from_hf(hf_config(directory)),
            **options,
        }
    )
