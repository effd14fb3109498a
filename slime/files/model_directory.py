"""The model that a flag names: its directory, a hub's too, and its weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slime.files.checkpoints import find_checkpoint, is_torch_dist
from slime.utils.errors import BadInputError

OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Weights that neither engines nor trainers read: a hub repository may hold them beside the safetensors."""


NO_WEIGHTS = "there are no *.safetensors in it: download or copy the model's weights there, or name another directory"
"""What is wrong with a model's directory that has its config.json alone, and what to do."""


def model_directory(checkpoint: str, *, with_weights: bool, flag: str = "--hf-checkpoint") -> str:
    """A model as an absolute directory; a hub id is downloaded (or found in the cache) first, or BadInputError.

    Args:
        with_weights: whether to download weights too.
        flag: by which the user gave it.
    """
    directory = Path(os.path.expanduser(checkpoint))
    if not os.path.isdir(directory):
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", checkpoint):
            named = "" if "/" in checkpoint else ", and a hub id is OWNER/MODEL"  # which half of one would be a name
            raise BadInputError(f"{flag} {checkpoint}: there is no such directory{named}")
        directory = Path(_download(checkpoint, with_weights, flag))
    if not (directory / "config.json").is_file():
        raise BadInputError(f"{flag} {checkpoint}: there is no config.json in it")
    return str(directory.resolve())


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
        missing = "no such directory, not in the Hugging Face cache"
        raise BadInputError(f"{flag} {hub_id}: {missing}, and {reason}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInputError(f"{flag} {hub_id}: downloading it from the hub failed: {reason}") from error
