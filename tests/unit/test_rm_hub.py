"""Rewards: every built-in type, a user's functions, and answers that take algebra or never end."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.grading import algebra, equality
from slime.grading.algebra import AlgebraPool
from slime.grading.answers import last_boxed
from slime.grading.equality import quick_equal
from slime.rollout.rm_hub import async_rm
from slime.utils import http_utils
from slime.utils.errors import HookError, SettingError
from slime.utils.http_utils import RequestError

NUM_GPUS = 0

Args = Callable[..., Namespace]


@pytest.fixture(scope="module")
def pool() -> Iterator[AlgebraPool]:
    pool = AlgebraPool(1, seconds=60.0)
    yield pool
    pool.close()


def reward(args: Namespace, response: str, label: Any = None, **fields: Any) -> Any:
    return asyncio.run(async_rm(args, Sample(index=3, response=response, label=label, **fields)))


def test_last_boxed() -> None:
    assert last_boxed(r"so \boxed{1} and \boxed{\frac{1}{2}} .") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{7} then \boxed{broken") == "7"
    assert last_boxed(r"\fbox{x^{2}}") == "x^{2}"
    assert last_boxed("no box") is None
    assert last_boxed(r"} \boxed{a} } \boxed{b") == "a"
    started = time.perf_counter()
    assert last_boxed("\\boxed{" * 100_000) is None
    assert time.perf_counter() - started < 30, "in one pass"


def test_integers_are_exact_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(equality, "canonical")  # most of what other answers cost
    for _ in range(200):
        a, b = random.randint(-(10**12), 10**12), random.randint(-(10**12), 10**12)
        assert quick_equal(str(a), f"{a}")
        assert quick_equal(f"+{abs(a)}", f"00{abs(a)}")
        assert quick_equal(str(a), str(b)) is (a == b)


@pytest.mark.parametrize(
    ("answer", "label", "verdict"),
    [
        ("1,234", "1234", True),
        (r"\$5", "5", True),
        (r"10\,000", "10000", True),
        (r"10,\!000", "10000", True),
        (r"1{,}234{,}567", r"1\ 234~567", True),
        (r"(1,\ 234)", "(1234)", False),
        ("50\\%", "50", True),
        (r"\text{ east}", "east", True),
        (r"\dfrac{1}{2}", r"\frac12", True),
        ("0.5", "1/2", True),
        (r"-\frac{3}{4}", "-0.75", True),
        ("12 \\text{ cm}", "12", True),
        ("90^\\circ", "90", True),
        ("1 1/2", "11/2", False),
        ("3.0", "3", True),
        ("0.333", r"\frac{1}{3}", False),
        ("1/0", "1", False),
        ("", "5", False),
        ("x+1", "1+x", None),
    ],
)
def test_quick_equal(answer: str, label: str, verdict: bool | None) -> None:
    assert quick_equal(answer, label) is verdict


def test_algebra_in_a_process(pool: AlgebraPool) -> None:
    pairs = [("x+1", "1+x"), (r"\sqrt{8}", r"2\sqrt{2}"), ("(x-1)^2", "x^2-2x+1"), ("x+1", "x+2"), ("}{", "x")]
    assert [pool.equal(*pair).result() for pair in pairs] == [True, True, True, False, False]


def test_endless_algebra_is_killed_and_stalls_nothing(pool: AlgebraPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> tuple[bool, int, bool]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_seconds", 3.0)
            endless = await asyncio.wrap_future(pool.equal("x+10^{10^{10^{9}}}", "7+x"))
        ticking.cancel()
        return endless, ticks, await asyncio.wrap_future(pool.equal("x+1", "1+x"))

    assert pool.equal("x+1", "1+x").result(60)  # the process is up: what follows measures grading
    first = pool._workers[0]._process
    assert first is not None
    started = time.monotonic()
    endless, ticks, afterwards = asyncio.run(scenario())
    assert (endless, afterwards) == (False, True)
    assert time.monotonic() - started < 200
    assert ticks > 0
    assert first.poll() is not None


def test_grade_worker_does_not_import_torch_and_ends_with_its_owner() -> None:
    code = "import sys, slime.grading.grade_worker as w; w.equal('x', 'x'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    worker = subprocess.Popen(
        [sys.executable, "-m", "slime.grading.grade_worker"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(timeout=300) == 0


def test_math(rollout_args: Args, monkeypatch: pytest.MonkeyPatch, pool: AlgebraPool) -> None:
    args = rollout_args(rm_type="math")
    total = random.randrange(1000)
    assert reward(args, rf"the answer is \boxed{{{total}}}", str(total)) == 1.0
    assert reward(args, rf"\boxed{{{total}}} no, \boxed{{{total + 1}}}", str(total)) == 0.0
    assert reward(args, f"the answer is {total}", str(total)) == 0.0
    assert reward(args, r"\boxed{5}", r"thus \boxed{5}") == 1.0
    assert reward(args, r"\boxed{5}", ["4", "5"]) == 1.0
    assert reward(args, r"\boxed{}", "") == 0.0
    assert reward(rollout_args(rm_type="boxed_math"), r"\boxed{5}", "5") == 1.0
    with pytest.raises(ValueError, match="rm_type math needs a label, sample 3 has none: is --label-key set"):
        reward(args, r"\boxed{5}")
    monkeypatch.setattr(algebra, "algebra_pool", lambda: pool)
    assert reward(args, r"\boxed{b+a}", "a+b") == 1.0


@pytest.mark.parametrize("label", [2, "2", [1, 2]])
@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "boxed_dapo", "boxed_f1"])
def test_labels_may_be_numbers(rm_type: str, label: Any, rollout_args: Args) -> None:
    found = reward(rollout_args(rm_type=rm_type), "</think> \\boxed{2}\nAnswer: 2", label)
    assert (found["score"] if isinstance(found, dict) else found) == 1.0


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "boxed_dapo", "f1", "gpqa"])
def test_a_label_that_is_an_object_ends_the_run(rm_type: str, rollout_args: Args) -> None:
    """It would be 0 for every response."""
    args, label = rollout_args(rm_type=rm_type), {"style": "rule", "ground_truth": "2"}
    name = rm_type.removeprefix("boxed_")
    for given, holds in ((label, "is"), (["2", label], "holds")):
        message = (
            f"rm_type {name}: the label of sample 3 {holds} an object with the keys 'style', 'ground_truth', which"
        )
        with pytest.raises(
            SettingError, match=f"{message} is not an answer: name the key too, as in --label-key reward_"
        ):
            reward(args, "2", given)


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "boxed_dapo", "f1", "gpqa"])
@pytest.mark.parametrize("label", [float("nan"), float("inf"), ["2", float("nan")], [None], b"2", [b"2"]], ids=repr)
def test_nothing_equals_a_label_that_is_no_answer(rm_type: str, label: Any, rollout_args: Args) -> None:
    problem = r"((is (nan|inf)|holds null or NaN), which is not an answer|(is|holds) bytes, which are no answer: wri)"
    with pytest.raises(SettingError, match=f"the label of sample 3 {problem}"):
        reward(rollout_args(rm_type=rm_type), f"</think>\\boxed{{{label}}}\nAnswer: {label}", label)


def test_deepscaler(rollout_args: Args) -> None:
    args = rollout_args(rm_type="deepscaler")
    assert reward(args, r"<think>\boxed{1}</think> \boxed{2}", "2") == 1.0
    assert reward(args, r"<think>\boxed{2}</think> \boxed{1}", "2") == 0.0
    assert reward(args, r"###Response \boxed{2}", "2") == 1.0
    assert reward(args, r"\boxed{2}", "2") == 0.0
    assert reward(args, r"</think>\boxed{2}", "") == 0.0


def test_dapo(rollout_args: Args) -> None:
    args = rollout_args(rm_type="dapo")
    assert reward(args, "Answer: 3\nno\nAnswer: $n = 42$", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert reward(args, "Answer: 42.0", 42) == {"score": 1.0, "acc": True, "pred": "42.0"}
    assert reward(args, "42", "42") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert reward(args, "Answer: 42" + "." * 301, "42")["acc"] is False
    assert reward(args, r"answer: \text{north}", "north")["acc"] is True
    assert reward(args, r"Answer: $x = \boxed{42}$.", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert reward(args, "Answer: 3.7", "3")["acc"] is False
    assert reward(args, "Answer: 3", "3.7")["acc"] is False
    for label in ("x+1", "", "\\frac{1}{0}", "inf", "nan", "1e999"):
        assert reward(args, "Answer: 42", label)["acc"] is False
    for response in (
        "**Answer:** 42",
        "**Answer: 42**",
        "**Answer**: 42",
        r"Answer: \(42\)",
        r"Answer: \[42\]",
        "answer: `42`",
    ):
        assert reward(args, response, "42") == {"score": 1.0, "acc": True, "pred": "42"}
    boxed = rollout_args(rm_type="boxed_dapo")
    assert reward(boxed, r"so \boxed{n = 42}.", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert reward(boxed, "Answer: 42", "42") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_f1(rollout_args: Args) -> None:
    args = rollout_args(rm_type="f1")
    assert reward(args, "The Eiffel Tower!", "eiffel tower") == 1.0
    assert reward(args, "big tower", "eiffel tower") == pytest.approx(0.5)
    assert reward(args, "yes it is", "yes") == 0.0
    assert reward(args, "Yes.", "yes") == 1.0
    assert reward(args, "", "tower") == 0.0
    assert reward(args, "<think>Is it a big tower?</think> Paris", "paris") == 1.0
    assert reward(rollout_args(rm_type="boxed_f1"), r"well \boxed{Paris} it is", "paris") == 1.0
    assert reward(rollout_args(rm_type="boxed_f1"), "no box", "paris") == 0.0


def test_random_is_fair_and_reproducible(rollout_args: Args) -> None:
    args = rollout_args(rm_type="random")
    samples = [Sample(index=i, group_index=i // 8, response="same") for i in range(2000)]

    async def all_rewards() -> list[Any]:
        return [await async_rm(args, sample) for sample in samples]

    first, second = asyncio.run(all_rewards()), asyncio.run(all_rewards())
    assert first == second
    assert set(first) == {0.0, 1.0}
    assert 850 < sum(first) < 1150


def test_random_depends_on_the_response(rollout_args: Args) -> None:
    args = rollout_args(rm_type="random")
    before = [reward(args, f"{i} and {random.random()}") for i in range(400)]
    after = [reward(args, f"{i} and {random.random()}") for i in range(400)]
    assert 120 < sum(x != y for x, y in zip(before, after, strict=True)) < 280


def test_remote_rm(rollout_args: Args) -> None:
    from aiohttp import web

    asked: list[Any] = []

    async def scenario() -> list[Any]:
        async def answer(request: web.Request) -> web.Response:
            asked.append(await request.json())
            if len(asked) == 1:
                return web.Response(status=503)
            if asked[-1]["label"] == "broken":
                return web.Response(status=500, text="out of order")
            return web.json_response({"a": {"score": 0.5}, "n": 2, 7: 3.0}.get(asked[-1]["label"], "nonsense"))

        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        args = rollout_args(rm_type="remote_rm", rm_url=url)
        try:
            good = [await async_rm(args, Sample(prompt="p", response="r", label=label)) for label in ("a", "n", 7)]
            with pytest.raises(ValueError, match="must answer with a number or an object, not 'nonsense'"):
                await async_rm(args, Sample(prompt="p", response="r", label="b"))
            with pytest.raises(
                RequestError, match=r"^--rm-url: POST http://127.*: status 500: out of order \(tried 1 t"
            ):
                await async_rm(args, Sample(prompt="p", response="r", label="broken"))
            return good
        finally:
            await runner.cleanup()

    assert asyncio.run(scenario()) == [{"score": 0.5}, 2, 3.0], "a number is sent as one"
    assert asked[1] == {"prompt": "p", "response": "r", "label": "a"}
    with pytest.raises(ValueError, match="remote_rm needs --rm-url"):
        reward(rollout_args(rm_type="remote_rm"), "r", "a")


def test_the_names_that_upstreams_hooks_import(rollout_args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.rollout.rm_hub import grade_answer_verl, remote_rm
    from slime.rollout.rm_hub.math_dapo_utils import compute_score
    from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd

    assert compute_score("Answer: 42<|im_end|>", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert compute_score("Answer: 41<|im_end|>", 42) == {"score": -1.0, "acc": False, "pred": "41"}
    assert compute_score("no answer", "42") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert compute_score("so \\boxed{42}", "42", strict_box_verify=True)["score"] == 1.0
    assert compute_score("so \\boxed{42}", "42")["score"] == -1.0
    assert compute_score("Answer: 42", None)["score"] == -1.0
    assert extract_answer("a \\boxed{x^{2}} b") == "x^{2}"
    assert extract_answer("none") is None
    assert grade_answer_verl("so \\boxed{b+a}", "\\boxed{a+b}")
    assert not grade_answer_verl("so \\boxed{7 1/2}", "4")
    assert grade_answer_verl("\\boxed 4<|im_end|>", 4)
    assert not grade_answer_verl("no box", "4")
    assert not grade_answer_verl("\\boxed{4}", "")
    assert grade_answer_mathd("7 1/2", "7.5")

    async def post(url: str, payload: Any, **kwargs: Any) -> Any:
        return {"score": float(payload == {"prompt": "p", "response": "r", "label": "l"})}

    monkeypatch.setattr(http_utils, "post", post)
    sample = Sample(prompt="p", response="r<|im_end|>", label="l")
    assert asyncio.run(remote_rm(rollout_args(rm_url="http://127.0.0.1:9/"), sample)) == {"score": 1.0}


def test_choice_of_reward(rollout_args: Args, tmp_path: Path) -> None:
    hook = tmp_path / "mine.py"
    hook.write_text(
        "import numpy\n"
        "async def reward_func(args, sample, **kwargs): return 0.25\n"
        "def plain(args, sample, **kwargs): return numpy.float32(0.75)\n"
        "def nothing(args, sample, **kwargs): return None\n"
    )
    args = rollout_args(rm_type="math")
    assert reward(args, "Paris", "paris", metadata={"rm_type": "f1"}) == 1.0
    args.custom_rm_path = str(hook)
    assert reward(args, "Paris", "paris", metadata={"rm_type": "f1"}) == 0.25
    assert reward(args, "x", custom_rm_path=f"{hook}:plain") == 0.75
    assert reward(args, "x", custom_rm_path=f"{hook}:nothing") is None
    with pytest.raises(
        ValueError, match=r"unknown rm_type 'maths': there are dapo, deepscaler, f1, gpqa, ifbench, math, random"
    ):
        reward(rollout_args(rm_type="maths"), "x", "y")
    with pytest.raises(ValueError, match="no reward for sample 3: give --rm-type, --custom-rm-path or metadata"):
        reward(rollout_args(rm_type=None), "x", "y")
    with pytest.raises(ValueError, match=r"--custom-rm-path nowhere.fn: there is no module 'nowhere'"):
        reward(rollout_args(custom_rm_path="nowhere.fn"), "x", "y")


def test_failing_hooks_are_named(rollout_args: Args, tmp_path: Path) -> None:
    hook = tmp_path / "broken.py"
    hook.write_text(
        "def raises(args, sample, **kwargs):\n    return [][3]\n"
        "async def text(args, sample, **kwargs):\n    return 'good'\n"
        "def sleepy(args, sample, **kwargs):\n    import time; time.sleep(200)\n"
    )
    path = f"{hook}:raises"
    with pytest.raises(HookError, match=r"--custom-rm-path .*broken.py:raises raised IndexError") as error:
        reward(rollout_args(custom_rm_path=path), "x")
    assert "return [][3]" in str(error.value)
    with pytest.raises(HookError, match=r"broken.py:text must return a number or a dict, not 'good'"):
        reward(rollout_args(custom_rm_path=f"{hook}:text"), "x")
    with pytest.raises(TimeoutError, match=r"sample 3 by --custom-rm-path .*:sleepy took longer than 0.1 s \(--reward"):
        reward(rollout_args(custom_rm_path=f"{hook}:sleepy", reward_timeout=0.1), "x")


def test_waiting_for_the_pool_is_no_reward_that_hangs(rollout_args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    async def queued(answer: str, label: str) -> bool:
        await asyncio.sleep(0.3)
        return True

    monkeypatch.setattr("slime.grading.graders.answers_equal", queued)
    args = rollout_args(rm_type="math", reward_timeout=0.05)
    assert reward(args, r"\boxed{b+a}", "a+b") == 1.0


def test_a_server_that_hangs_meets_the_deadline(rollout_args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(http_utils, "post", hang)
    args = rollout_args(rm_type="remote_rm", rm_url="http://127.0.0.1:9/", reward_timeout=0.05)
    with pytest.raises(TimeoutError, match=r"sample 3 by rm_type remote_rm took longer than 0.05 s \(--reward-timeout"):
        reward(args, "r", "a")


def test_a_worker_that_does_not_start_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AlgebraPool(1)
    monkeypatch.setattr(algebra.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"did not get ready .*: is math-verify installed\?"):
        pool.equal("x+1", "1+x").result(60)
    pool.close()


def test_pool_leaves_no_process_behind() -> None:
    pool = AlgebraPool(1)
    assert pool.equal("x+1", "1+x").result(60)
    process = pool._workers[0]._process
    assert process is not None
    pool.close()
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
