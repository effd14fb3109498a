"""The model that ``--hf-checkpoint`` names: its directory, and its shape against the flags."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.options.checkpoint import find_checkpoint, is_torch_dist
from slime.options.errors import OptionError
from slime.options.flags.megatron_names import flag_saying
from slime.options.flags.patterns import written_pattern
from slime.options.flags.values import json_value

_OVERRIDES = "--sglang-json-model-override-args"
OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Weights that neither engines nor trainers read: a hub repository may hold them beside the safetensors."""


def model_directory(checkpoint: str, *, with_weights: bool, flag: str = "--hf-checkpoint") -> str:
    """A model as an absolute directory; a hub id is downloaded (or found in the cache) first.

    Args:
        checkpoint: what the user gave.
        with_weights: whether to download weights too.
        flag: by which the user gave it.

    Raises:
        OptionError: it is neither directory nor hub id, or cannot be downloaded.
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

    Raises:
        OptionError: weights would be pushed to engines that serve them quantized in another way, or copies of them.
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

    None of a Hugging Face model's directory, also where a run saved its checkpoints in there.

    Raises:
        FileNotFoundError, ValueError: as `find_checkpoint`.
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


def take_rotary_factor(args: Namespace, given: set[str]) -> None:
    """``--rotary-scaling-factor``, as Llama's model scripts call ``--rope-scaling-factor``; with MLA it is its own."""
    if "rotary_scaling_factor" not in given or args.multi_latent_attention:
        return
    factor = args.rotary_scaling_factor
    if "rope_scaling_factor" in given and not _same(args.rope_scaling_factor, factor):
        raise OptionError(
            f"--rotary-scaling-factor {factor} and --rope-scaling-factor {args.rope_scaling_factor} differ: drop one"
        )
    args.rope_scaling_factor = factor
    given.add("rope_scaling_factor")


def apply_shape(args: Namespace, shape: dict[str, Any], given: set[str], warnings: list[str]) -> None:
    """Take the model's shape from its config where no flag gives it, and compare it with the flags that do.

    Args:
        args: changed in place.
        shape: Megatron-LM's argument names with the values that config.json means.
        given: the attributes that flags or YAML set.
        warnings: gets the mismatches with ``--allow-config-mismatch``.

    Raises:
        OptionError: a flag contradicts config.json, or another.
    """
    own = {name: getattr(args, name, None) for name in given}
    if own.get("mtp_num_layers") == 0 and not args.enable_mtp_training:
        del own["mtp_num_layers"]  # says that no heads are trained
    mismatches = contradictions(own, shape)
    for name, value in shape.items():
        if name not in mismatches:
            setattr(args, name, value)
    if mismatches:
        message = f"flags contradict {args.hf_checkpoint}/config.json: {'; '.join(mismatches.values())}"
        if getattr(args, "random_weights", False):  # nothing would be loaded that does not fit
            raise OptionError(f"{message}; drop the flags: --random-weights makes the model that config.json describes")
        if not args.allow_config_mismatch:
            raise OptionError(f"{message}; drop the flags, or keep them with --allow-config-mismatch")
        warnings.append(message)
    pattern = getattr(args, "moe_layer_freq", None)
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise OptionError(
            f"--num-layers is {args.num_layers}, and --moe-layer-freq, which {args.hf_checkpoint}/config.json gives "
            f"where no flag does, is of {len(pattern)} layers: drop the flags, or let both say the same"
        )


def config_of_engines(args: Namespace, config: Any) -> Any:
    """A Hugging Face config as SGLang changes it by ``--json-model-override-args``; None where these are not given.

    Raises:
        OptionError: the overrides are no JSON object, or have a value that no such config has.
    """
    given = getattr(args, "sglang_json_model_override_args", None)
    if not given:
        return None
    try:
        overrides = json_value(given)
    except ValueError as error:
        raise OptionError(f"{_OVERRIDES} {given} is no JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise OptionError(f"{_OVERRIDES} {given} should be an object {{...}}")
    config = copy.deepcopy(config)
    for name, value in overrides.items():
        try:
            setattr(config, name, value)
        except Exception as error:  # transformers' own checks have classes of their own
            raise OptionError(f"{_OVERRIDES}: {' '.join(str(error).split())}") from error
    return config


def check_engines(shape: dict[str, Any], of_engines: dict[str, Any]) -> None:
    """Refuse engines whose config has another model than that of the trainers; their context may be another.

    Args:
        shape: as of `apply_shape`, and so ``of_engines``.

    Raises:
        OptionError: overrides change what trainers compute by.
    """
    names = [name for name in shape | of_engines if name != "max_position_embeddings"]  # each may have names of its own
    changed = [name for name in names if shape.get(name) != of_engines.get(name)]
    if changed:
        values = ", ".join(f"{name} {_shown(of_engines.get(name))} for {_shown(shape.get(name))}" for name in changed)
        raise OptionError(
            f"{_OVERRIDES} gives engines another model than trainers have ({values}): change config.json instead, "
            "which both read, or keep it with --allow-config-mismatch"
        )


def contradictions(given: dict[str, Any], shape: dict[str, Any]) -> dict[str, str]:
    """The attributes that flags set to something else than config.json means, each with a sentence that says so.

    Args:
        given: the attributes that flags set, of which None is none.
        shape: as of `apply_shape`.
    """
    found = {}
    for name, value in shape.items():
        own = given.get(name)
        if name == "moe_layer_freq" and isinstance(own, int) and isinstance(value, list):
            own = [int(layer % own == 0) for layer in range(len(value))] if own > 0 else own
        if own is not None and not _same(own, value):
            found[name] = f"{_flag_of(name, own, given)} is {_shown(own)}, config.json means {_shown(value)}"
    return found


def _flag_of(name: str, value: Any, given: dict[str, Any]) -> str:
    """The flag by which an attribute got a value."""
    if name == "rope_scaling_factor" and "rotary_scaling_factor" in given:  # see `take_rotary_factor`
        return "--rotary-scaling-factor"
    return flag_saying(name, value)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return written_pattern(value) if isinstance(value, list) else str(value)


def _same(left: Any, right: Any) -> bool:
    """Whether two values mean the same; None, a thing that the model does not have, is 0 or false."""
    if left is None or right is None:
        return not left and not right
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return math.isclose(left, right, rel_tol=1e-6) if numbers else left == right
