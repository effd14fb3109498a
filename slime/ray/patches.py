"""What is changed, from outside, of Ray as it is released, in the driver: a record each.

What decides which of them a driver needs is whether it starts a Ray, and does not join a running one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ray._private import services, worker

from slime.utils.patching import Patch

_SEEN = "==2.60.0"
_DRIVER = "the driver, where it starts a Ray of its own"
_RAYLETS_END = "Raylet is terminated."


@contextlib.contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """Starts Ray's processes in sessions of their own: a SIGTERM to the driver's group would end them before it.

    `timeout` and batch schedulers send such a one. Ray's client then waits a minute for the head, and ends this
    process. Its processes end with ours anyway.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _leave_out_raylets_last_lines() -> None:
    """Leaves out the 40 lines of its raylet's log that Ray prints when that has died.

    Our own error says it in one.
    """
    printing = worker.print_to_stdstream

    def print_others(data: dict[str, Any], *args: Any, **options: Any) -> None:
        if not any(str(line).startswith(_RAYLETS_END) for line in data.get("lines", ())):
            printing(data, *args, **options)

    worker.print_to_stdstream = print_others


SESSIONS: Patch[bool] = Patch(
    "sessions_of_rays_own", "ray", _SEEN, _DRIVER,
    "Ray has an option for it.", _sessions_of_their_own, lambda starts_ray: starts_ray,
)  # fmt: skip
"""In force while Ray is started."""

PRINTING: tuple[Patch[bool], ...] = (
    Patch(
        "raylets_last_lines", "ray", _SEEN, _DRIVER,
        "Ray has an option for it.", _leave_out_raylets_last_lines, lambda starts_ray: starts_ray,
    ),
)  # fmt: skip
