"""The parts of tools/soak.py: what is planned, who is struck, what the run told of it, and whether all adds up."""
