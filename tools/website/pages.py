"""The pages of the site, laid out for the generator: one folder of Markdown a language, links as the site has them.

On GitHub a page's links lead to files of the repository. Here each such file has one place on the site, in one of the
two languages, and links within a language stay links between Markdown files, which the generator checks.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tools.website.reference import GENERATED

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh")
ENGLISH_ONLY = "(英文)"
"""What follows the title of a page that the Chinese side bar has in English alone."""
_CODE = r"^```.*?^```|`[^`\n]*`"
_LINK = re.compile(rf"{_CODE}|\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^```.*?^```|^(#+ )([^\n]+)$", re.DOTALL | re.MULTILINE)


class SiteError(Exception):
    """What is wrong with the pages: one line, with the file and what to do."""


@dataclass(frozen=True)
class Part:
    """One heading of the side bar."""

    titles: Mapping[str, str]
    pages: list[str]
    """Paths from the repository's root, of the English side."""


@dataclass(frozen=True)
class Site:
    """docs/site.yml."""

    name: str
    front: str
    parts: list[Part]

    @property
    def pages(self) -> list[str]:
        """Every English page, in the order of the side bar."""
        return [self.front, *(page for part in self.parts for page in part.pages)]


def read_site(root: Path = ROOT) -> Site:
    """The site that docs/site.yml describes, once it names every page in docs.

    Raises:
        SiteError: a page is missing there, stands there twice, or does not exist.
    """
    written = yaml.safe_load((root / "docs" / "site.yml").read_text())
    parts = [Part(part["title"], [_from_root(page) for page in part["pages"]]) for part in written["parts"]]
    site = Site(written["name"], _from_root(written["front"]), parts)
    present = {_name(path, root) for path in (root / "docs").rglob("*.md")}
    english = {page for page in present if language_of(page) == "en"}
    for page in site.pages:
        if site.pages.count(page) > 1:
            raise SiteError(f"docs/site.yml: {page} stands there twice; keep one")
        if page not in GENERATED and not (root / page).is_file():
            raise SiteError(f"docs/site.yml: there is no {page}; take it out, or write the page")
    if absent := sorted(english - set(site.pages)):
        raise SiteError(f"docs/site.yml: {', '.join(absent)} is in no part; add it to one")
    if strays := sorted(present - english - {chinese_of(page) for page in site.pages}):
        raise SiteError(f"{', '.join(strays)}: no English page of that name; write docs/{Path(strays[0]).name}")
    return site


def _from_root(page: str) -> str:
    return os.path.normpath(f"docs/{page}")


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def language_of(path: str) -> str:
    """The language of a file of the repository."""
    return "zh" if path.startswith("docs/zh/") or path.endswith("_zh.md") else "en"


def chinese_of(page: str) -> str:
    """Where the Chinese side of an English page is, if it is there."""
    if page.startswith("docs/"):
        return page.replace("docs/", "docs/zh/", 1)
    folder = PurePosixPath(page).parent
    return f"docs/zh/{folder}.md" if len(folder.parts) == 1 else page.replace(".md", "_zh.md")


def place_of(path: str) -> PurePosixPath:
    """Where a file of the repository is below the folder of its language: a page, or another file to read as text."""
    for folder in ("docs/zh/", "docs/"):
        if path.startswith(folder):
            return PurePosixPath(path.removeprefix(folder))
    if not path.endswith(".md"):
        return PurePosixPath("repository", f"{path}.txt")
    # The generator makes a folder's front page of a README: it gets its folder's name.
    parent = PurePosixPath(path).parent
    return PurePosixPath("repository", f"{parent}.md" if parent.name else "slime.md")


def anchor_of(heading: str) -> str:
    """GitHub's name of a heading, without the number of a repeated one."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def title_of(text: str) -> str:
    """A page's first heading."""
    return next((m[2].replace("`", "") for m in _HEADING.finditer(text) if m[1]), "")


