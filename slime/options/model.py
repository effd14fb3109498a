"""The model that ``--hf-checkpoint`` names: its directory and its weights."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.options.checkpoint import find_checkpoint, is_torch_dist
from slime.options.errors import OptionError

OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Weights that neither engines nor trainers read: a hub repository may hold them beside the safetensors."""


def model_directory(checkpoint: str, *, with_weights: bool, flag: str = "--hf-checkpoint") -> str:
    """A model as an absolute directory; a hub id is downloaded (or found in the cache) first, or OptionError.

    Args:
        with_weights: whether to download weights too.
        flag: by which the user gave it.
    """
    directory = Path(os.path.expanduser(checkpoint))
    if not os.path.isdir(directory):
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", checkpoint):
            named = "" if "/" in checkpoint else ", and a hub id is OWNER/MODEL"  # which half of one would be a name
            raise OptionError(f"{flag} {checkpoint}: there is no such directory{named}")
        directory = Path(_download(checkpoint, with_weights, flag))
    if not (directory / "config.json").is_file():
        raise OptionError(f"{flag} {checkpoint}: there is no config.json in it")
    return str(directory.resolve())


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


def has_weights(directory: str | Path) -> bool:
    """Whether there are weights in Hugging Face's format."""
    return any(Path(directory).glob("*.safetensors"))


def stored_weights(directory: str) -> Path | None:
    """The torch_dist checkpoint that weights named by this directory are in: itself, or the latest in it.

    None of a Hugging Face model's directory, also where a run saved its checkpoints there. Raises as `find_checkpoint`.
    """
    if has_weights(directory):
        return None
    if found := find_checkpoint(directory):
        return found[0]
    return Path(directory) if is_torch_dist(directory) else None


def _download(hub_id: str, with_weights: bool, flag: str) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        unread = OTHER_WEIGHTS if with_weights else [*OTHER_WEIGHTS, "*.safetensors"]
        return str(snapshot_download(hub_id, ignore_patterns=unread))
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise OptionError(f"{flag} {hub_id}: no such directory, not in the Hugging Face cache, and {reason}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OptionError(f"{flag} {hub_id}: downloading it from the hub failed: {reason}") from error
