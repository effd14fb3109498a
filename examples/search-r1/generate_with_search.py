"""Search-R1 (arXiv:2503.09516): the model searches in the middle of its response, and is rewarded for its answer.

A response reads ``<search>query</search>`` (the model), ``<information>...</information>`` (the search server, masked),
and so on up to ``<answer>...</answer>`` (the model) or ``--max-turns`` turns.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import string
import time
from argparse import Namespace
from typing import Any
from weakref import WeakKeyDictionary

from slime.grading.graders import f1_reward
from slime.options.flags.schema import positive
from slime.rollout.observation import append_observation, response_text
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.http_utils import RequestError, post
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
STOPS = ["</search>", "</answer>"]
FAILED = "the search failed"
_MAX_TURNS = 4


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Flags of this example; slime adds them because a ``--custom-*-path`` names this module."""
    parser.add_argument("--search-url", default="http://127.0.0.1:8765/retrieve", help="The retrieval server.")
    parser.add_argument("--search-topk", type=int, default=3, help="Passages a search returns.")
    parser.add_argument("--search-passage-chars", type=int, default=500, help="Characters of a passage at most.")
    parser.add_argument("--search-timeout", type=float, default=10.0, help="Seconds for one search, retries included.")
    parser.add_argument("--search-retries", type=int, default=3, help="How often a search is sent again.")
    parser.add_argument("--search-concurrency", type=positive, default=64, help="Searches in flight at most.")
    parser.add_argument("--search-reward", choices=["em", "f1"], default="em", help="How an answer is compared.")
    parser.add_argument("--search-format-score", type=float, default=0.1, help="Reward of a wrong answer at least.")


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model and of the search server, until there is an answer or no turn or room is left."""
    # The engine stops behind a stop string. What is kept is the ids it made: a last token may hold more characters than
    # the string, and those stay, since the model's next turn follows the tokens and not the text.
    params = sampling_params | {"stop": [*(sampling_params.get("stop") or []), *STOPS]}
    if not sample.response_length:
        sample.metadata |= {"turn_starts": [0], "searches": [], "search_errors": 0}
    starts = sample.metadata["turn_starts"]
    while True:
        if (query := _query(args, sample)) is None:  # the turn is not finished
            sample = await generate_turn(args, sample, params)
            if sample.status is not Sample.Status.COMPLETED or (query := _query(args, sample)) is None:
                break  # no room is left; or the rollout ends, and another one goes on from here; or this was the answer
        if len(starts) >= (args.max_turns or _MAX_TURNS):
            sample.status = Sample.Status.TRUNCATED
            break
        sample.status = Sample.Status.ABORTED  # what it is if the rollout ends here: a later one repeats the call
        information = await search(args, sample, query)
        if not append_observation(args, sample, params, f"\n<information>{information}</information>\n"):
            break
        sample.status = Sample.Status.PENDING
        starts.append(sample.response_length)
    # What the model did on wrong premises teaches it nothing: no token of such a sample is trained.
    sample.remove_sample = sample.metadata["search_errors"] > 0
    return sample


def _last_turn(args: Namespace, sample: Sample) -> str:
    return response_text(args, sample, sample.metadata["turn_starts"][-1])


def _query(args: Namespace, sample: Sample) -> str | None:
    """What the model searches for in its last turn."""
    found = SEARCH.search(_last_turn(args, sample))
    return found[1].strip() if found else None


async def search(args: Namespace, sample: Sample, query: str) -> str:
    """What the model gets to read; a server that fails is noted in the metadata, and never ends the run."""
    started = time.monotonic()
    body = {"queries": [query], "topk": args.search_topk, "return_scores": True}
    try:
        async with _places(args.search_concurrency), asyncio.timeout(args.search_timeout):
            reply = await post(args.search_url, body, max_retries=args.search_retries)
        passages = [str(hit["document"]["contents"])[: args.search_passage_chars] for hit in reply["result"][0]]
    except (RequestError, TimeoutError, LookupError, TypeError) as error:
        logger.warning("--search-url %s: %s: %s", args.search_url, type(error).__name__, error)
        sample.metadata["search_errors"] += 1
        return FAILED
    finally:
        sample.non_generation_time += time.monotonic() - started
    sample.metadata["searches"].append(query)
    return "\n".join(f"{number}. {passage}" for number, passage in enumerate(passages, 1)) or "nothing found"


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _places(count: int) -> asyncio.Semaphore:
    """The running event loop's bound on searches in flight."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(count))


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 for a right answer, at least ``--search-format-score`` for any other, 0 for none.

    Only the model's last turn is judged: an ``<answer>`` in a passage is not the model's.
    """
    answer = ANSWER.search(_last_turn(args, sample))
    if answer is None:
        return 0.0
    score = await f1_reward(args, sample, answer[1]) if args.search_reward == "f1" else exact_match(sample, answer[1])
    return max(score, args.search_format_score)


def exact_match(sample: Sample, answer: str) -> float:
    """1 where the answer is the label, or one of several, but for case, punctuation, articles and spaces."""
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    return float(any(_bare(answer) == _bare(str(label)) for label in labels))


def _bare(text: str) -> str:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
