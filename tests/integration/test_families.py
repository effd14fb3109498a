"""Families beside the Qwen3 of the other tests: an engine that was pushed new weights gives the model's log-probs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slime.backends.sglang.engine import Engine
from slime.weights import EngineAddress, make_publisher
from tests.integration.test_weights import buckets_of, engine_log_prob_error
from tests.integration.tiny import KEYS, Service, engine_args, random_weights, write_tiny_model
from tests.parallel import tiny

NUM_GPUS = 0

pytestmark = [pytest.mark.integration, pytest.mark.full]

KINDS = ("qwen2", "llama", "glm4")
"""Of `tiny.KINDS`, those that SGLang serves on a CPU: experts and multi-latent attention need a GPU."""


def write_model(kind: str, directory: Path) -> None:
    """A model of the kind, with a tokenizer and what follows from its vocabulary."""
    write_tiny_model(directory)
    tokens = len(AutoTokenizer.from_pretrained(directory))
    options: dict[str, Any] = {**tiny.KINDS[kind], "vocab_size": tokens, "head_dim": 16, "num_key_value_heads": 2}
    options |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    options |= {"max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(**options)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_pushed_weights_give_the_models_log_probs(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / kind
    write_model(kind, directory)
    cli = ["--max-total-tokens", "8192", "--enable-deterministic-inference"]
    args = engine_args(directory, tmp_path, sglang_cli=cli)
    engine = Engine(args, 0, "127.0.0.1", KEYS, tmp_path / "engine.log", None)
    try:
        engine.start()
        address = EngineAddress(engine.url, 1, *KEYS)
        service = Service(args, engine, None, address, engine.control(timeout=60))  # type: ignore[arg-type]
        publisher = make_publisher(args, 0, [address])
        publisher.connect()
        model = random_weights(directory, random.randrange(1 << 30))
        assert engine_log_prob_error(service, model) > 0.01
        publisher.publish(1, buckets_of(model))
        assert engine_log_prob_error(service, model) < 1e-4
        publisher.close()
    finally:
        engine.stop()
