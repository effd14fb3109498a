"""The page of tools/view_run.py in a real browser: a recorded run, one that goes on, and one of 10,000 steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.data import Sample
from tests.integration.browser import CHROMIUM, DRIVER, Browser, assert_light_and_dark, started, tool_at
from tests.recorded_run import HOSTILE, SPIKE, write_metrics, write_run, write_trace, write_verdict
from tests.saved_rollouts import write_rollout

NUM_GPUS = 0
pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (apt: chromium-driver)"),
]

CARD = "[...document.querySelectorAll('#groups .card')].find(card => card.shows.title === '{}')"
TEXT = "document.getElementById('{}').textContent"
RUN = "compare" + HOSTILE.replace("/", "_")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of 20 steps, compared to one of 5 whose name is not harmless."""
    run_dir = write_run(tmp_path_factory.mktemp("recorded") / "run")
    write_verdict(run_dir)
    rewards = (1.0, 0.0, 0.5, 0.5)
    samples = [
        Sample(group_index=i // 2, index=i, prompt="?", tokens=[1] * (3 + i), response_length=1 + i, reward=reward)
        for i, reward in enumerate(rewards)
    ]
    samples[0].response = HOSTILE
    write_rollout(run_dir / "rollout_data" / "19.pt", 19, samples)
    write_rollout(run_dir / "rollout_data" / "eval_20.pt", 20, samples[:1])
    write_metrics(run_dir.parent / RUN, range(5))
    with tool_at("tools/view_run.py", str(run_dir), "--compare", str(run_dir.parent / RUN)) as url:
        yield url


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, url: str) -> Iterator[Browser]:
    """The page of the recorded run; nothing that it does may end as an error of the console."""
    window.open("about:blank")
    window.open(url)
    window.wait("document.querySelectorAll('#groups .card').length")
    yield window
    assert window.log() == []


def show(browser: Browser, place: str) -> None:
    browser.run("document.getElementById(arguments[0]).scrollIntoView()", place)


def series(browser: Browser, title: str) -> list[dict[str, object]]:
    """What a card draws, once it is in view and loaded."""
    card = CARD.format(title)
    browser.run(f"({card}).scrollIntoView()")
    browser.wait(f"({card}).shows.picture.series?.length")
    return browser.run(f"return ({card}).shows.picture.series.map(one => ({{...one}}))")


def test_curves_of_both_runs_with_what_the_registry_says(browser: Browser) -> None:
    groups = browser.run("return [...document.querySelectorAll('#groups details')].map(each => each.dataset.group)")
    assert groups == ["eval", "rollout", "train", "perf"]
    ours, theirs = series(browser, "train/loss")
    assert (ours["x"], theirs["x"]) == (list(range(20)), list(range(5)))
    assert max(ours["y"]) == SPIKE[1]  # type: ignore[type-var]
    text = browser.run(f"return ({CARD.format('train/loss')}).textContent")
    assert "what is minimised: policy loss, entropy and KL terms" in text
    assert len(series(browser, "rollout/response_len")) == 6
    canvas = "const c = document.querySelector('.card canvas'), d = c.getContext('2d')"
    assert browser.run(f"{canvas}; return d.getImageData(0, 0, c.width, c.height).data.some(Boolean)")


def test_smoothing_logarithm_filter_and_range(browser: Browser) -> None:
    series(browser, "train/loss")
    loaded = f"({CARD.format('train/loss')}).shows.picture.series[0]"
    browser.run("const input = document.getElementById('smoothing'); input.value = 0.9; input.oninput()")
    browser.wait(f"{loaded}.smooth")
    spiked = browser.run(f"return Math.max(...{loaded}.smooth.y)")
    assert 1 < spiked < SPIKE[1] / 2
    low = f"({CARD.format('train/loss')}).shows.picture.range.y[0]"
    assert browser.run(f"return {low}") == 0
    browser.run("document.getElementById('log').click()")
    assert 0 < browser.run(f"return {low}") < 0.1
    browser.run("zoomTo([4.5, 9.5])")
    browser.wait(f"{loaded}.x.join() === '5,6,7,8,9'")
    browser.type("#filter", "grad")
    browser.wait("document.querySelectorAll('#groups .card').length === 1")
    browser.wait("document.querySelector('#groups .card').shows.picture.series?.length")
    assert browser.run("return document.querySelector('#groups .card').shows.title") == "train/grad_norm"


def test_pointing_at_a_curve_says_its_values(browser: Browser) -> None:
    series(browser, "train/grad_norm")
    browser.run(f"({CARD.format('train/grad_norm')}).querySelector('canvas').id = 'pointed'")
    browser.hover("#pointed")
    tip = browser.wait("document.getElementById('tip').innerText")
    assert tip.splitlines()[0] in ("train/step 9", "train/step 10")
    assert tip.splitlines()[1] == "run 2"
    assert browser.run(f"return ({CARD.format('train/grad_norm')}).shows.picture.series[0].bad") == [3]


def test_what_bounds_a_step_and_its_lanes(browser: Browser) -> None:
    browser.wait(f"{TEXT.format('bound')}.includes('rewards 20')")  # once the trace is read
    assert "Mean of 20 steps: Bound by rewards: for 3.8 of the 5.9 s" in browser.run(f"return {TEXT.format('bound')}")
    browser.run("bands.picked(bands.px(12.5))")
    browser.wait(f"{TEXT.format('step')}.startsWith('Step 12: Bound by rewards')")
    show(browser, "lane")
    browser.wait("lanePicture.data && document.getElementById('first').value === '12'")
    roles = browser.run("return lanePicture.data.roles.map(role => role.role)")
    assert roles == ["driver", "rollout_manager", "trainer_0"]
    browser.wait("lanePicture.drawn?.length")
    hit = browser.run("const [x, y, wide] = lanePicture.drawn[0]; return lanePicture.about(x + wide / 2, y + 2)[1]")
    assert hit == "6 s, from 0 s on"
    browser.click("#after")
    browser.wait("document.getElementById('lanesabout').textContent && document.getElementById('first').value === '13'")


