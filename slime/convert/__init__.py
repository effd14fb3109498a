"""Checkpoints from one format into another, tensor by tensor: what the programs in ``tools/convert_*.py`` do."""
