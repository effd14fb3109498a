"""Upstream's name for what `slime.data` has."""

from slime.data import Group, PrefixCacheInfo, Ragged, RolloutBatch, Sample, SpecInfo, Status

__all__ = ["Group", "PrefixCacheInfo", "Ragged", "RolloutBatch", "Sample", "SpecInfo", "Status"]
