"""Filters that come with slime: which groups are trained (`dynamic_sampling_filters`), which come back first."""
