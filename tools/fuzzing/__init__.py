"""What `tools/fuzz_options.py` is made of: processes forked for one dry run each, and the values that it tries."""
