"""The glossary's and the map's places: its names are in the files that stand beside them, in both languages alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NUM_GPUS = 0
DOCS = Path(__file__).resolve().parents[2] / "docs"
FILE = re.compile(r"\]\(((?:\.\./)+[\w/]+\.(?:py|toml))\)")


def places(page: Path) -> list[tuple[str, list[Path], set[str]]]:
    """Of each row of its tables: the term, the files of its last cell, and the names in code there."""
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    found = [(row[0], [(page.parent / file).resolve() for file in FILE.findall(row[-1])], row[-1]) for row in rows]
    return [(term, files, set(re.findall(r"`(\w+)`", cell))) for term, files, cell in found if files]


@pytest.mark.parametrize("name", ["glossary.md", "map.md"])
def test_names_are_in_the_files_beside_them(name: str) -> None:
    rows = places(DOCS / name)
    assert len(rows) > 25
    for term, files, names in rows:
        words = set(re.findall(r"\w+", " ".join(file.read_text() for file in files)))
        assert names <= words, f"{term}: {names - words} is not in {', '.join(file.name for file in files)}"


@pytest.mark.parametrize("name", ["glossary.md", "map.md"])
def test_both_languages_have_the_same_places(name: str) -> None:
    english, chinese = places(DOCS / name), places(DOCS / "zh" / name)
    assert [row[1:] for row in english] == [row[1:] for row in chinese]
