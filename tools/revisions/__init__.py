"""What `tools/compare_revisions.py` is made of: the runs, two trees to run them in, and what is compared."""
