#!/usr/bin/env python3
"""How often the built-in rewards are right: scores pairs whose reward is known, and lists those that they miss.

    python3 tools/score_graders.py tests/data/reward_pairs.jsonl

Each line of a file is an object with ``label``, ``expected`` (0 or 1) and either ``answer``, which every mathematical
grader is given in a response of its own form, or ``response`` and the ``grader`` that judges it (an ``--rm-type``);
``category`` and ``metadata`` where there are any. Of ``remote_rm`` the server says 1 where it is given the label.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.data import Sample  # noqa: E402
from slime.rollout.rm_hub import async_rm  # noqa: E402
from slime.utils.http_client import Http  # noqa: E402

Pair = dict[str, Any]

ANSWER_GRADERS = {
    "math": "so \\boxed{%s}",
    "boxed_math": "\\boxed{1000003}, no: \\boxed{%s}",
    "deepscaler": "<think>\\boxed{1000003}</think> \\boxed{%s}",
    "dapo": "Therefore\nAnswer: %s",
    "boxed_dapo": "so \\boxed{%s}",
}
"""How a response has its answer, by grader."""
END = "<|im_end|>"


def spread(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs with a grader and a response each."""
    return [
        pair | form
        for pair in pairs
        for form in (
            [{"grader": name, "response": text % pair["answer"] + END} for name, text in ANSWER_GRADERS.items()]
            if "answer" in pair
            else [{}]
        )
    ]


def score(pairs: Iterable[Pair]) -> list[Pair]:
    """Each pair of `spread` with what the grader ``said``: whether its reward is above a half."""
    return asyncio.run(_score(spread(pairs)))


async def _score(pairs: list[Pair]) -> list[Pair]:
    from aiohttp import web

    async def same(request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response(float(asked["response"] == asked["label"]))

    application = web.Application()
    application.router.add_post("/", same)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    http = Http()
    try:
        with http.active():
            return [pair | {"said": said} for pair, said in zip(pairs, await _judged(pairs, url), strict=True)]
    finally:
        await http.close()
        await runner.cleanup()


async def _judged(pairs: list[Pair], url: str) -> list[bool]:
    args = Namespace(rm_type=None, custom_rm_path=None, rm_url=url, reward_timeout=60.0, hf_checkpoint=None)

    async def one(pair: Pair) -> bool:
        metadata = (pair.get("metadata") or {}) | {"rm_type": pair["grader"]}
        reward: Any = await async_rm(args, Sample(response=pair["response"], label=pair["label"], metadata=metadata))
        return bool((reward["score"] if isinstance(reward, dict) else reward) > 0.5)

    return await asyncio.gather(*map(one, pairs))


def rates(scored: Iterable[Pair]) -> dict[str, tuple[int, float, float]]:
    """By grader: pairs, precision (of what it says is right, the share that is) and recall (of what is right)."""
    counts: dict[str, Counter[tuple[bool, bool]]] = {}
    for pair in scored:
        counts.setdefault(pair["grader"], Counter())[bool(pair["expected"]), pair["said"]] += 1
    return {
        name: (
            found.total(),
            found[True, True] / max(found[True, True] + found[False, True], 1),
            found[True, True] / max(found[True, True] + found[True, False], 1),
        )
        for name, found in sorted(counts.items())
    }


def missed(scored: Iterable[Pair]) -> list[str]:
    """A line for each pair that a grader judges otherwise than is expected."""
    wrong = [pair for pair in scored if pair["said"] != bool(pair["expected"])]
    return [
        f"{pair['grader']}: {pair['said']:d}, not {pair['expected']:d}: {pair.get('answer', pair['response'])!r} "
        f"against {pair['label']!r} ({pair.get('category', 'no category')})"
        for pair in wrong
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print a table, and what is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of pairs")
    files = parser.parse_args(arguments).files
    logging.disable(logging.WARNING)
    pairs = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    scored = score(pairs)
    print("| grader | pairs | precision | recall |\n|---|---|---|---|")
    for name, (count, precision, recall) in rates(scored).items():
        print(f"| `{name}` | {count} | {precision:.3f} | {recall:.3f} |")
    print("\n".join(["", *missed(scored)]))


if __name__ == "__main__":
    main()
