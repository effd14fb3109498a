"""True on-policy mode: trainer and engine compute log-probs by the same kernels, in the same order."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from slime.options.errors import OptionError
from slime.options.flags.schema import option
from slime.options.rules import Rule, check

FLAG = "--true-on-policy-mode"
_FAMILIES = ("qwen2", "qwen3")


@dataclass
class SameKernelsOptions:
    """True on-policy mode: the trainer's log-probs are the engine's, bit for bit."""

    true_on_policy_mode: bool = option(
        False,
        "Have trainer and engine compute by the same kernels, so that their log-probs are the same: on Hopper's GPUs "
        "in --bf16, on hosts without GPUs in --fp32. To tell what comes of kernels from what comes of an algorithm. It "
        "is slow.",
    )


RULES = (
    Rule("true_on_policy_mode", "and", "precision=float16", " do not go together: it is for --bf16 and --fp32"),
    Rule(
        "true_on_policy_mode",
        "and",
        "num_experts multi_latent_attention lora_rank enable_mtp_training "
        "tensor_model_parallel_size>1 context_parallel_size>1 rollout_num_gpus_per_engine>1 "
        "transformer_impl=transformer_engine custom_model_provider_path",
        " do not go together: it is for whole, dense models on each side",
    ),
    Rule(
        "true_on_policy_mode",
        "and",
        "asynchronous partial_rollout over_sampling_batch_size keep_old_actor",
        " do not go together: other weights than those that are trained made some of the tokens",
    ),
    Rule(
        "true_on_policy_mode",
        "has no effect with",
        "loss_type=sft_loss",
        ", where no engine's log-probs are compared: drop it",
    ),
    Rule(
        "true_on_policy_mode", "and", "rollout_external_engine_addrs", " do not go together: slime starts its engines"
    ),
)
"""What is known with the model's config."""


def check_same_kernels(args: Namespace) -> None:
    """OptionError for a model or a layout that the mode is not for."""
    check(args, RULES)
    if not args.true_on_policy_mode:
        return
    kind = json.loads(Path(args.hf_checkpoint, "config.json").read_text())["model_type"]
    if kind not in _FAMILIES:
        raise OptionError(f"{FLAG}: it is for {' and '.join(_FAMILIES)}, and {args.hf_checkpoint} is {kind}")
