"""Upstream's name for `slime.data.source.data_source`."""

from slime.data.source.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
