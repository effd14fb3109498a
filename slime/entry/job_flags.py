"""Secret flags of a Ray job, which are not on its command line: its submitter leaves them with that Ray, and the driver
takes them away.

The job's command line and its environment would not do: `ray job list` shows both, Ray's logs the second as well, and
ps wherever one of the job's workers starts.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence

from slime.utils.errors import BadInputError

JOB_VARIABLE = "SLIME_JOB_SECRET_FLAGS"
"""Under which name its Ray keeps a job's flags, in the job's environment."""
_PROTOCOL = "gcs"
_FIRST = "the secret flags of a job"
"""In front, as Ray logs the first 15 bytes of a package that it could not keep."""
_ANSWER_S = 60


def given_words() -> list[str]:
    """This command line with, once, what was left out of it if it is a job's; BadInputError if Ray has that no more."""
    place = os.environ.pop(JOB_VARIABLE, "")
    if not place:
        return sys.argv[1:]
    kept = _take(place)
    if kept is None:
        raise BadInputError(
            f"{JOB_VARIABLE}: this Ray has the job's secret flags no more; it keeps them for 10 minutes and for one "
            "start of train.py: submit the job again"
        )
    return [*sys.argv[1:], *(str(word) for word in json.loads(kept)[1:])]


def package(words: Sequence[str]) -> tuple[str, str, bytes]:
    """The value of `JOB_VARIABLE`, a path of a Ray's job server and bytes to PUT: it keeps words for 10 minutes."""
    name = f"slime_{secrets.token_hex(16)}"
    return f"{_PROTOCOL}://{name}", f"/api/packages/{_PROTOCOL}/{name}", json.dumps([_FIRST, *words]).encode()


def _take(place: str) -> bytes | None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    address = os.environ.get("RAY_ADDRESS", "")
    try:
        store = GcsClient(address=address)
        kept: bytes | None = store.internal_kv_get(place.encode(), timeout=_ANSWER_S)
        store.internal_kv_del(place.encode(), False, timeout=_ANSWER_S)
    except (RayError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise BadInputError(
            f"{JOB_VARIABLE}: the Ray at RAY_ADDRESS={address} does not give the job's secret flags ({why}): "
            "submit the job again"
        ) from error
    return kept
