"""Stands in for sierra-research/tau-bench where run.sh and the tests run: its interface, a shop of one tool or two."""
