"""``python -I -S .../inside PROGRAM SETTINGS``: one of the programs of this folder, which imports no other of slime."""

import importlib
import os
import sys

if __name__ == "__main__":
    # Python put this folder first; its modules are found as a package, from the folder above, and nothing after them.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = importlib.import_module(f"inside.{sys.argv.pop(1)}")
    del sys.path[0]
    sys.exit(program.main())
