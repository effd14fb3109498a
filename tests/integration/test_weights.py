"""Every transport brings new weights into a live engine: bytes, log-probs, version; and no failure hangs or hides."""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.engine import End, Engine
from slime.weights import EngineAddress, make_publisher
from slime.weights.hf_directory import NamedTensors
from slime.weights.publisher import WeightPublisher
from slime.weights.tensor import TensorPublisher
from tests.integration.tiny import KEYS, Service, log_probs_of, processes_of, random_weights
from tests.waiting import command_line

NUM_GPUS = 0

pytestmark = pytest.mark.integration

TRANSPORTS = ("tensor", "distributed", "disk")
_versions = iter(range(1, 1000))


def buckets_of(model: torch.nn.Module, size: int = 40_000) -> Iterator[NamedTensors]:
    """The model's tensors in buckets of at most ``size`` bytes or one tensor."""
    bucket: NamedTensors = []
    used = 0
    for name, tensor in model.state_dict().items():
        if bucket and used + tensor.nbytes > size:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    yield bucket


def engine_log_prob_error(service: Service, model: torch.nn.Module) -> float:
    """Largest difference between the engine's log-probs and the model's, on fresh random prompts."""
    return float(engine_log_prob_errors(service, model).max())


def engine_log_prob_errors(service: Service, model: torch.nn.Module) -> torch.Tensor:
    """float32 [48]: the difference of each token."""
    errors = []
    for length in (4, 17, 40):
        prompt = [random.randrange(2, model.config.vocab_size) for _ in range(length)]
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": random.randrange(1 << 30)},
        }
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        reply = requests.post(f"{service.engine.url}/generate", json=body, headers=headers, timeout=60).json()
        engine = torch.tensor([triple[0] for triple in reply["meta_info"]["output_token_logprobs"]])
        errors.append((engine - log_probs_of(model, prompt, reply["output_ids"])).abs())
    return torch.cat(errors)


def publisher_of(args: argparse.Namespace, *engines: EngineAddress) -> WeightPublisher:
    """Rank 0's, which is alone."""
    publisher = make_publisher(args, 0, list(engines))
    slots = sum(engine.num_gpus for engine in engines)
    if isinstance(publisher, TensorPublisher) and slots > 1:
        stage, publisher._slots = publisher._stage, 1
        # Without GPUs any server can read rank 0's buffer: it stands in for a rank beside each engine's.
        publisher._stage = lambda bucket: stage(bucket) * slots  # type: ignore[method-assign]
    return publisher


