"""What a small rollout needs and no fixture has to make: a byte-level tokenizer with a chat template, and options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime.entry.arguments import GROUPS
from slime.options.rollout import DEFAULT_ROLLOUT

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, chat_template: str | None = CHATML, merges: Sequence[str] = ()) -> None:
    """A Hugging Face tokenizer of which every byte is one token, and each of the pairs ``merges`` another."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merges]
    pairs = [(first, second) for first, second in merges]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(known)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    fast.save_pretrained(directory)


def small_rollout(tokenizer: Path, **changes: Any) -> Namespace:
    """Options at their defaults, but for ``changes`` and for what makes a rollout small and quick."""
    values: dict[str, Any] = {field.name: field.default for group in GROUPS for field in fields(group)}
    values |= {
        "hf_checkpoint": str(tokenizer),
        "input_key": "prompt",
        "label_key": "label",
        "rm_type": "random",
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
        "vocab_size": 1 << 20,
        "sglang_enable_deterministic_inference": False,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 3000,
        "sglang_router_api_key": None,
    }
    unknown = set(changes) - set(values)
    assert not unknown, unknown
    return Namespace(**values | changes)
