"""Adapters alone to engines: what goes together with it, what engines are started with and sent, in which order."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang.client import ADAPTER, EngineError, GenerateClient
from slime.backends.sglang.cpu import stand_ins
from slime.backends.sglang.engine import Engine
from slime.entry.arguments import parse_args
from slime.files.hf_writer import NamedTensors
from slime.fleet.spec import fleet_of
from slime.models.adapters import completed
from slime.models.families import QWEN2
from slime.utils.http_client import Http
from slime.weights import EngineAddress, make_publisher
from slime.weights.adapter import AdapterPublisher
from tests.command_line import LATENT, QWEN3, Fails, Flags, Parse, command, refused, write_checkpoint, write_model
from tests.fake_control import addresses_of, read_payload
from tests.unit.test_input_errors import MOE

NUM_GPUS = 0

ADAPTER_SYNC = "--lora-rank 8 --lora-sync adapter"


@pytest.fixture
def directory(launch_directory: Path) -> Path:
    write_model(launch_directory / "other")
    write_model(launch_directory / "moe", MOE)
    write_checkpoint(launch_directory / "converted", "release", {})
    (launch_directory / "own_requests.py").write_text(
        "async def generate(args, sample, sampling_params): return sample\n"
    )
    dataset = {"name": "d", "path": "data.jsonl", "custom_generate_function_path": "own_requests.py"}
    (launch_directory / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [dataset]}}))
    return launch_directory


def test_merged_is_the_default(directory: Path, parse: Parse) -> None:
    assert parse("--lora-rank 8").lora_sync == "merged"
    args = parse(f"{ADAPTER_SYNC} --lora-target-modules q_proj mlp.down_proj --ref-load model")
    assert (args.lora_sync, args.lora_modules) == ("adapter", ["q_proj", "down_proj"])
    assert parse(ADAPTER_SYNC).lora_modules[-1] == "down_proj"
    parse(f"{ADAPTER_SYNC} --hf-checkpoint moe --lora-target-modules q_proj o_proj")
    parse(f"{ADAPTER_SYNC} --sglang-load-format safetensors --sglang-lora-backend triton")
    parse(f"{ADAPTER_SYNC} --rollout-function-path slime.rollout.sglang_rollout.generate_rollout")


@refused(
    """