class Layout:
    """Lays the pages out below a folder: ``en`` and ``zh``, with what they link to."""

    def __init__(self, site: Site, folder: Path, root: Path = ROOT) -> None:
        self.site, self.folder, self.root = site, folder, root
        self.titles: dict[str, str] = {}
        """Of each page that was laid out, by its path in the repository."""
        self.sources: dict[tuple[str, str], str] = {}
        """Path in the repository of each page, by language and place."""
        self._linked: list[str] = []

    def write(self) -> None:
        """Write all pages, and every file of the repository that one of them links to.

        Raises:
            SiteError: a link leads nowhere.
        """
        wanted = [*self.site.pages, *(page for page in map(chinese_of, self.site.pages) if self._exists(page))]
        self._linked = []
        done: set[str] = set()
        while wanted:
            for path in wanted:
                self._write(path)
            done.update(wanted)
            wanted = [path for path in dict.fromkeys(self._linked) if path not in done]

    def _exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    def _write(self, path: str) -> None:
        to = self.folder / language_of(path) / place_of(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not path.endswith(".md"):
            shutil.copyfile(self.root / path, to)
            return
        text = GENERATED[path]() if path in GENERATED else (self.root / path).read_text()
        self.titles[path] = title_of(text)
        self.sources[language_of(path), str(place_of(path))] = path
        to.write_text(_with_anchors(_plain_pipes(self._with_links(path, text))))

    def _with_links(self, page: str, text: str) -> str:
        def changed(match: re.Match[str]) -> str:
            target = match[1]
            if target is None or target.startswith("#") or re.match(r"[a-z]+:", target):
                return match[0]
            return f"]({self._link(page, target)})"

        return _LINK.sub(changed, text)

    def _link(self, page: str, target: str) -> str:
        """A link of a page as its copy has it."""
        name, _, anchor = target.partition("#")
        path = os.path.normpath(f"{PurePosixPath(page).parent}/{name}")
        if (self.root / path).is_dir():
            path = f"{path}/README.md"
        if path not in GENERATED and not self._exists(path):
            raise SiteError(f"{page}: the link to {target} leads nowhere; there is no {path}")
        self._linked.append(path)
        here, there = language_of(page), language_of(path)
        place = place_of(path)
        if here != there:  # the generator of one language does not know the pages of the other
            place = place.with_suffix(".html") if place.suffix == ".md" else place
        start, end = (_in_site(language, at) for language, at in ((here, place_of(page)), (there, place)))
        return os.path.relpath(end, start.parent) + (f"#{anchor}" if anchor else "")

    def side_bar(self, language: str) -> list[dict[str, Any]]:
        """The navigation of one language, as the generator's configuration has it."""
        front = self.site.front if language == "en" else chinese_of(self.site.front)
        entries: list[dict[str, Any]] = [{self.titles[front]: str(place_of(front))}]
        for part in self.site.parts:
            entries.append({part.titles[language]: list(self._entries(part, language))})
        return entries

    def _entries(self, part: Part, language: str) -> Iterator[dict[str, str]]:
        for page in part.pages:
            if language == "en":
                yield {self.titles[page]: str(place_of(page))}
            elif (chinese := chinese_of(page)) in self.titles:
                yield {self.titles[chinese]: str(place_of(chinese))}
            else:
                yield {f"{self.titles[page]}{ENGLISH_ONLY}": f"../{place_of(page).with_suffix('.html')}"}


def _in_site(language: str, place: PurePosixPath) -> PurePosixPath:
    return place if language == "en" else PurePosixPath("zh") / place


def _with_anchors(text: str) -> str:
    """The page with the names of its headings written out, as GitHub makes them."""
    made: set[str] = set()

    def named(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        anchor = anchor_of(match[2])
        anchor = next(name for name in (anchor, *(f"{anchor}-{i}" for i in range(1, 99))) if name not in made)
        made.add(anchor)
        return f"{match[0]} {{#{anchor}}}"

    return _HEADING.sub(named, text)


def _plain_pipes(text: str) -> str:
    r"""The page without the backslashes before pipes in code in tables: GitHub wants them, the generator shows them."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line.startswith("|"):
            lines[i] = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
    return "\n".join(lines)
