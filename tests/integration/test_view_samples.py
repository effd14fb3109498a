"""The page of tools/view_samples.py in a real browser: what a reader sees, clicks, types and hovers over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.browser import CHROMIUM, DRIVER, Browser, assert_light_and_dark, started, tool_at
from tests.saved_rollouts import HOSTILE, make_sample, make_samples, write_rollout, write_train_data
from tools.make_tiny_model import make_tokenizer

NUM_GPUS = 0
pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (apt: chromium-driver)"),
]

ROWS = "[...document.querySelectorAll('.row')].map(row => Number(row.dataset.place))"
TITLE = "document.querySelector('#sample h2')?.textContent"
TOKENS = "[...document.querySelectorAll('.response span')]"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tool, run as a user does, with the directory of ``--dump-details``; rollout 10 has more than one page."""
    dump, model = tmp_path_factory.mktemp("dump"), tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(320)
    tokenizer.save_pretrained(model)
    samples = make_samples(tokenizer)
    write_rollout(dump / "rollout_data" / "9.pt", 9, samples)
    write_train_data(dump / "train_data" / "9_0.pt", 9, samples, 0.25)
    many = [make_sample(tokenizer, index, [(f"number {index}", "3")], reward=float(index)) for index in range(250)]
    write_rollout(dump / "rollout_data" / "10.pt", 10, many)
    with tool_at("tools/view_samples.py", str(dump), "--hf-checkpoint", str(model)) as url:
        yield url


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, url: str) -> Iterator[Browser]:
    """The page with the small rollout's list; nothing that it does may end as an error of the console."""
    window.open("about:blank")
    window.open(f"{url}#rollout=9.pt")
    window.wait(f"{ROWS}.length === 8")
    yield window
    assert window.log() == []


def show(browser: Browser, place: int) -> None:
    browser.click(f".row[data-place='{place}']")
    browser.wait(f"{TITLE} === 'sample {place}'")


def mode(browser: Browser, name: str) -> None:
    browser.run(
        "[...document.querySelectorAll('.modes button')].find(b => b.textContent === arguments[0]).click()", name
    )
    assert browser.run("return document.querySelector('.modes [aria-pressed=true]').textContent") == name


def colours(browser: Browser) -> list[str]:
    return browser.run(f"return {TOKENS}.map(token => token.style.backgroundColor)")


def test_the_list_shows_what_was_rolled_out(browser: Browser) -> None:
    assert "rollout 9 · 8 samples, 4 groups" in browser.run("return document.getElementById('about').textContent")
    assert browser.run("return document.querySelectorAll('.group').length") == 4
    browser.wait(f"{TITLE} === 'sample 0'")  # which is open at once
    colour = "return [...document.querySelectorAll('.row .reward')].map(reward => reward.classList[1] ?? '').join()"
    assert browser.run(colour) == "good,warn,bad,warn,good,,,warn"
    row = browser.run("return document.querySelector(\".row[data-place='1']\").textContent")
    for part in ("0.5", "#1", "13 tokens", "gap 0.25", "v3 → 4", "two echo done"):
        assert part in row
    assert "truncated" in browser.run("return document.querySelector(\".row[data-place='2']\").textContent")
    assert "removed" in browser.run("return document.querySelector(\".row[data-place='3']\").textContent")


def test_filters_and_order(browser: Browser) -> None:
    browser.type("[name=text]", "eight")
    browser.wait(f"{ROWS}.join() === '7'")
    browser.click("[type=reset]")
    browser.wait(f"{ROWS}.length === 8")
    browser.type("[name=reward_min]", "0.25")
    browser.type("[name=reward_max]", "0.5")
    browser.wait(f"{ROWS}.join() === '1,3'")
    browser.click("[name=versions]")
    browser.wait(f"{ROWS}.join() === '1'")
    browser.click("[type=reset]")
    browser.wait(f"{ROWS}.length === 8")
    browser.click("[name=status] option[value=truncated]")
    browser.wait(f"{ROWS}.join() === '2'")
    browser.click("[type=reset]")
    browser.click("[name=removed]")
    browser.wait(f"{ROWS}.join() === '3'")
    browser.click("[type=reset]")
    browser.wait(f"{ROWS}.length === 8")
    browser.click(".group:nth-of-type(3)")
    browser.wait(f"{ROWS}.join() === '4,5'")
    browser.click("[type=reset]")
    browser.click("[name=sort] option[value=reward]")
    browser.click("[name=descending]")
    browser.wait(f"{ROWS}.join() === '0,4,7,1,3,2,5,6'")
    assert browser.run("return document.querySelectorAll('.group').length") == 0


