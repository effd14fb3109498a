"""For scripts that start runs and for tests of whole runs: not used by a run itself."""
