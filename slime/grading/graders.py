"""The built-in rewards, by the name that ``--rm-type`` takes."""

from __future__ import annotations

import itertools
import random
import re
import string
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from slime.data import Sample
from slime.grading.algebra import answers_equal
from slime.grading.answers import accepted_labels, after_reasoning, label_problem, last_boxed
from slime.grading.instructions import ifbench_reward
from slime.grading.multiple_choice import gpqa_reward
from slime.grading.notation import canonical, compact
from slime.utils.errors import BadInputError, SettingError

Grader = Callable[[Namespace, Sample, str], Awaitable[Any]]

_DAPO_TAIL = 300
_DAPO_ANSWER = re.compile(r"(?i)answer\s*[:\uff1a]\s*([^\n]+)")
_MARKUP = re.compile(r"(?<!\w)\*{2,3}|\*{2,3}!?(?!\w)|`|\\[()\[\]]")
"""Bold, code, and the brackets of a formula."""
_TAG = re.compile(r"(?i)<(/?)answer>")
_CRIED_OUT = re.compile(r"\d{2,}!$")
_LARGEST_FACTORIAL_OF = 20
"""Of more nobody writes the factorial as an answer, and "34!" may be said with joy."""
_REMOTE_RETRIES = 10
BOXED = "boxed_"
"""Of a name: only the content of the last box is judged."""
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def _labels(sample: Sample, name: str) -> list[str]:
    if sample.label is None:
        raise BadInputError(f"rm_type {name} needs a label, sample {sample.index} has none: is --label-key set?")
    if problem := label_problem(sample.label):
        raise SettingError(f"rm_type {name}: the label of sample {sample.index} {problem}")
    return accepted_labels(sample.label)


async def _is_right(sample: Sample, name: str, readings: list[str]) -> bool:
    for reading, label in itertools.product(readings, _labels(sample, name)):
        if await answers_equal(reading, label):
            return True
    return False


async def _grade_boxed(sample: Sample, response: str, name: str) -> float:
    answer = last_boxed(response)
    return float(await _is_right(sample, name, [] if answer is None else [answer]))


async def math_reward(args: Namespace, sample: Sample, response: str) -> float:
    """1 where the response's last ``\\boxed{}`` has the label's value, else 0."""
    return await _grade_boxed(sample, response, "math")


async def deepscaler_reward(args: Namespace, sample: Sample, response: str) -> float:
    """As ``math``, on what follows the reasoning (``</think>`` or ``###Response``); 0 where neither is there."""
    solution = after_reasoning(response) if "</think>" in response else response.partition("###Response")[2]
    return await _grade_boxed(sample, solution, "deepscaler")


async def dapo_reward(args: Namespace, sample: Sample, response: str) -> dict[str, Any]:
    """``{"score": 1 or -1, "acc", "pred"}`` by the last "Answer: ..." within the last 300 characters.

    Yu et al. 2025, arXiv:2503.14476; answers are compared as by ``math``.
    """
    return await _dapo_score(sample, dapo_answer(response))


async def boxed_dapo_reward(args: Namespace, sample: Sample, response: str) -> dict[str, Any]:
    """As ``dapo``, on the content of the last ``\\boxed{}``."""
    return await _dapo_score(sample, last_boxed(response))


def dapo_answer(response: str) -> str | None:
    """What follows the last "Answer:" (or ``<answer>``) of the last 300 characters, or the box in it; else None."""
    tail = _TAG.sub(lambda match: "\n" if match[1] else "Answer: ", response[-_DAPO_TAIL:])
    found = _DAPO_ANSWER.findall(_MARKUP.sub("", tail))
    return (last_boxed(found[-1]) or found[-1]) if found else None


def dapo_readings(answer: str | None) -> list[str]:
    """What an answer may mean: ``34!`` is a factorial, or 34."""
    answer = (answer or "").strip()
    if _CRIED_OUT.match(answer) and int(answer[:6].rstrip("!")) > _LARGEST_FACTORIAL_OF:
        return [answer, answer[:-1]]
    return [answer] if answer else []


def shown_answer(answer: str | None) -> str:
    """An answer as the metrics show it."""
    return "[INVALID]" if answer is None else compact(canonical(answer)).rpartition("=")[2]


async def _dapo_score(sample: Sample, answer: str | None) -> dict[str, Any]:
    correct = await _is_right(sample, "dapo", dapo_readings(answer))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": shown_answer(answer)}


async def f1_reward(args: Namespace, sample: Sample, response: str) -> float:
    """Token F1 of what follows the reasoning with the label, the best one of several.

    Rajpurkar et al. 2016 (SQuAD), section 6.1; "yes", "no" and "noanswer" only match themselves.
    """
    words = _words(after_reasoning(response))
    return max((_f1(words, _words(label)) for label in _labels(sample, "f1")), default=0.0)


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(guess: list[str], truth: list[str]) -> float:
    if guess != truth and any(" ".join(words) in _CLOSED_ANSWERS for words in (guess, truth)):
        return 0.0
    common = sum((Counter(guess) & Counter(truth)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(guess), common / len(truth)
    return 2 * precision * recall / (precision + recall)


async def random_reward(args: Namespace, sample: Sample, response: str) -> float:
    """0 or 1 by a fair coin that seed, sample and response decide: a resumed run tosses the same."""
    key = (args.rollout_seed, sample.group_index, sample.index, zlib.crc32(response.encode(errors="surrogatepass")))
    return float(random.Random(repr(key)).randrange(2))


async def remote_reward(args: Namespace, sample: Sample, response: str) -> Any:
    """What the server at ``--rm-url`` answers to ``{"prompt", "response", "label"}``: a number or an object, else
    BadInputError; RequestError where the request failed for good."""
    from slime.utils.http_utils import RequestError, post

    if not args.rm_url:
        raise BadInputError("--rm-type remote_rm needs --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    try:
        reply = await post(args.rm_url, payload, max_retries=_REMOTE_RETRIES)
    except RequestError as error:
        raise RequestError(f"--rm-url: {error}", error.status) from error
    if isinstance(reply, bool) or not isinstance(reply, int | float | dict):
        raise BadInputError(f"--rm-url {args.rm_url} must answer with a number or an object, not {reply!r:.120}")
    return reply


GRADERS: dict[str, Grader] = {
    "dapo": dapo_reward,
    "deepscaler": deepscaler_reward,
    "f1": f1_reward,
    "gpqa": gpqa_reward,
    "ifbench": ifbench_reward,
    "math": math_reward,
    "random": random_reward,
    "remote_rm": remote_reward,
}

BOXED_GRADERS: dict[str, Grader] = {
    "dapo": boxed_dapo_reward,
    "deepscaler": deepscaler_reward,
    "math": math_reward,
}
"""What ``boxed_<name>`` is where the box is looked for by the reward itself."""

ASKS_A_SERVER = ("remote_rm",)
"""Rewards that need ``--reward-timeout``. The others end by themselves: `algebra` bounds each answer, once a worker has
taken it; waiting for a worker, as a whole rollout does at its end, is no sign of a reward that hangs."""


def rm_type_problem(name: Any) -> str | None:
    """Why ``name`` is not a built-in reward; None where it is one."""
    if isinstance(name, str) and name.removeprefix(BOXED) in GRADERS:
        return None
    return f"unknown rm_type {name!r:.60}: there are {', '.join(sorted(GRADERS))}, each also as {BOXED}<name>"
