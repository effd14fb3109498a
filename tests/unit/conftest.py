"""What tests of the rollout side share: a byte-level tokenizer with a chat template, options, a generate client."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slime.options.rollout import DEFAULT_ROLLOUT
from slime.rollout import state
from slime.utils.arguments import GROUPS
from tests.fake_client import FakeClient

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """Writes a tokenizer with the given chat template and returns its directory; every byte is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(chat_template: str | None) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        fast.chat_template = chat_template
        directory = tmp_path_factory.mktemp("tokenizer")
        fast.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tokenizer_dir(make_tokenizer: Callable[[str | None], Path]) -> Path:
    """A directory with a ChatML tokenizer."""
    return make_tokenizer(CHATML)


@pytest.fixture
def rollout_args(tokenizer_dir: Path) -> Callable[..., Namespace]:
    """Makes options at their defaults, but for keyword arguments and what makes a small, quick rollout."""

    def make(**changes: Any) -> Namespace:
        values: dict[str, Any] = {field.name: field.default for group in GROUPS for field in fields(group)}
        values |= {
            "hf_checkpoint": str(tokenizer_dir),
            "input_key": "prompt",
            "label_key": "label",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 32,
            "rollout_num_gpus": 1,
            "sglang_server_concurrency": 8,
            "rollout_timeout": 20.0,
            "request_timeout": 10.0,
            "reward_timeout": 10.0,
            # Not options: what parsing derives from them, SGLang's own flags, and what is known once the router runs.
            "eval_function_path": DEFAULT_ROLLOUT,
            "eval_datasets": [],
            "asynchronous": False,
            "num_engines": 1,
            "sglang_enable_deterministic_inference": False,
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": 3000,
            "sglang_router_api_key": None,
        }
        unknown = set(changes) - set(values)
        assert not unknown, unknown
        return Namespace(**values | changes)

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (or raw lines) to a file and returns its path."""

    def write(rows: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def make_args(rollout_args: Callable[..., Namespace], write_jsonl: Callable[..., str]) -> Callable[..., Namespace]:
    """Makes options of a rollout over prompts of 1, 2, 3, ... letters, labelled with their length."""

    def make(num_prompts: int = 12, **changes: Any) -> Namespace:
        rows = [{"prompt": "x" * (i + 1), "label": str(i + 1)} for i in range(num_prompts)]
        return rollout_args(**{"prompt_data": write_jsonl(rows), "rm_type": "f1", **changes})

    return make


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClient], FakeClient]:
    """Lets rollouts take a client in place of their own."""

    def use_client(client: FakeClient) -> FakeClient:
        monkeypatch.setattr(state, "make_client", lambda args: client)
        return client

    return use_client
