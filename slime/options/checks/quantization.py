"""Quantized checkpoints: in which formats weights are pushed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.options.errors import OptionError


def check_quantization(args: Namespace) -> None:
    """Set ``args.pushes_float8``: whether engines that serve blocks of float8 are pushed the trainer's weights in them.

    OptionError where engines serve pushed weights quantized in another way, or copies of them.
    """
    args.pushes_float8 = False
    if not args.num_engines or args.placement == "rollout_only":
        return
    if getattr(args, "sglang_dcp_replicate_q_proj", None):
        raise OptionError(
            "--sglang-dcp-replicate-q-proj: engines would keep copies of query projections from their start, which "
            "pushed weights do not reach: drop it"
        )
    found = json.loads(Path(args.hf_checkpoint, "config.json").read_text()).get("quantization_config")
    asked = getattr(args, "sglang_quantization", None)
    if asked is not None and not (asked == "fp8" and found):
        raise OptionError(
            f"--sglang-quantization {asked}: engines hold the weights that are pushed as --hf-checkpoint has them: "
            "drop it, and for float8 name a checkpoint that tools/convert_hf_to_fp8.py has made"
        )
    if not found:
        return
    copy = "name a copy in bfloat16, which tools/convert_fp8_to_bf16.py makes of blocks of float8"
    if not _is_block_float8(found):
        raise OptionError(
            f"--hf-checkpoint {args.hf_checkpoint}: of the ways of its quantization_config, weights are pushed in one: "
            "quant_method fp8, fmt e4m3, activation_scheme dynamic, with a weight_block_size; otherwise " + copy
        )
    if args.params_dtype == "float32":
        raise OptionError(
            f"--hf-checkpoint {args.hf_checkpoint}: its weights are in float8, with which engines do not compute in "
            f"float32: drop --fp32, or {copy}"
        )
    args.pushes_float8 = True


def _is_block_float8(quantization: dict[str, Any]) -> bool:
    blocks, kind = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    found = (quantization.get("quant_method"), quantization.get("activation_scheme"), kind)
    return found == ("fp8", "dynamic", "e4m3") and isinstance(blocks, list) and len(blocks) == 2
