"""A run's trace as one file for Perfetto."""
