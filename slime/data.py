"""The names that the API document imports from here."""

from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample"]
