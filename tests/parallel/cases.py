"""The training runs that every layout makes, and that plain PyTorch makes too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.data import TrainBatch
from tests import user_hooks
from tests.parallel import rollouts
from tests.parallel.lora_reference import LATENT


@dataclass(frozen=True)
class Case:
    """Options over `rollouts.OPTIONS`, and what is trained on."""

    options: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[int], TrainBatch] = rollouts.columns
    """Of a rollout id."""
    rollouts: int = 1
    steps: int = 2
    micro_batch_size: int | None = None


def cut_in_three(seed: int) -> TrainBatch:
    """The rollouts of `rollouts.columns`, each as three samples."""
    rows = rollouts.columns(seed)
    return rollouts.cut(rows, range(len(rows)))


def without_engine(seed: int) -> TrainBatch:
    """Supervised rows: no engine made them."""
    return rollouts.columns(seed, with_engine=False)


# A large epsilon: Adam's step is otherwise the sign of gradients that are nothing but rounding.
_ADAM = {"adam_eps": 1e-3}
_ADAPTERS = {"lora_rank": 4, "lora_alpha": 6.0, "lora_target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
_FAST = {"lr": 0.02, "lr_decay_style": "constant", "lr_warmup_iters": 0, "clip_grad": 0.2}
CASES = {
    "grpo": Case(_ADAM),
    "sft": Case(
        _ADAM | {"loss_type": "sft_loss", "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0},
        rows=without_engine,
    ),
    "cut_in_three": Case(_ADAM, rows=cut_in_three),
    "static": Case(_ADAM, micro_batch_size=1),
    "lora": Case(_ADAM | _ADAPTERS | _FAST, rollouts=3),
    "lora_latent": Case(_ADAM | _ADAPTERS | _FAST | {"lora_target_modules": list(LATENT)}, rollouts=3),
    "resume": Case(
        {"num_steps_per_rollout": 1, "advantage_estimator": "ppo", "kl_coef": 0.1}
        | {"num_critic_only_steps": 1, "critic_lr_warmup_iters": 0}
        | {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 100.0},
        steps=1,
    ),
}

_PPO = {"advantage_estimator": "ppo", "kl_coef": 0.1, "gamma": 0.98, "lambd": 0.9, "value_clip": 0.05}
_PER_TOKEN = {"calculate_per_token_loss": True}


def _custom(function: Callable[..., Any]) -> dict[str, Any]:
    path = f"{user_hooks.__file__}:{function.__name__}"
    return {"loss_type": "custom_loss", "custom_loss_function_path": path}


RL_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_loss_type": "low_var_kl", "eps_clip_c": 1.03},
    "grpo_token": _PER_TOKEN
    | {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.2, "tis_clip_low": 0.5}
    | {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.96, "rs_upper_bound": 1.04}
    | {"rs_veto_threshold": 0.92},
    "gspo": {"advantage_estimator": "gspo", "use_unbiased_kl": True, "kl_loss_type": "k3"},
    "gspo_token": _PER_TOKEN | {"advantage_estimator": "gspo", "use_kl_loss": False, "kl_loss_coef": 0.0},
    "cispo": {"advantage_estimator": "cispo", "entropy_coef": 0.0}
    | {"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.02, "tis_clip_low": 0.98}
    | {"use_rs": True, "rs_level": "sequence", "rs_upper_bound": 1.5},
    "cispo_token": _PER_TOKEN
    | {"advantage_estimator": "cispo", "kl_loss_type": "k2", "use_rollout_logprobs": True}
    | {"use_opsm": True, "opsm_delta": -0.02},
    "ppo": _PPO | {"normalize_advantages": True, "critic_lr": 0.06, "use_tis": True, "tis_clip": 1.02},
    "ppo_token": _PPO | _PER_TOKEN | {"kl_loss_type": "k2", "eps_clip_c": 1.03},
    "dr_grpo": {"loss_constant_length": 100, "use_tis": True, "tis_clip": 1.02},
    "distilled": {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.3, "normalize_advantages": True},
    "distilled_top": {"use_opd": True, "opd_type": "megatron", "opd_top_k": 8, "opd_kl_coef": 0.3},
    "custom": _custom(user_hooks.grpo) | {"kl_loss_type": "k3"},
    "custom_token": _PER_TOKEN
    | _custom(user_hooks.imitates_the_better)
    | {"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0},
}
"""An algorithm and a reduction each, other options in turns; ranges so narrow that one step leaves them."""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "offload": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "selective_moe": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "first_of_1": {"decoder_first_pipeline_num_layers": 1},
    "last_of_1": {"decoder_last_pipeline_num_layers": 1},
    "stages_of_1_3": {"pipeline_model_parallel_layout": "Et|tttL"},
    "chunks_of_0_2_1_1": {"pipeline_model_parallel_layout": "E|tt|t|tL"},
}
"""How the same is computed: other options of the model or optimizer under a layout, which change no result."""
STAGES = {
    "first_of_1": [[1], [3]],
    "last_of_1": [[3], [1]],
    "stages_of_1_3": [[1], [3]],
    "chunks_of_0_2_1_1": [[0, 1], [2, 1]],
}
"""Layers of every chunk of every pipeline stage."""
CONSTANT_RATE = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": 0.0, "min_lr": 0.0}
RL_OPTIONS = CONSTANT_RATE | {"eps_clip": 0.01, "eps_clip_high": 0.015}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "weight_decay": 0.0, "lr": 0.05, "num_steps_per_rollout": 2},
    "adam": {"lr": 1e-3, "num_steps_per_rollout": 1},
}


def steps_of(case: str, optimizer: str) -> tuple[int, ...]:
    """Optimizer steps of each rollout.

    With SGD the first rollout's second step is off policy. What ``--kl-coef`` weighs, how far the policy is from the
    reference before a rollout's first step, takes a second rollout.
    """
    if optimizer == "adam":
        return (1,)
    return (2, 1) if RL_CASES[case].get("kl_coef") else (2,)
