"""Tell GitHub which test files the checked-out commit adds or changes, as the matrix of a job (docs/ci.md).

    python3 tests/ci/detect_changed_tests.py --base origin/main

Looks at tests/test_*.py and tests/plugin_contracts/test_*.py since HEAD left BASE; a renamed file counts as added.
Appends ``matrix=`` and ``has_tests=`` to the file that GITHUB_OUTPUT names, or prints them where there is none.
Needs git and Python alone. Exit status: 2 when git does not know BASE, or a file does not say what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ci.registry import RegistryError, Row, read

PROGRAM = Path(__file__).name
PATTERNS = (":(top,glob)tests/test_*.py", ":(top,glob)tests/plugin_contracts/test_*.py")


def git(*words: str) -> str:
    """What git prints.

    Raises:
        RegistryError: with the last line of its error.
    """
    done = subprocess.run(["git", *words], capture_output=True, text=True, encoding="utf-8", errors="surrogateescape")
    if done.returncode:
        raise RegistryError((done.stderr.strip() or f"git {words[0]}: status {done.returncode}").splitlines()[-1])
    return done.stdout


def changed(base: str) -> list[str]:
    """Test files that were added or changed since ``base``, from the repository's root.

    Raises:
        RegistryError: git does not know ``base``, or no commit that it shares with HEAD.
    """
    try:
        # Without renames, of which the filter would leave out a file that was moved and changed.
        words = ["--name-only", "--diff-filter=AM", "--no-renames", "-z", f"{base}...HEAD"]
        return [name for name in git("diff", *words, "--", *PATTERNS).split("\0") if name]
    except RegistryError as error:
        raise RegistryError(
            f"git cannot compare HEAD with {base!r} ({error}); fetch it with its history, or give another --base"
        ) from None


def main() -> int:
    """Status 0, or 2 after a line for each thing that is wrong."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="origin/main", help="commit or branch to compare with (default: %(default)s)")
    base = parser.parse_args().base
    rows: list[Row] = []
    wrong: list[str] = []
    try:
        root = Path(git("rev-parse", "--show-toplevel").rstrip("\n"))
        files = changed(base)
    except RegistryError as error:
        files, wrong = [], [str(error)]
    for path in files:
        try:
            rows += read(root, path).rows()
        except RegistryError as error:
            wrong.append(str(error))
    for line in wrong:
        print(f"{PROGRAM}: error: {line}", file=sys.stderr)
    if wrong:
        return 2
    matrix = json.dumps({"include": rows}, separators=(",", ":"))
    output = f"matrix={matrix}\nhas_tests={json.dumps(bool(rows))}\n"
    if file := os.environ.get("GITHUB_OUTPUT"):
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(output)
    print(output, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
