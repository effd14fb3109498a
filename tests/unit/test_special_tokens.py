"""What graders get of a response: neither the token that ended it nor any other special one."""

from __future__ import annotations

import asyncio
import json
import random
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.options.eval_datasets import EvalDataset
from slime.rollout.evaluation import eval_args
from slime.rollout.rm_hub import async_rm, response_without_special_tokens
from slime.rollout.rm_hub.special_tokens import _Texts
from slime.rollout.tokenizer import load_tokenizer
from tests.small_rollout import write_tokenizer

NUM_GPUS = 0

Args = Callable[..., Namespace]


def said(args: Namespace, response: str, **fields: Any) -> str:
    return response_without_special_tokens(args, Sample(response=response, **fields))


def test_the_longest_that_fits_goes_first() -> None:
    """As an alternation of them all, the longest first, which takes seconds where there are thousands."""
    rng = random.Random()
    for _ in range(200):
        texts = {"".join(rng.choices("ab<|", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 12))}
        text = "".join(rng.choices("ab<|c", k=60))
        pattern = "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text))))
        assert _Texts(texts).removed_from(text) == re.sub(pattern, "", text), (texts, text)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 34<|im_end|>", "Answer: 34"),
        ("34<|im_end|>\n<|im_start|>user\nNo.<|im_end|>", "34\nuser\nNo."),
        ("<think>so</think>34<|endoftext|>", "<think>so</think>34"),
        ("a <|unknown|> b </s>", "a <|unknown|> b </s>"),
        ("", ""),
    ],
)
def test_special_is_what_the_tokenizer_marks(response: str, expected: str, rollout_args: Args) -> None:
    assert said(rollout_args(), response) == expected


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_turn>", "<|eot_id|>"]
)
def test_without_a_tokenizer_it_is_what_usually_is(end: str) -> None:
    assert said(Namespace(), f"<think>x < |y|</think> 34{end}") == "<think>x < |y|</think> 34"
    args = Namespace(rm_type="dapo", custom_rm_path=None)
    judged = asyncio.run(async_rm(args, Sample(response=f"Answer: 34{end}", label="34")))
    assert judged == {"score": 1.0, "acc": True, "pred": "34"}


def test_markers_of_reasoning_and_letters_are_never_special(rollout_args: Args, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|tool|>"], "pad_token": "!"})
    tokenizer.add_tokens(["<tool_call>"])
    args = rollout_args(hf_checkpoint=str(tmp_path))
    assert said(args, "<think>!</think><tool_call>5!<|tool|><|im_end|>") == "<think>!</think><tool_call>5!"


def test_a_stop_token_that_is_not_special_ends_the_response_all_the_same(rollout_args: Args, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (stop,) = load_tokenizer(str(tmp_path))("#")["input_ids"]
    sample: dict[str, Any] = {"tokens": [40, 41, stop], "response_length": 2}
    assert said(rollout_args(), "4#5#", **sample) == "4#5#"
    assert said(rollout_args(rollout_stop_token_ids=[stop]), "4#5#", **sample) == "4#5"
    sample["tokens"] = [40, stop, 41]
    assert said(rollout_args(rollout_stop_token_ids=[stop]), "4#5#", **sample) == "4#5#"
    sample["tokens"] = [40, 41, stop]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    assert said(rollout_args(hf_checkpoint=str(tmp_path)), "4#5#", **sample) == "4#5"
    dataset = EvalDataset(name="d", path="p", stop_token_ids=[stop])
    assert said(eval_args(rollout_args(), dataset), "4#5#", **sample) == "4#5"


@pytest.mark.parametrize("rm_type", ["dapo", "f1", "gpqa", "ifbench", "math", "deepscaler", "boxed_f1", "boxed_dapo"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>\n"])
def test_every_reward_is_the_same_with_them(rm_type: str, end: str, rollout_args: Args) -> None:
    metadata = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "Answer: B"}]}
    response = "</think>\\boxed{B}<|im_end|>\nAnswer: B"
    scores = []
    for label in ("B", "C"):
        samples = [Sample(response=response + last, label=label, metadata=metadata) for last in ("", end)]
        bare, ended = (asyncio.run(async_rm(rollout_args(rm_type=rm_type), sample)) for sample in samples)
        assert bare == ended
        scores.append(ended["score"] if isinstance(ended, dict) else ended)
    assert scores[0] == 1.0 if rm_type == "ifbench" else scores[0] > scores[1]
