"""The model that ``--hf-checkpoint`` names: its directory, and its shape against the flags."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.options.errors import OptionError

WEIGHT_FILES = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]


def model_directory(checkpoint: str | None, *, with_weights: bool) -> str:
    """``--hf-checkpoint`` as an absolute directory; a hub id is downloaded (or found in the cache) first.

    Raises:
        OptionError: it is missing, is neither directory nor hub id, or cannot be downloaded.
    """
    if checkpoint is None:
        raise OptionError("--hf-checkpoint is missing")
    directory = Path(checkpoint).expanduser()
    if not directory.is_dir():
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", checkpoint):
            raise OptionError(f"--hf-checkpoint {checkpoint}: there is no such directory, and a hub id is OWNER/MODEL")
        directory = Path(_download(checkpoint, with_weights))
    if not (directory / "config.json").is_file():
        raise OptionError(f"--hf-checkpoint {checkpoint}: there is no config.json in it")
    return str(directory.resolve())


def _download(hub_id: str, with_weights: bool) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(hub_id, ignore_patterns=None if with_weights else WEIGHT_FILES))
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise OptionError(
            f"--hf-checkpoint {hub_id}: no such directory, not in the Hugging Face cache, and {reason}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OptionError(f"--hf-checkpoint {hub_id}: downloading it from the hub failed: {reason}") from error


def apply_shape(args: Namespace, shape: dict[str, Any], given: set[str], warnings: list[str]) -> None:
    """Take the model's shape from its config where no flag gives it, and compare it with the flags that do.

    Args:
        args: changed in place.
        shape: Megatron-LM's argument names with the values that config.json means.
        given: the attributes that flags or YAML set.
        warnings: gets the mismatches with ``--allow-config-mismatch``.

    Raises:
        OptionError: a flag contradicts config.json.
    """
    mismatches = []
    for name, value in shape.items():
        if name not in given or getattr(args, name) is None:
            setattr(args, name, value)
        elif not _same(getattr(args, name), value):
            flag = "--" + name.replace("_", "-")
            mismatches.append(f"{flag} is {getattr(args, name)}, config.json means {value}")
    if mismatches:
        message = f"flags contradict config.json of {args.hf_checkpoint}: {'; '.join(mismatches)}"
        if not args.allow_config_mismatch:
            raise OptionError(f"{message}; drop the flags, or keep them with --allow-config-mismatch")
        warnings.append(message)


def _same(left: Any, right: Any) -> bool:
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return math.isclose(left, right, rel_tol=1e-6) if numbers else left == right