def test_memory_evaluations_and_staleness(browser: Browser) -> None:
    show(browser, "memory")
    browser.wait("document.querySelectorAll('#memory .card').length === 3")
    kinds = browser.run("return [...document.querySelectorAll('#memory .card')].map(card => card.dataset.kind)")
    assert kinds == ["host", "peak", "used"]
    evaluations = "[...document.querySelectorAll('#evals .card')].map(card => card.shows.title).join()"
    assert browser.run(f"return {evaluations}") == "eval/sums"
    assert browser.run("return document.querySelector('#stale .card').shows.title") == "rollout/weight_staleness_mean"


def test_rewards_by_group_lead_to_the_samples(browser: Browser, url: str) -> None:
    show(browser, "rewards")
    browser.wait(f"{TEXT.format('about')}.includes('1 of 2 groups teach nothing')")
    assert browser.run("return groupDots.dots.map(dot => dot.colour).join()") == "--c0,--bad"
    assert browser.run("return lengthDots.dots.map(dot => `${dot.x} ${dot.y}`).join()") == "1 1,2 0,3 0.5,4 0.5"
    assert browser.run("return document.querySelector('#evalfiles a').textContent") == "eval_20.pt"
    browser.open(browser.run("return document.getElementById('open').href"))
    browser.wait("document.querySelectorAll('.row').length === 4")
    browser.wait("document.querySelector('#sample h2')?.textContent === 'sample 0'")


def test_what_a_run_says_is_text(browser: Browser) -> None:
    shown = HOSTILE.replace("\u202e", "\\u{202e}")
    assert f"The reward grows. {shown}" in browser.run(f"return {TEXT.format('verdict')}")
    assert RUN.replace("\u202e", "\\u{202e}") in browser.run(f"return {TEXT.format('status')}")
    show(browser, "faults")
    for place in ("events", "warnings"):
        browser.wait(f"{TEXT.format(place)}.includes(arguments[0])", shown)
    series(browser, "train/loss")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.querySelectorAll('script').length") == 2
    assert browser.run("return document.title") == "run"
    show(browser, "overview")
    browser.click("#verdict a")
    assert browser.run("return document.querySelector('.card.at').shows.title") == "rollout/raw_reward"


def test_light_and_dark_and_a_phone(browser: Browser) -> None:
    assert_light_and_dark(browser)
    browser.emulate("setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    try:
        assert browser.run("return document.documentElement.scrollWidth") == 360
    finally:
        browser.emulate("clearDeviceMetricsOverride")


def test_a_run_that_goes_on_is_followed(window: Browser, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "live", 2)
    with tool_at("tools/view_run.py", str(run_dir), "--follow") as url:
        window.open(url)
        window.wait(f"{TEXT.format('status')} === 'step 2 of 2, 2 complete · following'")
        assert series(window, "train/loss")[0]["x"] == [0, 1]
        for step in range(2, 5):
            with (run_dir / "metrics.jsonl").open("a") as file:  # half a line, which must not be shown or lost
                file.write('{"rollout/step": ')
            window.run("return look()")
            assert window.run(f"return {TEXT.format('status')}").startswith(f"step {step} of")
            file_ = run_dir / "metrics.jsonl"
            file_.write_bytes(file_.read_bytes().removesuffix(b'{"rollout/step": '))
            write_trace(run_dir, [step])
            write_metrics(run_dir, [step])
            window.wait(f"{TEXT.format('status')}.startsWith(arguments[0])", f"step {step + 1} of")
            window.wait(f"({CARD.format('train/loss')}).shows.picture.series[0].x.length === {step + 1}")
        show(window, "overview")
        window.wait(f"{TEXT.format('bound')}.includes('Mean of 5 steps')")
        show(window, "lane")
        window.wait("document.getElementById('last').value === '4'")
        show(window, "rewards")
        window.wait(f"{TEXT.format('about')}.startsWith('The run saves no rollouts')")
        assert window.run("return document.getElementById('pictures').offsetHeight") == 0
        assert window.log() == []
    window.wait(f"{TEXT.format('status')}.includes('the server does not answer')")
    window.open("about:blank")
    window.log()  # of the browser, that nobody answered


def test_ten_thousand_steps_stay_fluid(window: Browser, tmp_path: Path) -> None:
    """Bounds are several times what a quiet machine takes: docs/view_run.md has those figures."""
    run_dir = tmp_path / "long"
    write_metrics(run_dir, range(10_000))
    write_trace(run_dir, range(9_900, 10_000))
    with tool_at("tools/view_run.py", str(run_dir)) as url:
        begun = time.monotonic()
        window.open(url)
        window.wait(f"{TEXT.format('bound')}.includes('Mean of 10000 steps')")
        (loss,) = series(window, "train/loss")
        assert time.monotonic() - begun < 15
        assert len(loss["x"]) <= 400  # type: ignore[arg-type]
        assert max(loss["y"]) == SPIKE[1]  # type: ignore[type-var]
        window.run("scrollTo(0, 0)")
        redrawn = sorted(window.run("return [0, 1, 2, 3, 4].map(redraw)"))
        assert redrawn[2] < 200, redrawn
        show(window, "lane")
        window.wait("lanePicture.data?.roles.length === 3")
        assert window.log() == []
