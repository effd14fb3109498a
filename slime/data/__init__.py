"""Samples, and the columns that they become: the nouns that every part shares.

Data sources are here too, under the names that the API document imports.
"""

from __future__ import annotations

import importlib
from typing import Any

from slime.data.batch import OptimizerStep, TrainBatch, text_batch
from slime.data.columns import Column, ColumnError
from slime.data.ragged import Ragged
from slime.data.sample import Group, PrefixCacheInfo, RolloutBatch, Sample, SpecInfo, Status

__all__ = [
    "Column",
    "ColumnError",
    "DataSource",
    "Group",
    "OptimizerStep",
    "PrefixCacheInfo",
    "Ragged",
    "RolloutBatch",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "Sample",
    "SpecInfo",
    "Status",
    "TrainBatch",
    "text_batch",
]
_SOURCES = ("DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer")


def __getattr__(name: str) -> Any:
    """The data sources, which import much more than these nouns, when they are asked for."""
    if name in _SOURCES:
        return getattr(importlib.import_module("slime.data.source.data_source"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
