"""The documentation site: its pages, what is made from the code, and the check of what was built."""
