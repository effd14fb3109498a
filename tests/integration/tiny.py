"""A tiny Hugging Face model, its log-probs by a forward pass, and the options that a live engine needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slime.backends.sglang.client import EngineControl
from slime.backends.sglang.engine import Engine
from slime.backends.sglang.router import Router
from slime.entry.arguments import GROUPS
from slime.weights import EngineAddress
from tests.proxy import RecordingProxy

KEYS = ("generate-key-of-the-tests", "admin-key-of-the-tests")


def engine_args(hf_checkpoint: Path, run_dir: Path, **changes: Any) -> argparse.Namespace:
    """slime's options at their defaults but for keyword arguments and shorter deadlines, and what follows from them."""
    values: dict[str, Any] = {field.name: field.default for group in GROUPS for field in fields(group)}
    values |= {
        "hf_checkpoint": str(hf_checkpoint),
        "vocab_size": 258,
        "run_dir": run_dir,
        "params_dtype": "float32",
        "seed": 1234,
        "sglang_cli": [],
        "router_cli": [],
        "engine_start_timeout": 300.0,
        "request_timeout": 120.0,
        "weight_update_timeout": 60.0,
        "drafts_apart": False,
        "allow_untested_versions": False,
        "update_weight_transport": "tensor",
        "asynchronous": False,
        "pushes_float8": False,
        "worker_type": "regular",
        "keeps_weights": False,
        "returns_routes": False,
        "deterministic_mode": False,
    }
    assert set(changes) <= set(values), set(changes) - set(values)
    return argparse.Namespace(**(values | changes))


def write_tiny_model(directory: Path) -> None:
    """A Qwen3 of about 0.1 M parameters with untied embeddings, and a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.08)  # larger than the default, so that log-probs tell weights apart
    model.save_pretrained(directory)


def random_weights(hf_checkpoint: Path, seed: int) -> torch.nn.Module:
    """The model of ``hf_checkpoint`` with every weight moved by noise, and routers' biases, which are buffers."""
    model = AutoModelForCausalLM.from_pretrained(hf_checkpoint).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """float32 [len(response)], by a Hugging Face forward pass."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@dataclass
class Service:
    """A live engine registered at a live router."""

    args: argparse.Namespace
    engine: Engine
    router: Router
    address: EngineAddress
    control: EngineControl
    proxy: RecordingProxy | None = None
    """Which the environment named when both were started."""


def processes_of(service: Service) -> list[psutil.Process]:
    """The server's processes, below its supervisor."""
    assert service.engine._process is not None
    return psutil.Process(service.engine._process.pid).children(recursive=True)