--debug-rollout-only -> --debug-rollout-only cannot be used with --lora-sync adapter: there is no trainer
--ref-load other -> other cannot be used with --lora-sync adapter: adapters would be added to engines' own
--random-weights -> --random-weights cannot be used with --lora-sync adapter: engines have other random
--update-weight-transport disk -> --update-weight-transport disk cannot be used with --lora-sync adapter
--update-weight-disk-dir d -> --update-weight-disk-dir d cannot be used with --lora-sync adapter
--update-weight-disk-keep-files -> --update-weight-disk-keep-files cannot be used with --lora-sync adapter
--custom-generate-function-path own_requests.py -> own_requests.py:generate cannot be used with --lora-sync adapter
--eval-config eval.yaml --eval-interval 1 -> own_requests.py:generate cannot be used with --lora-sync adapter
--sglang-speculative-algorithm EAGLE -> --sglang-speculative-algorithm EAGLE cannot be used with
--sglang-tokenizer-worker-num 2 -> --sglang-tokenizer-worker-num 2 cannot be used with --lora-sync adapter
--sglang-load-format dummy -> --sglang-load-format dummy cannot be used with --lora-sync adapter: engines would
--sglang-custom-weight-loader x.y -> cannot be used with --lora-sync adapter: engines would add
--sglang-max-lora-rank 4 -> --sglang-max-lora-rank 4 cannot be used with --lora-sync adapter: slime sets it
--sglang-lora-paths slime=model -> --sglang-lora-paths slime=model cannot be used with --lora-sync adapter
--hf-checkpoint moe -> all-linear cannot be used with --lora-sync adapter: of a model with experts
--load converted -> --load {directory}/converted cannot be used with --lora-sync adapter
--ref-load converted -> --ref-load {directory}/converted cannot be used with --lora-sync adapter
--hf-checkpoint float8 --bf16 -> the float8 of --hf-checkpoint
"""
)
def test_what_cannot_be(directory: Path, fails: Fails, flags: Flags, message: str) -> None:
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write_model(directory / "float8", {**QWEN3, "quantization_config": blocks})
    error = fails(f"{ADAPTER_SYNC} {flags[0]}")
    assert message.replace("{directory}", str(directory)) in error
    assert "use --lora-sync merged" in error


def test_without_adapters_there_are_none_to_push(directory: Path, fails: Fails) -> None:
    for sync in ("adapter", "auto"):
        assert f"--lora-sync {sync} needs --lora-rank" in fails(f"--lora-sync {sync}")


@pytest.mark.parametrize("flags", ["--sglang-enable-lora", "--sglang-lora-paths a=model"])
def test_engines_with_other_adapters_cannot_take_weights(
    directory: Path, flags: str, fails: Fails, parse: Parse
) -> None:
    error = fails(f"--lora-rank 8 {flags}")
    assert f"{flags}: SGLang does not find weights that are pushed to layers with adapters" in error
    parse(f"{flags} --debug-rollout-only")


@pytest.mark.parametrize(
    ("model", "modules", "told"),
    [
        ("latent", "q_a_proj kv_a_proj_with_mqa q_b_proj o_proj", None),
        ("latent", "o_proj", None),
        ("latent", "q_b_proj kv_b_proj", "kv_b_proj"),
        ("latent", "q_a_proj q_b_proj", "q_a_proj or kv_a_proj_with_mqa alone"),
        ("latent", "self_attn.kv_a_proj_with_mqa", "q_a_proj or kv_a_proj_with_mqa alone"),
        ("latent", "all-linear", "all-linear"),
        ("whole_queries", "o_proj", None),
        ("whole_queries", "q_proj o_proj", "q_proj"),
        ("whole_queries", "kv_a_proj_with_mqa", "kv_a_proj_with_mqa"),
    ],
)
def test_engines_have_some_layers_of_latent_attention(
    directory: Path, model: str, modules: str, told: str | None, fails: Fails, parse: Parse
) -> None:
    write_model(directory / "latent", LATENT)
    write_model(directory / "whole_queries", LATENT | {"q_lora_rank": None})
    words = f"{ADAPTER_SYNC} --hf-checkpoint {model} --lora-target-modules {modules}"
    if told is None:
        assert parse(words).lora_modules == modules.split()
    else:
        error = fails(words)
        assert f"--lora-target-modules {told} cannot be used with --lora-sync adapter: " in error
        assert "use --lora-sync merged" in error


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--hf-checkpoint moe --lora-target-modules q_proj o_proj", None),
        ("", None),
        (
            "--hf-checkpoint moe",
            "--lora-target-modules all-linear cannot be used with --lora-sync adapter: of a",
        ),
        ("--update-weight-transport disk", "--update-weight-transport disk cannot be used with --lora-sync adapter"),
    ],
)
def test_auto_gives_engines_adapters_where_they_can_have_them(
    directory: Path, capsys: pytest.CaptureFixture[str], flags: str, reason: str | None, parse: Parse
) -> None:
    args = parse(f"--lora-rank 8 --lora-sync auto {flags}")
    warned = capsys.readouterr().err
    assert args.lora_sync == ("adapter" if reason is None else "merged")
    assert (reason is None) == ("--lora-sync auto pushes merged weights" not in warned)
    assert reason is None or reason in warned


def engine_flags(directory: Path, cuda_devices: list[str] | None, **changes: Any) -> list[str]:
    args = parse_args(
        command(f"{ADAPTER_SYNC} --lora-target-modules q_proj v_proj --rm-model-path other --rm-num-gpus 1")
    )
    spec = fleet_of(args).engines[changes.pop("reward", False)]
    args = Namespace(**vars(spec.options(args)) | changes)
    return Engine(args, 0, "127.0.0.1", None, directory / "log", cuda_devices)._command(1, 2)


def test_engines_are_started_for_the_adapters(directory: Path) -> None:
    words = " ".join(engine_flags(directory, None))
    expected = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --max-loras-per-batch 2"
    assert f"{expected} --lora-backend torch_native" in words
    words = " ".join(engine_flags(directory, ["0"], offload_rollout=True))
    assert f"{expected} --enable-weights-cpu-backup" in words, "who sleeps must not forget what nobody pushes again"
    assert "--enable-weights-cpu-backup" not in engine_flags(directory, ["0"], offload_rollout=False)
    assert "--enable-lora" not in engine_flags(directory, None, reward=True)


@pytest.mark.parametrize("adapter", [True, False])
def test_every_request_names_the_adapter(adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    async def send(http: Http, method: str, url: str, payload: dict[str, Any], **_: Any) -> dict[str, Any]:
        sent.append(payload)
        return {}

    async def request() -> None:
        client = GenerateClient(Http(), "http://r", None, 0, adapter=adapter)
        await client.generate([1], {}, rid="a")

    monkeypatch.setattr(Http, "send", send)
    asyncio.run(request())
    assert sent[0].get("lora_path") == (ADAPTER if adapter else None)


class FakeEngine:
    """An engine that notes what it is asked, and holds at most one adapter."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[str] = []
        self.adapter: dict[str, torch.Tensor] | None = None
        self.config: dict[str, Any] = {}
        self.checksums: Any = None
        self.payloads = 0
        self.refuses = False
        self.version = ""

    def has_adapter(self) -> bool:
        return self.adapter is not None

    def unload_adapter(self) -> None:
        assert self.adapter is not None
        self.calls.append("unload")
        self.adapter = None

    def load_adapter(self, config: dict[str, Any], payloads: list[str], checksums: Any) -> None:
        assert self.adapter is None
        self.calls.append("load")
        if self.refuses:
            raise EngineError("refused")
        content = read_payload(payloads[0])
        flat, self.config, self.checksums, self.payloads = content["flattened_tensor"], config, checksums, len(payloads)
        self.adapter = {
            place.name: flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
            for place in content["metadata"]
        }

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def loads(self, number: int) -> None:
        """It takes no note of what it loads."""

    def checksums_if_told(self) -> None:
        """Nor has it checksums."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


@pytest.fixture
def engines() -> list[FakeEngine]:
    return [FakeEngine("http://e0"), FakeEngine("http://e1")]


@pytest.fixture
def addresses(engines: list[FakeEngine]) -> list[EngineAddress]:
    return addresses_of(engines, [1, 2])


@pytest.fixture
def publisher(directory: Path) -> AdapterPublisher:
    args = parse_args(command(f"{ADAPTER_SYNC} --lora-target-modules q_proj v_proj"))
    publisher = make_publisher(args, 0)
    assert isinstance(publisher, AdapterPublisher)
    return publisher


def adapters() -> list[NamedTensors]:
    """As a trainer exports them: with a second matrix of zeros for the key, which is not targeted."""
    names = {"q_proj": torch.randn(6, 2), "k_proj": torch.zeros(3, 2), "v_proj": torch.randn(3, 2)}
    layer = "base_model.model.model.layers.0.self_attn."
    first = [(f"{layer}{name}.lora_A.weight", torch.randn(2, 4)) for name in ("q_proj", "v_proj")]
    return [first, [(f"{layer}{name}.lora_B.weight", tensor) for name, tensor in names.items()]]


def test_adapters_take_the_place_of_those_before(
    publisher: AdapterPublisher, engines: list[FakeEngine], addresses: list[EngineAddress]
) -> None:
    for version in (1, 2):
        buckets = adapters()
        sent = dict(named for bucket in buckets for named in bucket)
        kept = {name: tensor.clone() for name, tensor in sent.items()}

        def drained(buckets: list[NamedTensors] = buckets) -> Any:
            for bucket in buckets:
                yield bucket
                for _, tensor in bucket:
                    tensor.fill_(7.0)  # the next bucket takes its memory

        figures = publisher.publish(version, drained(), addresses)
        assert figures["bytes"] == sum(tensor.nbytes for tensor in sent.values())
        for engine in engines:
            assert engine.adapter is not None
            assert all(torch.equal(engine.adapter[name], tensor) for name, tensor in kept.items())
            (key,) = engine.adapter.keys() - kept.keys()
            assert key.endswith("k_proj.lora_A.weight")
            assert engine.adapter[key].shape == (2, 4)
    load = ["pause", "flush_cache", "begin_weight_update", "load", "end_weight_update", "continue_"]
    for engine in engines:
        assert engine.calls == [*load, *load[:3], "unload", *load[3:]]
        assert (engine.config["r"], engine.config["lora_alpha"]) == (8, 16.0)
        assert engine.config["target_modules"] == ["q_proj", "v_proj"]
        assert engine.checksums is None
    assert [engine.payloads for engine in engines] == [1, 2], "one copy for each rank of an engine"


def test_a_push_that_failed_is_made_again(
    publisher: AdapterPublisher, engines: list[FakeEngine], addresses: list[EngineAddress]
) -> None:
    publisher.publish(1, adapters(), addresses)
    engines[1].refuses = True
    with pytest.raises(EngineError, match=r"weight update to version 2 \(AdapterPublisher\): push: refused"):
        publisher.publish(2, adapters(), addresses)
    assert engines[1].calls[-1] == "load", "it stays paused"
    engines[1].refuses = False
    publisher.publish(2, adapters(), addresses)
    assert all(engine.version == "2" for engine in engines)


def test_an_engine_that_joined_gets_all_adapters(
    publisher: AdapterPublisher, engines: list[FakeEngine], addresses: list[EngineAddress]
) -> None:
    publisher.publish(1, adapters(), addresses[:1])
    publisher.publish(2, adapters(), addresses)
    assert engines[1].adapter is not None
    assert engines[0].adapter is not None
    assert engines[0].adapter.keys() == engines[1].adapter.keys()
    assert "unload" not in engines[1].calls
    publisher.publish(3, adapters(), addresses[1:])
    assert [engine.version for engine in engines] == ["2", "3"]


def test_engines_check_what_they_get(
    publisher: AdapterPublisher, engines: list[FakeEngine], addresses: list[EngineAddress]
) -> None:
    publisher.args.check_weight_update_equal = True
    publisher.publish(1, adapters(), addresses)
    for engine in engines:
        assert engine.adapter is not None
        assert engine.checksums.keys() == engine.adapter.keys()
        assert all(len(digest) == 64 for digest in engine.checksums.values())


def test_a_row_has_adapters_of_all_its_sources_or_of_none() -> None:
    buckets = adapters()
    whole = completed(dict(buckets[0] + buckets[1]), QWEN2)
    assert {name.split(".")[6] for name in whole} == {"q_proj", "k_proj", "v_proj"}
    assert completed(whole, QWEN2).keys() == whole.keys()


def test_memory_is_pinned_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in servers with adapters on hosts without GPUs."""
    if torch.cuda.is_available():
        pytest.skip("servers here compute on a GPU")
    for name in ("tensor", "zeros"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    stand_ins.pin_nothing()
    assert torch.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu").tolist() == [1, 2]
    assert torch.zeros((3,), pin_memory=True).pin_memory().tolist() == [0, 0, 0]
