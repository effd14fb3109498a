"""Whether a server that was given float8 weights can be given others later, by what SGLang 0.5.17 does on its GPU.

On a Hopper or Ada GPU a layer keeps values and scales as they were loaded, and its own loaders take them again at any
time. Elsewhere SGLang makes another layout of them, once, after the first load; a push would then not fit, or land in
the wrong places. All of this goes when SGLang loads into such layers again.
"""

from __future__ import annotations

from typing import Any

_COPY = "serve a copy in bfloat16, which tools/convert_fp8_to_bf16.py makes"


def refuse_other_layouts(server_args: Any) -> None:
    """End with one line where pushed float8 weights would not be what the server of SGLang's args computes with."""
    problem = _problem(server_args)
    if problem is not None:
        raise SystemExit(f"--hf-checkpoint is in float8, and its weights are pushed: {problem}")


def _problem(server_args: Any) -> str | None:
    from sglang.srt.layers.deep_gemm_wrapper.configurer import DEEPGEMM_SCALE_UE8M0
    from sglang.srt.layers.quantization.fp8_utils import can_auto_enable_marlin_fp8
    from sglang.srt.utils import get_bool_env_var

    if server_args.device == "cpu":
        return f"SGLang on a CPU packs them for AMX as it loads them; {_COPY}"
    if get_bool_env_var("SGLANG_FORCE_FP8_MARLIN") or can_auto_enable_marlin_fp8():
        return f"SGLang packs them for Marlin on GPUs before Ada, and with SGLANG_FORCE_FP8_MARLIN; {_COPY}"
    backend, experts = server_args.moe_runner_backend, server_args.moe_a2a_backend
    if backend == "hpc_ops" or experts == "megamoe":
        return "SGLang's experts of hpc_ops and megamoe have scales of their own: drop these flags"
    if not DEEPGEMM_SCALE_UE8M0:
        return None
    why = "DeepGEMM on Blackwell makes powers of two of their scales, once:"
    if server_args.fp8_gemm_runner_backend in ("auto", "deep_gemm"):
        return f"{why} add --sglang-fp8-gemm-backend triton"
    if backend == "deep_gemm" or (backend == "auto" and experts in ("deepep", "mooncake", "nixl")):
        return f"{why} add --sglang-moe-runner-backend triton"
    return None
