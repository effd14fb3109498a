"""The cases of ``tools/bench.py``."""
