"""Where the control server of a run is, and its key: ``engines.json`` of its directory, which its owner alone reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from slime.files.json_file import read_object
from slime.files.storage import writing
from slime.utils.errors import BadInputError

_FILE = "engines.json"


def control_file(run_dir: str | Path) -> Path:
    """The file; it is there while a run that has engines is under way."""
    return Path(run_dir, _FILE)


def write_control_file(run_dir: str | Path, url: str, key: str) -> None:
    """Write it, in the place of an earlier run's; StorageError where it cannot be."""
    path = control_file(run_dir)
    with writing("--run-dir", path):
        path.unlink(missing_ok=True)  # another's mode would stay
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": url, "key": key}, file)


def read_control_file(run_dir: str | Path) -> tuple[str, str]:
    """URL and key; BadInputError where no run is under way there."""
    path = control_file(run_dir)
    try:
        found = read_object(path)
        return str(found["url"]), str(found["key"])
    except FileNotFoundError:
        if not Path(run_dir).is_dir():
            raise BadInputError(f"{run_dir}: there is no such directory: name a run's, its --run-dir") from None
        raise BadInputError(
            f"{path} is not there: the run in {run_dir} starts its engines still, or has ended, or it is none"
        ) from None
    except (OSError, KeyError) as error:
        raise BadInputError(f"{path} cannot be read: {error!r}") from None
