"""Build the documentation site of docs/site.yml into a folder, or stop at the first thing that is wrong.

`bash scripts/docs.sh build` calls this in an environment that has requirements/docs.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tools.website.check import problems
from tools.website.pages import LANGUAGES, Layout, SiteError, chinese_of, place_of, read_site

NAMES = {"en": "English", "zh": "中文"}
_PALETTE = [
    {"media": "(prefers-color-scheme)", "toggle": {"icon": "lucide/sun-moon", "name": "Light"}},
    {
        "media": "(prefers-color-scheme: light)",
        "scheme": "default",
        "toggle": {"icon": "lucide/sun", "name": "Dark"},
    },
    {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "toggle": {"icon": "lucide/moon", "name": "System"}},
]


def configuration(layout: Layout, language: str) -> dict[str, Any]:
    """What the generator reads, in the folder above the layout's; it takes MkDocs' names."""
    front = (
        {"en": "index.html", "zh": "zh/index.html"} if language == "en" else {"en": "../index.html", "zh": "index.html"}
    )
    return {
        "site_name": layout.site.name,
        "docs_dir": f"{layout.folder.name}/{language}",  # the generator takes no absolute paths
        "site_dir": "site" if language == "en" else f"site/{language}",
        "use_directory_urls": False,  # pages link across languages as they do on GitHub, and open as files
        "nav": layout.side_bar(language),
        "theme": {
            "language": language,
            "font": False,  # nothing comes from another host
            "features": [
                "content.code.copy",
                "navigation.sections",
                "navigation.top",
                "search.highlight",
                "toc.follow",
            ],
            "palette": _PALETTE,
        },
        "extra": {
            "generator": False,
            "alternate": [{"name": NAMES[each], "lang": each, "link": front[each]} for each in LANGUAGES],
        },
        "plugins": ["search"],
        "markdown_extensions": [
            "attr_list",
            "md_in_html",
            "tables",
            {"toc": {"permalink": True, "toc_depth": 3}},
            {"pymdownx.highlight": {"anchor_linenums": False}},
            "pymdownx.inlinehilite",
            "pymdownx.superfences",
        ],
    }


def build(output: Path) -> int:
    """Build both languages into ``output``, in place of what an earlier build left; returns the number of pages.

    Raises:
        SiteError: a page, a link or the side bar is wrong.
    """
    site = read_site()
    with tempfile.TemporaryDirectory(prefix="slime-docs-") as scratch:
        layout, made = Layout(site, Path(scratch) / "pages"), Path(scratch) / "site"
        layout.write()
        for language in LANGUAGES:
            _generate(configuration(layout, language), layout, language)
        join_languages(layout, made)
        if found := problems(made):
            raise SiteError("\n".join(found))
        if output.exists():
            shutil.rmtree(output)
        shutil.copytree(made, output)
    return len(layout.titles)


def _generate(settings: dict[str, Any], layout: Layout, language: str) -> None:
    file = layout.folder.parent / f"{language}.yml"
    file.write_text(yaml.safe_dump(settings, allow_unicode=True, sort_keys=False))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
    if result.returncode:
        printed = re.sub(r"\x1b\[[\d;]*m", "", result.stdout + result.stderr)
        raise SiteError(told(printed, layout, language) or f"the generator failed:\n{printed.strip()}")


def join_languages(layout: Layout, made: Path) -> None:
    """Let the choice of language lead from a page to its other side; the generator's leads to the front page alone.

    Raises:
        SiteError: a page has no such choice, as the generator now writes it in another way.
    """
    for page in layout.site.pages:
        if (chinese := chinese_of(page)) not in layout.titles:
            continue
        files = {"en": made / place_of(page), "zh": made / "zh" / place_of(chinese)}
        files = {language: file.with_suffix(".html") for language, file in files.items()}
        for file in files.values():
            text = file.read_text()
            for language, other in files.items():
                target = os.path.relpath(other, file.parent)
                choice = rf'(<(?:a|link\b[^>]*) href=")[^"]*(" hreflang="{language}")'
                text, count = re.subn(choice, rf"\1{target}\2", text)
                if not count:
                    raise SiteError(f"{file.relative_to(made)}: no choice of language in what the generator made")
            file.write_text(text)


def told(printed: str, layout: Layout, language: str) -> str:
    """The generator's warnings, one a line, about pages of the repository: lines are the same in their copies."""
    lines = []
    for problem, name, row, column in re.findall(r"^Warning: (.+)\n.*\[ (\S+):(\d+):(\d+) \]$", printed, re.MULTILINE):
        line = (layout.folder / language / name).read_text().splitlines()[int(row) - 1]
        links = (link for link in re.finditer(r"\]\(([^)]*)\)", line) if link.start() < int(column) <= link.end())
        link = next((f": the link to {link[1]}" for link in links), "")
        lines.append(f"{layout.sources[language, name]}:{row}{link}: {problem}")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="docs", description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the site; an earlier one in it is replaced")
    output = parser.parse_args().output
    start = time.monotonic()
    try:
        pages = build(output)
    except SiteError as error:
        for line in str(error).splitlines():
            print(f"docs: error: {line}", file=sys.stderr)
        return 1
    print(f"docs: {pages} pages in {output} ({time.monotonic() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
