"""Configs of models whose positions are scaled, and how long a context they mean."""

from __future__ import annotations

from typing import Any

LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXTS: list[tuple[dict[str, Any], int]] = [
    ({}, 2048),
    ({"rope_scaling": LINEAR}, 5120),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 5120),
    ({"rope_parameters": LINEAR | {"rope_theta": 1e6}}, 5120),
    ({"rope_scaling": DYNAMIC}, 4096),
    ({"rope_scaling": DYNAMIC | {"original_max_position_embeddings": 64}}, 2048),
    ({"rope_scaling": YARN}, 2048),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 512}}, 2048),
    ({"rope_scaling": LLAMA3}, 2048),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256}}, 2048),
    ({"model_max_length": 99}, 99),
    ({"seq_length": 100, "rope_scaling": LINEAR}, 250),
    ({"model_max_length": 99, "max_sequence_length": 77}, 77),
]
"""What a config of 2048 positions says besides, and its context."""
