"""The documentation site: its pages made from the code, its links, and what it refuses.

That every page is on it: `test_pages.py`. That the whole of it builds strictly is a step of scripts/test.sh.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from slime.entry.arguments import GROUPS
from slime.options.flags.schema import flag_of, hook_fields
from slime.utils.types import Sample
from tools.website.build import configuration, join_languages, told
from tools.website.check import problems
from tools.website.pages import Layout, SiteError, read_site
from tools.website.reference import flags_page, hooks_page, sample_fields, sample_page, sample_words

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
SITE = """
name: x
front: index.md
parts:
  - title: {en: Guides, zh: 指南}
    pages: [a.md, ../examples/e/README.md, ../README.md]
"""
PAGES = {
    "README.md": "# Readme\n",
    "tools/run.py": "print(1)\n",
    "examples/e/README.md": "# E\n\n[a](../../docs/a.md#two) [中](README_zh.md)\n",
    "examples/e/README_zh.md": "# 例\n",
    "docs/index.md": "# Index\n\n[zh](zh/index.md)\n",
    "docs/a.md": (
        "# A `b`\n\n## Two\n\n[r](../README.md) `[no](link.md)`\n\n| `a\\|b` |\n\n"
        "[t](../tools/run.py) [e](../examples/e)\n"
    ),
    "docs/zh/index.md": "# 索引\n\n[甲](a.md#二) [英](../a.md#two) [例](../../examples/e/README_zh.md)\n",
    "docs/zh/a.md": "# 甲\n\n## 二\n\n## 二\n",
    "docs/site.yml": SITE,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository with a site."""
    root = tmp_path / "checkout"
    for name, text in PAGES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def laid_out(root: Path) -> Layout:
    layout = Layout(read_site(root), root.parent / "pages", root)
    layout.write()
    return layout


def test_the_page_of_flags_has_every_flag_with_its_default() -> None:
    text = flags_page()
    sections = dict(re.findall(r"^#### `(--[\w-]+)`\n\n(.*)$", text, re.MULTILINE))
    declared = [field for group in GROUPS for field in fields(group)]
    assert list(sections) == [flag_of(field) for field in declared]
    assert sections["--kl-loss-type"].startswith("one of `k1`, `k2`, ")
    assert sections["--colocate"] == "a switch; default: off"
    assert sections["--rollout-num-gpus"] == "`INT`; default: not set"
    assert sections["--actor-num-nodes"] == "`INT`; default: `1`"
    aliases = {flag_of(field): field.metadata["aliases"] for field in declared if field.metadata["aliases"]}
    assert aliases
    assert [
        flag for flag, names in aliases.items() if not all(f"also `{name}`" in sections[flag] for name in names)
    ] == []
    assert "%%" not in text


def test_the_page_of_hooks_has_every_hook_with_its_calls() -> None:
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \| [^|]+ \|$", hooks_page().replace("\\|", "or"), re.MULTILINE))
    expected = {
        flag_of(field): "<br>".join(f"`{call}`" for call in field.metadata["call"]).replace("|", "or")
        for field in hook_fields(GROUPS)
    }
    assert rows == expected
    assert all(rows.values())


@pytest.mark.parametrize("page", ["customize.md", "zh/customize.md"])
def test_the_table_of_a_samples_fields_has_all_and_no_others(page: str) -> None:
    words = sample_words((ROOT / "docs" / page).read_text())
    assert words.keys() == {field.name for field in fields(Sample)}


def test_the_page_of_samples_shows_each_field_as_the_class_has_it() -> None:
    assert [name for name, _, _ in sample_fields()] == [field.name for field in fields(Sample)]
    text = sample_page()
    assert "| `tokens` | `list[int]` | `[]` | ids of prompt and response |" in text
    assert "| `status` | `Status` | `Status.PENDING` | " in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("a.md, ", ""), "docs/site.yml: docs/a.md is in no part; add it to one"),
        (lambda text: text.replace("a.md, ", "a.md, a.md, "), "docs/site.yml: docs/a.md stands there twice; keep one"),
        (lambda text: text.replace("a.md, ", "b.md, "), "docs/site.yml: there is no docs/b.md; take it out"),
    ],
)
def test_a_side_bar_that_lacks_a_page_is_refused(change: Callable[[str], str], said: str, checkout: Path) -> None:
    (checkout / "docs" / "site.yml").write_text(change(SITE))
    with pytest.raises(SiteError, match=f"^{re.escape(said)}"):
        read_site(checkout)


def test_a_chinese_page_without_an_english_one_is_refused(checkout: Path) -> None:
    (checkout / "docs" / "zh" / "c.md").write_text("# 丙\n")
    with pytest.raises(SiteError, match=re.escape("docs/zh/c.md: no English page of that name; write docs/c.md")):
        read_site(checkout)


