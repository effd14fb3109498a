"""Supervised rollouts: loss masks from chat templates of several kinds, and what cannot be trained on."""

from __future__ import annotations

import random
import string
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample, Status
from slime.data.rows.conversation import ConversationEncoder
from slime.data.rows.dataset import load_prompts, train_prompt_spec
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sft_rollout import generate_rollout
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError

NUM_GPUS = 0

Args = Callable[..., Namespace]
Write = Callable[..., str]

REASONING = (  # drops the reasoning of all turns but those after the last user message; opens <think> in the prompt
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
REWRITING = "{{ messages | length }} messages{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def text(length: int = 8) -> str:
    return "".join(random.choices(string.ascii_letters + "äß€", k=length))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def sft_args(rollout_args: Args, path: str, **changes: Any) -> Namespace:
    return rollout_args(
        loss_type="sft_loss",
        rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
        prompt_data=path,
        n_samples_per_prompt=1,
        **{"label_key": None, "rollout_batch_size": 1, **changes},
    )


def run(args: Namespace, rollout_id: int = 0) -> list[Sample]:
    output = generate_rollout(args, rollout_id, RolloutDataSource(args))
    return [sample for group in output.samples for sample in group]


def trained(args: Namespace, sample: Sample) -> list[str]:
    """The runs of trained tokens, as text."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    sample.check()
    assert sample.loss_mask is not None
    assert sample.loss_mask[0] == sample.loss_mask[-1] == 1
    runs: list[list[int]] = [[]]
    for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(tokens) for tokens in runs if tokens]


def test_one_turn(rollout_args: Args, write_jsonl: Write) -> None:
    question, answer = text(), text(20)
    args = sft_args(rollout_args, write_jsonl([{"prompt": [user(question), assistant(answer)]}]))
    (sample,) = run(args)
    assert trained(args, sample) == [f"{answer}<|im_end|>"]
    assert sample.response == f"{answer}<|im_end|>"
    prompt = load_tokenizer(args.hf_checkpoint).decode(sample.tokens[: -sample.response_length])
    assert prompt == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert (sample.reward, sample.status, sample.rollout_log_probs) == (0.0, Status.COMPLETED, None)


def test_several_turns_and_step_loss_mask(rollout_args: Args, write_jsonl: Write) -> None:
    a, b, c = text(), text(), text()
    messages = [
        {"role": "system", "content": text()},
        user(text()),
        assistant(a),
        user(text()),
        assistant(b, step_loss_mask=0),
        {"role": "tool", "content": text()},
        assistant(c, step_loss_mask=1),
        user(text()),
    ]
    path = write_jsonl([{"prompt": messages}])
    args = sft_args(rollout_args, path)
    (sample,) = run(args)
    assert trained(args, sample) == [f"{a}<|im_end|>", f"{c}<|im_end|>"]
    args = sft_args(rollout_args, path, loss_mask_type="distill_qwen")
    (sample,) = run(args)
    assert trained(args, sample) == [f"{c}<|im_end|>"]


def test_template_that_drops_reasoning(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    messages = [
        user("q1"),
        assistant("<think>\nr1\n</think>\n\nfirst"),
        user("q2"),
        assistant("<think>\nr2\n</think>\n\nsecond"),
    ]
    args = sft_args(rollout_args, write_jsonl([{"prompt": messages}]), hf_checkpoint=str(make_tokenizer(REASONING)))
    (sample,) = run(args)
    # The prompt ends in <think>\n: the model never has to say it.
    assert trained(args, sample) == ["first<|im_end|>", "r2\n</think>\n\nsecond<|im_end|>"]


def test_template_without_end_of_turn(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    messages = [user("hello"), assistant("hi there"), user("more"), assistant("bye")]
    args = sft_args(rollout_args, write_jsonl([{"prompt": messages}]), hf_checkpoint=str(make_tokenizer(NO_END)))
    (sample,) = run(args)
    assert trained(args, sample) == ["hi there\n", "bye\n"]


def test_template_that_rewrites_history_is_refused(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    path = write_jsonl([{"prompt": [user("a"), assistant("b"), user("c"), assistant("d")]}])
    args = sft_args(rollout_args, path, hf_checkpoint=str(make_tokenizer(REWRITING)))
    with pytest.raises(ValueError, match=r"line 1: the chat template rewrites the turns before message"):
        run(args)


def test_label_is_the_answer_where_nobody_gives_one(rollout_args: Args, write_jsonl: Write) -> None:
    question, answer = text(), text()
    rows = [{"prompt": [user(question)], "label": answer}, {"prompt": question, "label": answer}]
    args = sft_args(rollout_args, write_jsonl(rows), label_key="label", rollout_batch_size=2, apply_chat_template=True)
    first, second = run(args)
    assert first.tokens == second.tokens
    assert trained(args, first) == [f"{answer}<|im_end|>"]
    path = write_jsonl([{"prompt": question, "label": {"answer": answer}}])
    with pytest.raises(BadInputError, match=r"line 1: the label, which is the assistant's answer here, is a dict, not"):
        run(sft_args(rollout_args, path, label_key="label"))


def test_tools_are_rendered(rollout_args: Args, write_jsonl: Write) -> None:
    rows = [{"prompt": [user("q"), assistant("a")], "tools": [{"name": "add"}]}]
    args = sft_args(rollout_args, write_jsonl(rows))
    (sample,) = run(args)
    assert '{"name": "add"}' in load_tokenizer(args.hf_checkpoint).decode(sample.tokens)
    assert trained(args, sample) == ["a<|im_end|>"]


@pytest.mark.parametrize("messages", [[user("a"), user("b")], [user("a"), assistant("b", step_loss_mask=0)]])
def test_nothing_to_train_names_the_row(messages: Any, rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": [user("a"), assistant("b")]}, {"prompt": messages}])
    with pytest.raises(
        ValueError, match=r"--prompt-data .*data.jsonl, line 2: no token of the conversation is trained"
    ):
        run(sft_args(rollout_args, path, rollout_batch_size=2))


def test_bad_conversations_fail_at_load_or_are_skipped(rollout_args: Args, write_jsonl: Write) -> None:
    rows = [
        {"prompt": [user("a"), assistant("b")], "label": None},
        {"prompt": [user("a")], "label": None},
        {"prompt": "a", "label": "b"},
        {"prompt": "", "label": None},
        {"prompt": [user("a\ud83d"), assistant("b")], "label": None},
    ]
    args = sft_args(rollout_args, write_jsonl(rows), label_key="label")
    with pytest.raises(BadInputError, match=r"--prompt-data .*, line 2: no token of the conversation is trained"):
        load_prompts(train_prompt_spec(args))
    args.skip_bad_rows = True
    dataset = load_prompts(train_prompt_spec(args))
    assert (len(dataset), dataset.num_bad) == (2, 3)
    assert [dataset[i].response for i in range(2)] == ["b<|im_end|>"] * 2


def test_longer_conversations_are_left_out(rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": [user("a"), assistant("b" * n)]} for n in (4, 5, 6)])
    args = sft_args(rollout_args, path, rollout_max_prompt_len=2 * 2 + len("user\na\n") + len("assistant\n") + 5)
    dataset = load_prompts(train_prompt_spec(args))
    assert (len(dataset), dataset.num_too_long) == (2, 1)


def test_a_source_of_own_samples_is_encoded(rollout_args: Args, write_jsonl: Write) -> None:
    messages = [user(text()), assistant(text())]
    args = sft_args(rollout_args, write_jsonl([{"prompt": messages}]))
    own = RolloutDataSource([Sample(prompt=messages)], args)
    (sample,) = [sample for group in generate_rollout(args, 0, own).samples for sample in group]
    (read,) = run(args)
    assert (sample.tokens, sample.loss_mask) == (read.tokens, read.loss_mask)
    own = RolloutDataSource([Sample(prompt=messages[:1])], args)
    with pytest.raises(BadInputError, match="sample 0: no token of the conversation is trained"):
        generate_rollout(args, 0, own)


def test_own_data_source_may_give_samples_or_groups(rollout_args: Args, write_jsonl: Write) -> None:
    args = sft_args(
        rollout_args, write_jsonl([{"prompt": "a"}]), rollout_batch_size=3, data_source_path="own.py:Source"
    )

    class Source:
        def __init__(self, drawn: list[Any]) -> None:
            self.drawn = drawn

        def get_samples(self, num_samples: int) -> list[Any]:
            return self.drawn[:num_samples]

    prompts = [Sample(prompt=[user(text()), assistant(text())]) for _ in range(3)]
    for drawn in (prompts, [[prompt] for prompt in prompts]):
        groups = generate_rollout(args, 0, Source(drawn)).samples
        assert [len(group) for group in groups] == [1, 1, 1]
        assert len({group[0].group_index for group in groups} - {None}) == 3
    with pytest.raises(BadInputError, match=r"--data-source-path own.py:Source: get_samples\(3\) gave 2 groups"):
        generate_rollout(args, 0, Source(prompts[:2]))


def test_evaluation_is_refused(rollout_args: Args) -> None:
    with pytest.raises(ValueError, match="--eval-function-path"):
        generate_rollout(rollout_args(), 0, None, evaluation=True)


def test_each_row_is_encoded_once_and_fast(
    rollout_args: Args, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": [user(f"{i} + {i}"), assistant(f"{text(10)} {2 * i}")]} for i in range(64)]
    args = sft_args(rollout_args, write_jsonl(rows), rollout_batch_size=64)
    source = RolloutDataSource(args)
    monkeypatch.setattr(ConversationEncoder, "encode", lambda *_: pytest.fail("encoded again"))
    seconds = []
    for step in range(5):
        started = time.process_time()
        generate_rollout(args, step, source)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.02, seconds


def test_slow_tokenizer_or_no_template(rollout_args: Args, write_jsonl: Write, make_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": [user("a"), assistant("b")]}])
    args = sft_args(rollout_args, path, hf_checkpoint=str(make_tokenizer(None)))
    with pytest.raises(ValueError, match=r"sft_loss: the tokenizer of .* has no chat template"):
        run(args)
