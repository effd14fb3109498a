"""The models whose config.json lies in tests/data/configs, by the names that scripts/models/*.sh have for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "data" / "configs"
SCRIPTS = ROOT / "scripts" / "models"

CHECKPOINTS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm4-32B": "zai-org/GLM-4-32B-0414",
    "glm4-9B": "zai-org/GLM-4-9B-0414",
    "glm4.5-106B-A12B": "zai-org/GLM-4.5-Air",
    "glm4.5-355B-A32B": "zai-org/GLM-4.5",
    "glm4.7-30B-A3B": "zai-org/GLM-4.7-Flash",
    "glm5-744B-A40B": "zai-org/GLM-5",
    "glm5.2-744B-A40B": "zai-org/GLM-5.2",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2-thinking": "moonshotai/Kimi-K2-Thinking",
    "llama3-70B": "meta-llama/Meta-Llama-3-70B",
    "llama3-8B": "meta-llama/Meta-Llama-3-8B",
    "llama3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2-3B-Instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "mimo-7B-rl": "XiaomiMiMo/MiMo-7B-RL",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "moonlight": "moonshotai/Moonlight-16B-A3B",
    "qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-32B": "Qwen/Qwen2.5-32B",
    "qwen2.5-3B": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6B": "Qwen/Qwen3-0.6B",
    "qwen3-1.7B": "Qwen/Qwen3-1.7B",
    "qwen3-14B": "Qwen/Qwen3-14B",
    "qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "qwen3-32B": "Qwen/Qwen3-32B",
    "qwen3-4B": "Qwen/Qwen3-4B",
    "qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-8B": "Qwen/Qwen3-8B",
    "qwen3-next-80B-A3B": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5-0.8B": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-27B": "Qwen/Qwen3.5-27B",
    "qwen3.5-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5-4B": "Qwen/Qwen3.5-4B",
    "qwen3.5-9B": "Qwen/Qwen3.5-9B",
}
"""Name -> the checkpoint that the config is of.

Of Kimi-K2-Thinking and of the models that slime has no table of, the files say what upstream's flags mean, under
transformers' names (`tests/unit/test_options_shapes.json`); what no flag says is left out.
"""
ALIASES = {
    "deepseek-v3-5layer": "deepseek-v3",  # its first layers, to try a layout: no flags of its own
    "deepseek-v3-20layer": "deepseek-v3",  # likewise
    "llama3.2-3B-Instruct-amd": "llama3.2-3B-Instruct",  # the same flags, for GPUs of another maker
    "qwen3.5-35B-A3B-vl": "qwen3.5-35B-A3B",  # the same checkpoint, with its vision encoder: no flags of its own
}
"""Names of upstream's model scripts that have no config of their own -> the model of which they are."""


@functools.cache
def config_json(name: str) -> dict[str, Any]:
    """What is in the file."""
    return dict(json.loads((CONFIGS / name / "config.json").read_text()))


def model_type(name: str) -> str:
    """As config.json has it."""
    return str(config_json(name)["model_type"])


def config(name: str) -> Any:
    """As a class of transformers reads it."""
    from slime.models import hf_config

    return hf_config(CONFIGS / name)


def supported() -> list[str]:
    """The names of the models of which slime has a table."""
    from slime.models import FAMILIES

    known = {kind for family in FAMILIES for kind in family.model_types}
    return [name for name in CHECKPOINTS if model_type(name) in known]


def unsupported() -> list[str]:
    """The names of the others."""
    known = supported()
    return [name for name in CHECKPOINTS if name not in known]


def refusal(name: str) -> str:
    """What is said of one of those."""
    from slime.models import FAMILIES

    known = ", ".join(model_type for family in FAMILIES for model_type in family.model_types)
    return f"model_type {model_type(name)!r} is not supported; supported are {known}"
