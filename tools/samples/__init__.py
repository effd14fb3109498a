"""The parts of ``tools/view_samples.py``."""
