"""What was built, read as a browser would: every link leads somewhere, and nothing is fetched from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_FETCHED = {"canonical", "alternate", "next", "prev", "edit"}
"""Relations of a ``<link>`` that a browser only notes."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in _FETCHED and _FETCHED[tag] in given and given.get("rel") not in _NOT_FETCHED:
            self.fetched.append(given[_FETCHED[tag]])


def read_page(file: Path) -> _Page:
    """Its anchors and links."""
    page = _Page()
    page.feed(file.read_text())
    return page


def problems(folder: Path) -> list[str]:
    """One line for each link that leads nowhere, and each file of another host that a page loads."""
    pages = {file.resolve(): read_page(file) for file in sorted(folder.rglob("*.html")) if file.name != "404.html"}
    found = []
    for file, page in pages.items():
        name = file.relative_to(folder.resolve())
        found += [f"{name}: loads {url} from another host" for url in page.fetched if re.match(r"(\w+:)?//", url)]
        for url in dict.fromkeys([*page.links, *page.fetched]):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.is_file() or (anchor and target in pages and anchor not in known):
                found.append(f"{name}: the link to {unquote(url)} leads nowhere")
    for sheet in sorted(folder.rglob("*.css")):
        urls = re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text())
        found += [f"{sheet.relative_to(folder)}: loads {url} from another host" for url in urls]
    return found
