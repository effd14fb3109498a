"""A small valid command line of a training run, and the files that it names."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.entry.arguments import parse_args
from slime.files.checkpoints import LATEST, RUN_KEY
from slime.models import family_of, hf_config, weight_shape

Parse = Callable[..., Namespace]
Flags = tuple[str, str]
Fails = Callable[..., str]
"""What the fixtures of these names give: of words to add and flags to leave out, the options or the error."""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}

LATENT = QWEN3 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Of multi-latent attention."""

BASE = {
    "--hf-checkpoint": "model",
    "--prompt-data": "data.jsonl",
    "--label-key": "label",
    "--num-rollout": "3",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
    "--rollout-max-response-len": "16",
    "--rm-type": "math",
    "--actor-num-gpus-per-node": "2",
    "--colocate": "",
    "--fp32": "",
}


def write_model(directory: Path, config: dict[str, object] = QWEN3) -> None:
    """A Hugging Face directory, of which options read the configuration and what files say is in them."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_headers(directory)


def write_headers(directory: Path) -> None:
    """A safetensors file with the tensors that config.json means: a header, and a hole for the numbers.

    Only the embedding has its shape.
    """
    config = hf_config(directory)
    family, shape = family_of(config), weight_shape(config, with_heads=True)
    names = {source for name in family.parameters(shape) for source in family.sources(name, shape)}
    sizes = {name: [1] for name in sorted(names)}
    sizes["model.embed_tokens.weight"] = [shape.vocab_size, config.hidden_size]
    entries, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def write_checkpoint(directory: Path, name: str, common: dict[str, Any]) -> None:
    """A directory of checkpoints with one in it, of which options read what all ranks have in common.

    Under a number it is a run's.
    """
    common = {RUN_KEY: True, **common} if name.isdecimal() else common
    checkpoint = directory / (f"iter_{int(name):07d}" if name.isdecimal() else name)
    checkpoint.mkdir(parents=True)
    torch.save(common, checkpoint / "common.pt")
    (checkpoint / "metadata.json").write_text("{}")
    (directory / LATEST).write_text(name)


def write_rows(file: Path) -> None:
    """Prompt data."""
    file.write_text('{"input": "1+1", "label": "2"}\n')


def command(words: str = "", without: str = "") -> list[str]:
    """`BASE`, less some of its flags, and more words."""
    kept = {flag: value for flag, value in BASE.items() if flag not in without.split()}
    return [word for pair in kept.items() for word in pair if word] + words.split()


def refused(table: str) -> pytest.MarkDecorator:
    """Parametrizes a test by rows ``FLAGS -> PART OF THE MESSAGE``, or ``FLAGS less FLAGS OF BASE -> PART``.

    A case is what the fixture ``fails`` takes, as ``flags``, and that part of the ``message``. An indented line belongs
    to the one above it.
    """
    cases = []
    for row in re.sub(r"\n +", " ", table.strip()).splitlines():
        flags, _, message = row.partition(" -> ")
        words, _, without = f" {flags}".partition(" less ")
        assert message, row
        cases.append(pytest.param((words.strip(), without), message, id=flags))
    return pytest.mark.parametrize(("flags", "message"), cases)


def failure(capsys: pytest.CaptureFixture[str], words: str = "", without: str = "", asynchronous: bool = False) -> str:
    """The one line, with exit status 2, that `command` fails with."""
    with pytest.raises(SystemExit) as stop:
        parse_args(command(words, without), asynchronous=asynchronous)
    line = capsys.readouterr().err
    assert stop.value.code == 2
    match = re.search(r"^[^\n]*: error: ([^\n]+)\n\Z", line, re.MULTILINE)
    assert match, line
    return match[1]
