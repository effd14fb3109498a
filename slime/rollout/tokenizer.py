"""The model's tokenizer, loaded once per process."""

from __future__ import annotations

import functools
from typing import Any

from slime.utils.errors import BadInputError


@functools.lru_cache(maxsize=8)
def load_tokenizer(checkpoint: str) -> Any:
    """The tokenizer of a Hugging Face directory.

    Raises:
        BadInputError: the directory holds none that loads.
    """
    from transformers import AutoTokenizer

    try:
        # False, not unset: that asks at the terminal.
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(f"--hf-checkpoint {checkpoint}: its tokenizer does not load: {error}") from error
