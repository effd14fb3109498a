"""What a filter of groups says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """Whether a finished group is trained.

    ``reason`` names the metric ``rollout/dynamic_filter/drop_<reason>`` under which a dropped group is counted. A group
    with ``keep_when_insufficient`` is kept all the same where another round of prompts would be needed to replace it.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
