"""The built-in rewards on pairs whose reward is known (`tests.reward_pairs`), and on texts that nobody would write."""

from __future__ import annotations

import asyncio
import random
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.data import Sample
from slime.grading import graders
from slime.grading.algebra import answers_equal
from slime.grading.graders import GRADERS
from slime.rollout.rm_hub import async_rm
from tests.reward_pairs import generated_pairs, written_pairs
from tools.score_graders import missed, rates, score

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]

Args = Callable[..., Namespace]


def test_every_grader_is_right_about_the_labelled_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: dict[tuple[str, str], asyncio.Future[bool]] = {}

    def once(answer: str, label: str) -> asyncio.Future[bool]:
        if (answer, label) not in verdicts:
            verdicts[answer, label] = asyncio.ensure_future(answers_equal(answer, label))
        return verdicts[answer, label]

    monkeypatch.setattr(graders, "answers_equal", once)  # which all mathematical graders ask
    scored = score([*written_pairs(), *generated_pairs()])
    found = rates(scored)
    assert {name.removeprefix("boxed_") for name in found} == set(GRADERS) - {"random"}
    few = {name: rate for name, rate in found.items() if rate[1] < 0.99 or rate[2] < 0.97}
    assert not few, "\n".join(missed(scored))
    assert len(scored) > 3000
    for page in ("docs/rollout.md", "docs/zh/rollout.md"):
        table = (ROOT / page).read_text()
        for name in ("math", "deepscaler", "dapo", "gpqa", "f1", "ifbench"):
            count, precision, recall = found[name]
            assert f"| `{name}` | {count} | {precision:.3f} | {recall:.3f} |" in table, page


def test_no_pair_is_written_twice() -> None:
    told = ("grader", "answer", "response", "label", "metadata")
    pairs = [tuple(str(pair.get(key)) for key in told) for pair in written_pairs()]
    assert len(pairs) == len(set(pairs)) > 400


@pytest.mark.parametrize(
    "text",
    [
        "9" * 200_000,
        "1e999999999",
        "0." + "3" * 2000,
        "\\frac{" * 5000,
        "(" * 1900,
        "{" * 50_000 + "}" * 50_000,
        "1" + " 000" * 500,
        "1" + ",000" * 490,
        "2^{2^{2^{2^{2^{2}}}}}",
        "2000!!!!!",
        "5 " + "a" * 1900,
        "5 " + "km " * 600,
        " " * 1999,
        "0.\\dot{1}" * 200,
        "\\text{" * 400,
        "," * 1999,
        "\\pm" * 600,
        "\ud83d\x00\x07",
        "$" * 1999,
        "_" * 1999,
        "1_{99999999999}",
        "x=" * 900,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_no_text_crashes_a_grader_or_holds_it_up(text: str, rollout_args: Args) -> None:
    started = time.process_time()  # of this process, whatever else the machine does; algebra has a limit of its own
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for name in sorted(set(GRADERS) - {"remote_rm"}):
        for response, label in (
            (f"</think>\\boxed{{{text}}}\nAnswer: {text}", "7"),
            ("</think>\\boxed{7}\nAnswer: 7", text),
        ):
            sample = Sample(response=response, label=label, metadata=metadata | {"choices": ["a", "b"]})
            if not label.strip() and name == "gpqa":
                continue
            reward = asyncio.run(async_rm(rollout_args(rm_type=name), sample))
            assert name in ("ifbench", "random", "f1") or (reward["score"] if isinstance(reward, dict) else reward) <= 0
    assert time.process_time() - started < 10


def test_random_letters_crash_no_grader(rollout_args: Args) -> None:
    rng = random.Random(27)
    known = r"\frac { } ( ) [ ] \ 1 07 . , e E9 _ ^ % $ \text{ = \pm \overline{3} \dot km per \sqrt x \\ & and ! / - °"
    pieces = [*known.split(), " ", "\u00bd", "\u00b2", "\\begin{matrix}"]
    samples = []
    for _ in range(200):
        text, label = ("".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(2))
        if label.strip():
            samples.append(Sample(response=f"Answer: {text}", label=label))

    async def judge_all() -> None:  # at the same time, by all workers
        jobs = (async_rm(rollout_args(rm_type=name), sample) for sample in samples for name in ("dapo", "gpqa", "f1"))
        await asyncio.gather(*jobs)

    asyncio.run(judge_all())
