"""The levels of ``tools/validate_model.py``."""
