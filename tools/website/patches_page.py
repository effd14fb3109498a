"""The table of docs/patches.md and docs/zh/patches.md, made from the records of slime's patches.

    python -m tools.website.patches_page

writes it into both pages. It needs slime's environment: the site's, which has no torch, takes the pages as they are.
"""

from __future__ import annotations

from pathlib import Path

from slime.driver.preflight.patch_report import TABLES
from slime.utils.patching import Patch, told
from tools.website.observability_pages import with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "patches.md", ROOT / "docs" / "zh" / "patches.md")


def table() -> str:
    """A row for each patch, by the processes that have it."""
    return "".join(f"{_row(patch)}\n" for patches in TABLES.values() for patch in patches)


def _row(patch: Patch[object]) -> str:
    releases = f"{patch.package} {told(patch.versions).replace(',', ', ')}"
    if patch.gone:
        releases += f"; not needed in {told(patch.gone)}"
    return f"| `{patch.name}` | {releases} | {patch.where} | {patch.what} | {patch.goes} |"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), [table()]))