@pytest.fixture
def publish(service: Service) -> Iterator[Any]:
    """Make, connect and publish; every publisher is closed afterwards."""
    made: list[WeightPublisher] = []

    def make(transport: str, *others: EngineAddress, **changes: Any) -> WeightPublisher:
        args = argparse.Namespace(**(vars(service.args) | {"update_weight_transport": transport} | changes))
        publisher = publisher_of(args, service.address, *others)
        made.append(publisher)
        publisher.connect()
        return publisher

    yield make
    for publisher in made:
        publisher.close()
    service.control.continue_()  # a push that failed leaves it paused


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_computes_with_the_new_weights(
    service: Service, tiny_model_dir: Path, publish: Any, transport: str
) -> None:
    publisher = publish(transport)
    for _ in range(2):
        model = random_weights(tiny_model_dir, random.randrange(1 << 30))
        assert engine_log_prob_error(service, model) > 0.01
        version = next(_versions)
        figures = publisher.publish(version, buckets_of(model))
        assert service.control.weight_version() == str(version)
        assert engine_log_prob_error(service, model) < 1e-4
        assert figures["bytes"] == sum(t.nbytes for t in model.state_dict().values())
        assert 0 < figures["paused_seconds"] < 30
        print(f"{transport}: {figures}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equality_check_passes_and_finds_one_corrupted_element(
    service: Service, tiny_model_dir: Path, publish: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish(transport, check_weight_update_equal=True)
    model = random_weights(tiny_model_dir, random.randrange(1 << 30))
    publisher.publish(next(_versions), buckets_of(model))
    assert engine_log_prob_error(service, model) < 1e-4

    victim = "model.layers.1.mlp.up_proj.weight"
    stage, deliver = publisher._stage, publisher._deliver

    def corrupt(bucket: NamedTensors) -> NamedTensors:
        broken = [(name, tensor.clone()) for name, tensor in bucket]
        for name, tensor in broken:
            if name == victim:
                tensor[3, 5] += tensor[3, 5] * 2**-20
        return broken

    monkeypatch.setattr(publisher, "_stage", lambda bucket: stage(corrupt(bucket)))
    monkeypatch.setattr(publisher, "_deliver", lambda bucket, staged: deliver(corrupt(bucket), staged))
    version = next(_versions)
    with pytest.raises(EngineError, match=rf"version {version} .*differ.*rank 0: model.layers.1.mlp.gate_up_proj"):
        publisher.publish(version, buckets_of(random_weights(tiny_model_dir, random.randrange(1 << 30))))
    assert service.control.weight_version() != str(version)
    weights = Path(service.args.run_dir, "weights")
    assert not weights.exists() or not list(weights.glob("check_v*"))


def test_equality_check_misses_no_tensor(service: Service, tiny_model_dir: Path, publish: Any) -> None:
    publisher = publish("tensor", check_weight_update_equal=True)
    model = random_weights(tiny_model_dir, 5)
    without = [[named for named in bucket if named[0] != "model.norm.weight"] for bucket in buckets_of(model)]
    with pytest.raises(EngineError, match=r"were not pushed: model\.norm\.weight"):
        publisher.publish(next(_versions), without)


def test_disk_versions_are_complete_models_and_old_ones_go(
    service: Service, tiny_model_dir: Path, publish: Any, tmp_path: Path
) -> None:
    publisher = publish("disk", update_weight_disk_dir=str(tmp_path))
    for _ in range(2):
        model = random_weights(tiny_model_dir, random.randrange(1 << 30))
        version = next(_versions)
        publisher.publish(version, buckets_of(model))
        (directory,) = tmp_path.glob("*/*")
        assert directory.name == f"weight_v{version:06d}"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    keeper = publish("disk", update_weight_disk_dir=str(tmp_path), update_weight_disk_keep_files=True)
    keeper.publish(next(_versions), buckets_of(model))
    assert len(list(tmp_path.glob("*/*"))) == 2


# Only this transport: 0.5.17 does not catch what goes wrong while it loads tensors from the other two, and ends.
@pytest.mark.parametrize("joins", [True, False], ids=["after the broadcast", "without joining the broadcast"])
def test_a_refusal_is_an_error_at_once_and_the_engine_goes_on(
    service: Service, tiny_model_dir: Path, publish: Any, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish("distributed")
    model = random_weights(tiny_model_dir, random.randrange(1 << 30))
    buckets = [[("model.norm.weight", torch.zeros(7 if joins else 64))], *buckets_of(model)]
    if not joins:
        (control,) = publisher.controls
        update = control.update_weights_from_distributed
        monkeypatch.setattr(
            control,
            "update_weights_from_distributed",
            lambda dtypes, **rest: update(dtypes=["no_such_type"] * len(dtypes), **rest),
        )
    drained: list[int] = []

    def counted() -> Iterator[NamedTensors]:
        for index, bucket in enumerate(buckets):
            drained.append(index)
            yield bucket

    version = next(_versions)
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"weight update to version {version} .*push: engine {service.engine.url}"):
        publisher.publish(version, counted())
    assert time.monotonic() - started < publisher.timeout - 10
    assert len(drained) == len(buckets), "other ranks wait in the collectives of every bucket"
    publisher = publish("distributed")
    publisher.publish(next(_versions), buckets_of(model))
    assert engine_log_prob_error(service, model) < 1e-4


def test_versions_grow(service: Service, tiny_model_dir: Path, publish: Any) -> None:
    publisher = publish("tensor")
    model = random_weights(tiny_model_dir, 2)
    version = next(_versions)
    publisher.publish(version, buckets_of(model))
    with pytest.raises(ValueError, match=f"weight version {version} does not grow"):
        publisher.publish(version, buckets_of(model))


def connect_and_publish(publisher: WeightPublisher) -> None:
    """Which of the two is the first to need the engine differs by transport."""
    publisher.connect()
    publisher.publish(1, [[("model.norm.weight", torch.ones(64))]])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_engine_is_an_error_at_once(service: Service, transport: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        args = argparse.Namespace(**(vars(service.args) | {"update_weight_transport": transport}))
        publisher = make_publisher(args, 0, [EngineAddress(url, 1)])
        started = time.monotonic()
        with pytest.raises(EngineError, match=url):
            connect_and_publish(publisher)
        assert time.monotonic() - started < args.weight_update_timeout - 10
        publisher.close()


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_push_in_which_an_engine_dies_is_made_again_without_it(
    service: Service, tiny_model_dir: Path, tmp_path: Path, publish: Any, transport: str
) -> None:
    other = Engine(service.args, 1, "127.0.0.1", KEYS, tmp_path / "engine_1.log", None)
    try:
        other.start()
        publisher = publish(transport, EngineAddress(other.url, 1, *KEYS))
        before, model = (random_weights(tiny_model_dir, random.randrange(1 << 30)) for _ in range(2))
        publisher.publish(first := next(_versions), buckets_of(before))
        assert engine_log_prob_error(service, before) < 1e-4
        assert other.control(10).weight_version() == str(first)

        def deadly() -> Iterator[NamedTensors]:
            for index, bucket in enumerate(buckets_of(model)):
                if index == 2:
                    assert other._process is not None
                    children = psutil.Process(other._process.pid).children()
                    (server,) = (child for child in children if "supervisor" not in command_line(child))
                    server.kill()
                yield bucket

        version = next(_versions)
        with pytest.raises(EngineError, match=rf"weight update to version {version} .*{re.escape(other.url)}"):
            publisher.publish(version, deadly())
        assert service.control.weight_version() == str(first)
        half = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        with pytest.raises(requests.ReadTimeout):
            requests.post(f"{service.engine.url}/generate", json=half, headers=headers, timeout=3)
        started = time.monotonic()
        publisher.publish(version, buckets_of(model), gone=[other.url])
        print(f"{transport}: the second push took {time.monotonic() - started:.1f} s")
        assert service.control.weight_version() == str(version)
        assert engine_log_prob_error(service, model) < 1e-4
        publisher.publish(next(_versions), buckets_of(before), gone=[other.url])
        assert engine_log_prob_error(service, before) < 1e-4
    finally:
        other.stop()


class SecondNode:
    """The server of an engine's second node, which is this host too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self, meeting: str) -> None:
        self.engine.join(meeting)

    def ends(self) -> list[End]:
        return [end for end in [self.engine.end()] if end]

    def stop(self) -> None:
        self.engine.stop()


@pytest.mark.full
def test_every_transport_reaches_the_ranks_on_all_nodes_of_an_engine(
    service: Service, tiny_model_dir: Path, tmp_path: Path
) -> None:
    more = {"rollout_num_gpus_per_engine": 2, "check_weight_update_equal": True, "run_dir": tmp_path}
    args = argparse.Namespace(**(vars(service.args) | more))
    second = SecondNode(Engine(args, 0, "127.0.0.1", KEYS, tmp_path / "node_1.log", None, node=1, num_nodes=2))
    engine = Engine(args, 0, "127.0.0.1", KEYS, tmp_path / "node_0.log", None, num_nodes=2, others=second)
    try:
        engine.start()
        address = EngineAddress(engine.url, 2, *KEYS)
        spanning = Service(args, engine, service.router, address, engine.control(timeout=60))
        assert len(spanning.control.weight_checksums()) == 2
        for transport in TRANSPORTS:
            publisher = publisher_of(
                argparse.Namespace(**(vars(args) | {"update_weight_transport": transport})), address
            )
            publisher.connect()
            model = random_weights(tiny_model_dir, random.randrange(1 << 30))
            publisher.publish(next(_versions), buckets_of(model))
            publisher.close()
            assert engine_log_prob_error(spanning, model) < 1e-4
        # What sleep and wake do besides, on GPUs: the first node's server passes them on as well.
        spanning.control.release_memory()
        spanning.control.resume_memory(["weights", "kv_cache", "cuda_graph"])
        assert second.engine._process is not None
        processes = psutil.Process(second.engine._process.pid).children(recursive=True)
        (scheduler,) = (process for process in processes if "scheduler" in command_line(process))
        scheduler.kill()
        deadline = time.monotonic() + 30
        while (end := engine.end()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert end is not None
        for node in (engine, second.engine):
            assert f"{node._name} at {node.url} ended with status 137 (signal 9)" in end.message
        assert f"a scheduler has ended (process {scheduler.pid})" in end.message
    finally:
        engine.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_hangs_is_an_error_at_the_deadline(service: Service, publish: Any, transport: str) -> None:
    publisher = publish(transport)
    publisher.timeout = 3.0
    scheduler = next(p for p in processes_of(service) if "scheduler" in command_line(p))
    os.kill(scheduler.pid, signal.SIGSTOP)
    goes_on = threading.Timer(100.0, os.kill, (scheduler.pid, signal.SIGCONT))
    goes_on.start()
    try:
        with pytest.raises(EngineError, match=rf"no answer within \d s .* from {service.engine.url}"):
            publisher.publish(next(_versions), [[("model.norm.weight", torch.ones(64))]])
        assert goes_on.is_alive(), "the deadline ends it, not the engine"
    finally:
        goes_on.cancel()
        os.kill(scheduler.pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while True:
        service.control.continue_()
        try:
            service.control.flush_cache()
            break
        except EngineError:
            assert time.monotonic() < deadline