def test_tokens_are_coloured_by_what_is_asked_for(browser: Browser) -> None:
    show(browser, 1)
    assert browser.run(f"return {TOKENS}.map(t => t.textContent).join('')") == "two echo↵\ndone"
    masked = slice(4, 9)
    trained = colours(browser)
    assert len(set(trained)) == 2
    assert set(trained[masked]) == {""}
    mode(browser, "version")
    versions = colours(browser)
    assert [len(set(versions[part])) for part in (slice(4), masked, slice(9, 13))] == [1, 1, 1]
    assert len(set(versions)) == 3
    assert "version 4" in browser.run("return document.querySelector('.legend').textContent")
    mode(browser, "log-prob")
    assert len(set(colours(browser)[:4])) == 4
    assert set(colours(browser)[masked]) == {""}
    mode(browser, "gap")
    assert len(set(colours(browser)[:4])) == 1
    assert set(colours(browser)[masked]) == {""}
    mode(browser, "none")
    assert set(colours(browser)) == {""}


def test_a_token_says_what_is_known_of_it(browser: Browser) -> None:
    show(browser, 1)
    browser.hover(".response span:nth-child(3)")
    title = browser.run(f"return {TOKENS}[2].title")
    assert title == (
        'token 2 of the response · id 78 · "o" · mask 1 · log-prob -0.2500 · version 3 · '
        "trainer's log-prob 0 · advantage 0.5000 · gap 0.2500"
    )
    assert browser.wait("document.getElementById('token').textContent") == title
    assert "version" not in browser.run(f"return {TOKENS}[5].title")


def test_special_and_split_characters_are_visible(browser: Browser) -> None:
    show(browser, 7)
    assert browser.run(f"return {TOKENS}.map(token => token.textContent)") == [
        *"eight",
        "⇥\t",
        "\u2039",
        "\u2039",
        "你",
    ]
    assert browser.run("return document.querySelector('.prompt .special').textContent") == "<|im_start|>"


def test_what_a_model_wrote_is_text(browser: Browser, url: str) -> None:
    before = browser.run("return document.title")
    show(browser, 4)
    shown = browser.run(f"return {TOKENS}.map(token => token.textContent).join('')")
    assert shown.replace("\u2039", "") == HOSTILE.replace("\u202e", "\\u{202e}")
    for place in ("#rows", "#metadata", "#sample .value strong"):
        assert "<script>" in browser.run(
            f"return [...document.querySelectorAll('{place}')].map(e => e.textContent).join()"
        )
    browser.open(f"{url}#{HOSTILE}")
    browser.wait(f"{ROWS}.length")
    assert browser.run("return document.querySelectorAll('img, script:not([nonce])').length") == 0
    assert browser.run("return document.querySelectorAll('script').length") == 1
    assert browser.run("return document.title") == before


def test_keys_go_through_the_filtered_list_and_links_lead_back(browser: Browser, url: str) -> None:
    browser.type("[name=reward_min]", "0.6")
    browser.wait(f"{ROWS}.join() === '0,4,7'")
    show(browser, 0)
    for key, title in (("j", "sample 4"), ("ArrowRight", "sample 7"), ("j", "sample 7"), ("k", "sample 4")):
        browser.press(key)
        browser.wait(f"{TITLE} === arguments[0]", title)
    assert browser.run("return document.querySelector('[aria-current=true]').dataset.place") == "4"
    browser.click("#before")
    browser.wait(f"{TITLE} === 'sample 0'")
    browser.click("#next")
    browser.wait(f"{TITLE} === 'sample 4'")
    link = browser.run("return location.href")
    browser.open("about:blank")
    browser.open(link)
    browser.wait(f"{TITLE} === 'sample 4'")
    browser.press("/")
    browser.press("j")
    assert browser.run("return document.querySelector('[name=text]').value") == "j"
    assert browser.run(f"return {TITLE}") == "sample 4"


def test_a_long_list_has_pages_that_keys_turn(browser: Browser) -> None:
    browser.click("#rollout option[value='10.pt']")
    browser.wait("document.getElementById('range').textContent === '1\u2013100 of 250'")
    show(browser, 99)
    browser.press("j")
    browser.wait(f"{TITLE} === 'sample 100'")
    browser.wait("document.getElementById('range').textContent === '101\u2013200 of 250'")
    browser.press("k")
    browser.wait(f"{TITLE} === 'sample 99'")
    browser.click("#more")
    browser.click("#more")
    browser.wait(f"{ROWS}.join() === Array.from({{ length: 50 }}, (_, i) => 200 + i).join()")
    assert browser.run("return document.getElementById('more').disabled")


def test_light_and_dark(browser: Browser) -> None:
    assert_light_and_dark(browser)


def test_a_phone_shows_the_list_or_a_sample(browser: Browser, url: str) -> None:
    browser.emulate("setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    try:
        browser.open("about:blank")
        browser.open(f"{url}#rollout=9.pt")
        browser.wait(f"{ROWS}.length === 8")
        visible = "['aside', 'main'].filter(name => document.querySelector(name).offsetWidth).join()"
        assert browser.run(f"return {visible}") == "aside"
        show(browser, 1)
        assert browser.run(f"return {visible}") == "main"
        assert browser.run("return document.documentElement.scrollWidth") == 360
        assert browser.run("const s = document.getElementById('sample'); return s.scrollWidth === s.clientWidth")
        browser.click("#back")
        browser.wait(f"{visible} === 'aside'")
    finally:
        browser.emulate("clearDeviceMetricsOverride")
