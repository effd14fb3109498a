"""A step on paper: the parts of `tools/simulate.py`."""
