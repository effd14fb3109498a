"""Adapters alone in a live engine: its log-probs are those of the merged model, and no request hangs a push."""

from __future__ import annotations

import math
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from slime.backends.sglang.client import ADAPTER, EngineError
from slime.backends.sglang.engine import Engine
from slime.files.hf_writer import NamedTensors
from slime.weights import EngineAddress, make_publisher
from slime.weights.adapter import AdapterPublisher
from tests.integration.test_families import write_model
from tests.integration.tiny import KEYS, Service, engine_args, log_probs_of

NUM_GPUS = 0

pytestmark = pytest.mark.integration

RANK, ALPHA = 4, 6.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Of layers that trainers and engines have fused, some parts only."""
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
_PEFT = "base_model.model."


def start(directory: Path, run_dir: Path, modules: tuple[str, ...] = LINEAR) -> Service:
    """An engine that is ready for adapters."""
    args = engine_args(
        directory, run_dir, lora_rank=RANK, lora_alpha=ALPHA, lora_sync="adapter", lora_target_modules=list(modules),
        sglang_cli=["--max-total-tokens", "8192", "--enable-deterministic-inference"],
    )  # fmt: skip
    args.lora_modules = list(modules)
    engine = Engine(args, 0, "127.0.0.1", KEYS, run_dir / "lora_engine.log", None)
    try:
        engine.start()
    except BaseException:
        engine.stop()
        raise
    address = EngineAddress(engine.url, 1, *KEYS)
    return Service(args, engine, None, address, engine.control(timeout=60))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lora_service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = start(tiny_model_dir, tmp_path_factory.mktemp("lora"))
    yield service
    service.engine.stop()


@pytest.fixture
def publisher(lora_service: Service) -> Iterator[AdapterPublisher]:
    publisher = make_publisher(Namespace(**vars(lora_service.args)), 0)
    assert isinstance(publisher, AdapterPublisher)
    yield publisher
    publisher.close()


def adapted(directory: Path, modules: tuple[str, ...]) -> tuple[list[NamedTensors], torch.nn.Module]:
    """Random adapters as a trainer exports them, in buckets of a few tensors, and the model merged with them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    exported = {name for layer in FUSED if not layer.isdisjoint(modules) for name in layer}.union(modules)
    named: NamedTensors = []
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in exported or weight.dim() > 2:  # experts, all in one
            continue
        b = torch.zeros(weight.shape[0], RANK)
        if module.rpartition(".")[2] in modules:
            a = torch.randn(RANK, weight.shape[1]) / math.sqrt(weight.shape[1])
            b.normal_(0, 0.1)
            weight += b @ a * ALPHA / RANK
            named.append((f"{_PEFT}{module}.lora_A.weight", a))
        named.append((f"{_PEFT}{module}.lora_B.weight", b))
    return [named[i : i + 3] for i in range(0, len(named), 3)], model


def generate(service: Service, prompt: list[int], adapter: bool = True) -> requests.Response:
    body: dict[str, Any] = {"input_ids": prompt, "return_logprob": True}
    body |= {"sampling_params": {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": random.randrange(1 << 30)}}
    body |= {"lora_path": ADAPTER} if adapter else {}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    return requests.post(f"{service.engine.url}/generate", json=body, headers=headers, timeout=60)


def log_prob_error(service: Service, model: torch.nn.Module, adapter: bool = True) -> float:
    """Largest difference between the engine's log-probs and the model's."""
    worst = 0.0
    for length in (4, 40):
        prompt = [random.randrange(2, model.config.vocab_size) for _ in range(length)]
        reply = generate(service, prompt, adapter).json()
        engine = torch.tensor([triple[0] for triple in reply["meta_info"]["output_token_logprobs"]])
        worst = max(worst, float((engine - log_probs_of(model, prompt, reply["output_ids"])).abs().max()))
    return worst


def test_the_engine_adds_the_pushed_adapters(
    lora_service: Service, tiny_model_dir: Path, publisher: AdapterPublisher
) -> None:
    publisher.args.check_weight_update_equal = True
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    for version, modules in enumerate((LINEAR, SOME, LINEAR), start=1):
        buckets, model = adapted(tiny_model_dir, modules)
        figures = publisher.publish(version, buckets, [lora_service.address])
        assert lora_service.control.weight_version() == str(version)
        assert log_prob_error(lora_service, model) < 1e-4
        assert log_prob_error(lora_service, base) > 0.01
        assert log_prob_error(lora_service, base, adapter=False) < 1e-4, "the base is as it was"
        full = sum(tensor.nbytes for tensor in base.state_dict().values())
        assert figures["bytes"] == sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
        assert figures["bytes"] < full / 4
        print(f"adapters: {figures}, all weights: {full}")
        # SGLang counts this one among the adapter's requests, refuses it, and never takes it off the count.
        refused = generate(lora_service, [5] * 600)
        assert refused.status_code == 400, refused.text


def test_an_adapter_that_binds_no_module_is_found(
    lora_service: Service, tiny_model_dir: Path, publisher: AdapterPublisher
) -> None:
    """SGLang takes any names, and looks for modules when a request comes."""
    buckets, model = adapted(tiny_model_dir, LINEAR)
    odd = [[(name.replace("_proj", "_odd"), tensor) for name, tensor in bucket] for bucket in buckets]
    with pytest.raises(EngineError, match=r"rank 0 loaded the \d+ tensors .* and its modules took nothing of it$"):
        publisher.publish(1, odd, [lora_service.address])
    some = [[(name.replace("o_proj", "o_odd"), tensor) for name, tensor in bucket] for bucket in buckets]
    with pytest.raises(EngineError, match=r"and its modules took \d+ bytes of it$"):
        publisher.publish(1, some, [lora_service.address])
    publisher.publish(1, buckets, [lora_service.address])
    assert log_prob_error(lora_service, model) < 1e-4


@pytest.mark.full
def test_the_engine_finds_a_changed_byte(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = start(tiny_model_dir, tmp_path)
    try:
        args = Namespace(**vars(service.args) | {"check_weight_update_equal": True})
        publisher = make_publisher(args, 0)
        buckets, _ = adapted(tiny_model_dir, LINEAR)
        monkeypatch.setattr("slime.weights.adapter.digest", lambda tensor: "0" * 64)
        with pytest.raises(EngineError, match="weight update to version 1"):
            publisher.publish(1, buckets, [service.address])
        deadline = time.monotonic() + 60
        while service.engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        with pytest.raises(EngineError, match="adapter sync MISMATCH"):
            service.engine.check()
    finally:
        service.engine.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        *(("qwen2", LINEAR), ("llama", LINEAR), ("glm4", (*ATTENTION, "gate_up_proj", "down_proj"))),
        *(("qwen3_moe", ATTENTION), ("qwen3_moe", ("q_proj", "o_proj")), ("glm4_moe", ATTENTION)),
        *(("deepseek_v3", LATENT), ("whole_queries", ("o_proj",))),
    ],
)
def test_other_families(kind: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    write_model(kind, tmp_path / kind)
    service = start(tmp_path / kind, tmp_path, modules)
    try:
        publisher = make_publisher(service.args, 0)
        buckets, model = adapted(tmp_path / kind, modules)
        publisher.publish(1, buckets, [service.address])
        assert log_prob_error(service, model) < 1e-4
        assert log_prob_error(service, model, adapter=False) > 0.01
    finally:
        service.engine.stop()
