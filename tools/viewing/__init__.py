"""The parts of ``tools/view_run.py``."""
