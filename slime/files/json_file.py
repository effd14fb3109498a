"""JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.utils.errors import BadInputError


def read_object(file: Path) -> dict[str, Any]:
    """The object that a file holds; BadInputError if it holds something else, OSError if it cannot be read."""
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:  # of JSON, or of UTF-8; neither names the file
        raise BadInputError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{file} is damaged: it should hold an object {{...}}")
    return found
