"""The model's tokenizer, loaded once per process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from slime.utils.errors import BadInputError


@functools.lru_cache(maxsize=8)
def load_tokenizer(checkpoint: str) -> Any:
    """The tokenizer of a Hugging Face directory; BadInputError where it holds none that loads."""
    from transformers import AutoTokenizer

    try:
        # False, not unset: that asks at the terminal.
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, **_stand_in(checkpoint))
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"--hf-checkpoint {checkpoint}: its tokenizer does not load: {_way_out(Path(checkpoint))}{error}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a directory that has no files
        raise BadInputError(f"--hf-checkpoint {checkpoint}: no files of a tokenizer are in it (tokenizer.json ...)")
    return tokenizer


_PROBE = "The quick brown fox jumps over the lazy dog. Seventeen plus twenty-five is 42, and 42 minus 25 is 17 again."
_PROBE_TOKENS = 32


def probe_tokens(checkpoint: str) -> list[int]:
    """A fixed text of at most 32 tokens, by which trainer and engine are compared."""
    tokens: list[int] = load_tokenizer(checkpoint)(_PROBE, add_special_tokens=False)["input_ids"]
    return tokens[:_PROBE_TOKENS]


def _way_out(checkpoint: Path) -> str:
    """What helps where a tokenizer is published as code: transformers asks for packages, or to trust it, instead."""
    if not checkpoint.is_dir() or (checkpoint / "tokenizer.json").is_file():
        return ""
    return "put a tokenizer.json beside the weights, since code there is never run (docs/launch.md); transformers: "


def _stand_in(checkpoint: str) -> dict[str, Any]:
    """A config for models that transformers has no class for, by which it would look for the tokenizer's."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    file = Path(checkpoint, "config.json")
    if not file.is_file() or json.loads(file.read_text()).get("model_type") in CONFIG_MAPPING:
        return {}
    return {"config": PreTrainedConfig()}
