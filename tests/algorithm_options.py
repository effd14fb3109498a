"""Options of an algorithm as `parse_args` would make them, without a command line."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from slime.options.asynchronous import AsyncOptions
from slime.options.debug import DebugOptions
from slime.options.hooks import HookOptions
from slime.options.learning.algorithm import AlgorithmOptions, CorrectionOptions, CriticOptions, derive_algorithm
from slime.options.learning.distillation import DistillationOptions
from slime.options.learning.routing import RoutingOptions
from slime.options.learning.same_kernels import SameKernelsOptions
from slime.options.lora import LoraOptions

_OTHERS: dict[str, Any] = {
    "rm_type": "math",
    "n_samples_per_prompt": 4,
    "num_rollout": None,
    "placement": "colocate",
    "asynchronous": False,
    "rollout_function_path": "unused",
    "load": None,
    "ckpt_step": None,
    "save": None,
    "lr_warmup_iters": 0,
    "column_modules": [],
    "lr_warmup_fraction": None,
}


def algorithm_options(**options: Any) -> Namespace:
    """Defaults, ``options`` over them, and what follows from both."""
    groups = (AlgorithmOptions, AsyncOptions, CorrectionOptions, CriticOptions, DebugOptions, DistillationOptions)
    groups += (HookOptions, LoraOptions, RoutingOptions, SameKernelsOptions)
    defaults = {field.name: field.default for group in groups for field in fields(group)}
    args = Namespace(**{**defaults, **_OTHERS, **options})
    derive_algorithm(args)
    return args