def test_links_lead_to_the_places_that_files_have_on_the_site(checkout: Path) -> None:
    layout = laid_out(checkout)
    pages = {str(f.relative_to(layout.folder)): f.read_text() for f in layout.folder.rglob("*.*")}
    links = {name: re.findall(r"\]\((.*?)\)", text) for name, text in pages.items()}
    assert links["en/a.md"] == [
        "repository/slime.md",
        "link.md",
        "repository/tools/run.py.txt",
        "repository/examples/e.md",
    ]
    assert links["en/repository/examples/e.md"] == ["../../a.md#two", "../../zh/repository/examples/e.html"]
    assert links["en/index.md"] == ["zh/index.html"]
    assert links["zh/index.md"] == ["a.md#二", "../a.html#two", "repository/examples/e.md"]
    assert pages["en/repository/tools/run.py.txt"] == PAGES["tools/run.py"]
    assert "| `a|b` |" in pages["en/a.md"]
    assert pages["zh/a.md"] == "# 甲 {#甲}\n\n## 二 {#二}\n\n## 二 {#二-1}\n"
    bar = layout.side_bar("zh")
    assert bar[0] == {"索引": "index.md"}
    assert bar[1]["指南"] == [
        {"甲": "a.md"},
        {"例": "repository/examples/e.md"},
        {"Readme(英文)": "../repository/slime.html"},
    ]
    assert layout.side_bar("en")[1]["Guides"][0] == {"A b": "a.md"}
    assert configuration(layout, "zh")["site_dir"] == "site/zh"


def test_a_link_that_leads_nowhere_is_one_line(checkout: Path) -> None:
    (checkout / "docs" / "a.md").write_text("# A\n\n[x](../tools/gone.py)\n")
    said = "docs/a.md: the link to ../tools/gone.py leads nowhere; there is no tools/gone.py"
    with pytest.raises(SiteError, match=f"^{re.escape(said)}$"):
        laid_out(checkout)


def test_the_generators_warning_is_one_line_about_the_repositorys_page(checkout: Path) -> None:
    layout = laid_out(checkout)
    printed = "Build started\nWarning: anchor does not exist\n   ╭─[ index.md:3:10 ]\n   │\n 3 │ ...\n1 issue found\n"
    expected = "docs/zh/index.md:3: the link to a.md#二: anchor does not exist"
    assert told(printed, layout, "zh") == expected
    assert told("panicked\n", layout, "zh") == ""


def test_the_choice_of_language_leads_to_the_same_page(checkout: Path) -> None:
    layout, made = laid_out(checkout), checkout.parent / "made"
    choice = '<link rel="alternate" href="x" hreflang="{0}">\n<a href="./x" hreflang="{0}" class="y">\n'
    pages = ("index", "a", "repository/examples/e", "zh/index", "zh/a", "zh/repository/examples/e", "repository/slime")
    for page in pages:
        (made / f"{page}.html").parent.mkdir(parents=True, exist_ok=True)
        (made / f"{page}.html").write_text(choice.format("en") + choice.format("zh"))
    join_languages(layout, made)
    found = {page: re.findall(r'href="(.*?)"', (made / f"{page}.html").read_text())[1::2] for page in pages}
    assert found["a"] == ["a.html", "zh/a.html"]
    assert found["zh/a"] == ["../a.html", "a.html"]
    assert found["repository/examples/e"] == ["e.html", "../../zh/repository/examples/e.html"]
    assert found["repository/slime"] == ["./x", "./x"]
    (made / "a.html").write_text(choice.format("en"))
    with pytest.raises(SiteError, match=r"^a.html: no choice of language in what the generator made$"):
        join_languages(layout, made)


def test_what_was_built_is_read_as_a_browser_would(tmp_path: Path) -> None:
    good = '<h2 id="二"></h2><a href="b.html#x">b</a><a href="#%E4%BA%8C"></a><a href="https://a.example">a</a>'
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "b.html").write_text('<p id="x"></p><script src="b.js"></script><link rel="next" href="//a.example">')
    (tmp_path / "b.js").write_text("")
    assert problems(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="c.html"></a><img src="https://a.example/i.png">')
    (tmp_path / "c.css").write_text("@import url(https://fonts.example/f.css)")
    assert problems(tmp_path) == [
        "a.html: the link to b.html#x leads nowhere",
        "b.html: loads https://a.example/i.png from another host",
        "b.html: the link to c.html leads nowhere",
        "c.css: loads https://fonts.example/f.css from another host",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "unknown command ''; usage: "),
        (["make"], "unknown command 'make'; usage: "),
        (["build", "x"], "build takes no 'x'; usage: "),
        (["serve", "0"], "the port must be a number from 1 to 65535, not '0'"),
        (["serve", "65536"], "the port must be a number from 1 to 65535, not '65536'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str) -> None:
    command = ["bash", str(ROOT / "scripts" / "docs.sh"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"docs: error: {said}")


def test_an_installation_that_fails_is_one_line(tmp_path: Path) -> None:
    for name in ("scripts/docs.sh", "requirements/docs.txt"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    command = ["bash", str(tmp_path / "scripts" / "docs.sh"), "build"]
    result = subprocess.run(command, env={**os.environ, "PYTHON": "/no/python"}, capture_output=True, text=True)
    said = "docs: error: '/no/python' is not a Python 3.11 or later with venv; name one by PYTHON=, e.g. "
    said += "PYTHON=python3.12\n"
    assert (result.returncode, result.stderr) == (1, said)


def test_the_sites_pins_are_those_of_the_other_environments() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / name).read_text().lower(), re.MULTILINE))

    own, others = pins("docs.txt"), pins("constraints-cpu.txt")
    assert "zensical" in own
    assert {name: others[name] for name in own if name in others and others[name] != own[name]} == {}
