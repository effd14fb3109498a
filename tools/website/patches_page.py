"""The table of docs/patches.md and docs/zh/patches.md, made from the records of slime's patches.

    python -m tools.website.patches_page

writes it into both pages. It needs slime's environment: the site's, which has no torch, takes the pages as they are.
"""

from __future__ import annotations

from pathlib import Path

from slime.driver.preflight.patch_report import TABLES
from slime.utils.patching import Patch

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "patches.md", ROOT / "docs" / "zh" / "patches.md")
_HEAD = ("| patch | releases | where | what it does | goes when |", "|---|---|---|---|---|")


def table() -> str:
    """A row for each patch, by the processes that have it."""
    rows = [_row(patch) for patches in TABLES.values() for patch in patches]
    return "".join(f"{line}\n" for line in (*_HEAD, *rows))


def _row(patch: Patch[object]) -> str:
    releases = f"{patch.package} {patch.versions.replace(',', ', ')}"
    return f"| `{patch.name}` | {releases} | {patch.where} | {patch.what} | {patch.goes} |"


def with_table(page: str) -> str:
    """A page with its table, which begins with the table's first line, made anew."""
    before, head, rest = page.partition(f"{_HEAD[0]}\n")
    if not head:
        raise ValueError(f"there is no line '{_HEAD[0]}'")
    after = rest.splitlines(keepends=True)
    while after and after[0].startswith("|"):
        del after[0]
    return before + table() + "".join(after)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_table(path.read_text()))
