"""Pages for readers: links lead somewhere, the site has every page, and the README's commands and figures are right."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from slime.entry.arguments import check_flags
from tools.website.pages import GENERATED, Layout, chinese_of, read_site

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *sorted(
        str(p.relative_to(ROOT)) for folder in ("docker", "docs", "examples") for p in ROOT.glob(f"{folder}/**/*.md")
    ),
]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    made: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        made.add(next(n for n in (name, *(f"{name}-{i}" for i in range(1, 99))) if n not in made))
    return made


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_readme_begins_with_two_commands_and_one_that_trains() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks[0] == "bash scripts/quickstart.sh\nbash scripts/test.sh\n"
    program, script, *words = shlex.split(blocks[1].replace("\\\n", " "))
    assert (program, script) == ("python3", "train.py")
    check_flags(words)


def test_the_readme_is_brief_about_flags() -> None:
    """The rest is a page of its own, which has all of the README's, too."""
    table = re.search(r"^\| to \| pass \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert table is not None
    assert len(table[1].splitlines()) <= 6
    page = (ROOT / "docs" / "flags.md").read_text()
    assert [flag for flag in set(re.findall(r"--[a-z][a-z-]+", table[1])) if flag not in page] == []


def test_the_readmes_figures_are_measured_ones() -> None:
    """The numbers that its table gives with decimals or thousands stand on the page that their row links to."""
    rows = re.findall(
        r"^\| \[[^\]]+\]\((docs/\w+\.md)[^|]*\|[^|]*\|[^|]*\| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    for page, figures in rows:
        numbers = re.findall(r"\d+(?:[.,]\d+)+", figures)
        assert len(numbers) >= 2
        assert [number for number in numbers if number not in (ROOT / page).read_text()] == []


def test_every_page_is_in_the_side_bar_once_in_both_languages(tmp_path: Path) -> None:
    site = read_site()
    layout = Layout(site, tmp_path)
    layout.write()
    for language in ("en", "zh"):
        entries = [entry for part in layout.side_bar(language)[1:] for pages in part.values() for entry in pages]
        places = [place for entry in entries for place in entry.values()]
        assert len(set(places)) == len(places) == len(site.pages) - 1
        assert all(title.strip() for entry in entries for title in entry)
        own = [place for place in places if not place.startswith("../")]
        assert all((tmp_path / language / place).is_file() for place in own)
        # Pages that only a link leads to would be in no side bar.
        markdown = {str(file.relative_to(tmp_path / language)) for file in (tmp_path / language).rglob("*.md")}
        assert markdown == {*own, "index.md"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_index_has_the_side_bars_pages_in_its_order(language: str) -> None:
    site = read_site()
    pages = [page for part in site.parts for page in part.pages if page not in GENERATED]
    if language == "zh":
        pages = [chinese_of(page) if (ROOT / chinese_of(page)).is_file() else page for page in pages]
    index = ROOT / (site.front if language == "en" else chinese_of(site.front))
    text = index.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [part.titles[language] for part in site.parts]
    listed = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\)", text, re.MULTILINE)
    assert [os.path.normpath(index.parent / link) for _, link in listed] == [str(ROOT / page) for page in pages]
    for title, link in listed:
        assert f"# {title}\n" in (index.parent / link).read_text().replace("`", "")
