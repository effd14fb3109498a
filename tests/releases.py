"""What the installed column of releases (docs/install.md) has not, of what tests name."""

from __future__ import annotations

from slime.utils.patching import version_of

PROVEN = version_of("megatron-core") == "0.16.1"
_DROPPED = (
    "async_tensor_model_parallel_allreduce",
    "moe_extended_tp",
    "moe_use_legacy_grouped_gemm",
    "preserve_fp32_weights",
    "sglang_cuda_graph_bs",
    "sglang_cuda_graph_max_bs",
    "sglang_torchao_config",
)
GONE = frozenset(() if PROVEN else _DROPPED)
"""Options of the proven column that the new one's megatron-core and SGLang have dropped."""


def gone_flags() -> set[str]:
    """Their flags."""
    return {f"--{name.replace('_', '-')}" for name in GONE}
