"""Fields of a request to generate that sglang-router leaves out, as it knows nothing of them: they travel in one
that it passes on, and servers that slime starts take them out of it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CARRIER = "session_params"
"""SGLang's; slime has no sessions of its own there."""
CARRIED = ("return_routed_experts", "routed_experts_start_len")


def carried(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload with these fields within their carrier."""
    inside = {name: payload[name] for name in CARRIED if name in payload}
    left = {name: value for name, value in payload.items() if name not in inside}
    return left | ({CARRIER: (payload.get(CARRIER) or {}) | inside} if inside else {})


def taken_out(carrier: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The fields within a carrier, and what else it has; None for nothing."""
    inside = {name: value for name, value in (carrier or {}).items() if name in CARRIED}
    return inside, {name: value for name, value in (carrier or {}).items() if name not in inside} or None
