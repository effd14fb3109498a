"""The code that documentation shows does what it says."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slime.models import FAMILIES
from slime.options.flags.schema import flag_of
from slime.options.hooks import HookOptions
from slime.rollout.base_types import flatten_samples
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.types import Sample
from tests import shipped
from tests.documents import DOCS, example, examples
from tests.fake_client import FakeClient, reply, rollout

NUM_GPUS = 0
ANSWER = "\\boxed{%d}"


def test_the_example_of_several_turns(
    make_args: Callable[..., Namespace], use: Callable[[FakeClient], FakeClient], tmp_path: Path
) -> None:
    """The prompt of n letters is answered right at the n-th attempt; three attempts are allowed."""
    (tmp_path / "my_env.py").write_text(example("customize.md", "RETRY"))
    retry = "Wrong, try again."

    def answer(number: int, input_ids: Any, sampling_params: Any) -> dict[str, Any]:
        conversation = tokenizer.decode(input_ids)
        attempt, letters = 1 + conversation.count(retry), conversation.count("x")
        return reply(ANSWER % (letters if attempt == letters else 0))

    args = make_args(
        num_prompts=4,
        custom_generate_function_path=f"{tmp_path}/my_env.py:generate",
        custom_rm_path=f"{tmp_path}/my_env.py:reward_func",
        max_turns=3,
        rollout_max_response_len=400,
    )
    tokenizer = load_tokenizer(args.hf_checkpoint)
    use(FakeClient(answer))
    for group in rollout(args).samples:
        for sample in flatten_samples(group):
            letters = int(sample.label)
            assert sample.metadata["turns"] == min(letters, 3)
            assert sample.reward == pytest.approx({1: 1.0, 2: 0.8, 3: 0.6, 4: 0.0}[letters])
            assert sample.response.count(retry) == sample.metadata["turns"] - 1
            response = zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True)
            untrained = tokenizer.decode([token for token, mask in response if not mask])
            assert untrained.count(retry) == sample.metadata["turns"] - 1
            assert sum(sample.loss_mask or []) == len(ANSWER % 0) * sample.metadata["turns"]


def test_the_example_of_a_tool(
    make_args: Callable[..., Namespace], use: Callable[[FakeClient], FakeClient], tmp_path: Path
) -> None:
    """Prompts of n letters are asked for n + n; the result of 10 + 10 would be one token too many."""
    (tmp_path / "my_tool.py").write_text(example("customize.md", "append_observation"))

    def answer(number: int, input_ids: Any, params: dict[str, Any]) -> dict[str, Any]:
        assert params["stop"] == ["</sum>"]
        conversation = tokenizer.decode(input_ids)
        found = re.search(r"<result>(\d+)</result>$", conversation)
        letters = conversation.count("x")
        text = f"it is {found[1]}" if found else f"<sum>{letters}+{letters}</sum>"
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return reply(text, output_token_logprobs=[[-0.5, token, None] for token in tokens])

    path, count = f"{tmp_path}/my_tool.py:generate", len("<sum>10+10</sum><result>20</result>")
    args = make_args(num_prompts=10, rollout_batch_size=10, custom_generate_function_path=path)
    args.rollout_max_response_len = count
    tokenizer = load_tokenizer(args.hf_checkpoint)
    use(FakeClient(answer))
    for sample in flatten_samples(rollout(args).samples):
        letters = int(sample.label)
        text = tokenizer.decode(sample.tokens[-sample.response_length :])
        asked, result = f"<sum>{letters}+{letters}</sum>", f"<result>{2 * letters}</result>"
        if letters == 10:
            assert (text, sample.status) == (asked, Sample.Status.TRUNCATED)
            assert sample.loss_mask == [1] * len(asked)
        else:
            assert text.startswith(asked + result + "it")
            assert sample.loss_mask is not None
            assert sample.loss_mask[: len(asked + result)] == [1] * len(asked) + [0] * len(result)


@pytest.mark.parametrize("page", ["customize.md", "zh/customize.md"])
def test_every_hook_is_in_the_table_as_it_is_called(page: str) -> None:
    text = (DOCS / page).read_text()
    for field in fields(HookOptions):
        (parameters,) = re.findall(r"^Function \((.*?)\)", field.metadata["help"])
        assert f"| `{flag_of(field)}` | `({parameters})" in text


@pytest.mark.parametrize("page", ["add_a_model.md", "zh/add_a_model.md"])
def test_the_page_on_models_shows_a_whole_family_and_lists_all(page: str) -> None:
    source = (DOCS.parent / "slime" / "models" / "families.py").read_text()
    assert example(page, "GLM4 = ") in source
    text = (DOCS / page).read_text()
    listed = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", text, re.MULTILINE)
    assert listed == [name for family in FAMILIES for name in family.model_types]
    assert f"/root/Qwen3.5-4B: {shipped.refusal('qwen3.5-4B')}\n" in text
    assert example(page, "_row(").strip() in (DOCS.parent / "slime" / "models" / "rows.py").read_text()
    rules = re.findall(r"^\| `(\w+)` \| [^|]* \|$", text, re.MULTILINE)
    rows = [row for family in FAMILIES for row in (*family.rows, *(family.heads.rows if family.heads else ()))]
    assert set(rules) == {row.rule.__name__ for row in rows}


@pytest.mark.parametrize("page", ["customize.md", "add_a_model.md"])
def test_both_languages_show_the_same_code(page: str) -> None:
    assert examples(page) == examples(f"zh/{page}")


def test_chinese_pages_use_one_word_for_each_of_these() -> None:
    pages = [*DOCS.glob("zh/*.md"), *DOCS.parent.glob("examples/*/*_zh.md")]
    assert len(pages) > 15
    other = re.compile("演员|评论家|(?<!并)提示")  # actor, critic, prompt; "并提示" is a verb
    found = {page.name: words for page in pages if (words := other.findall(page.read_text()))}
    assert not found, "write actor, critic and prompt as they are in English"
