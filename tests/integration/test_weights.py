"""Every transport brings new weights into a live engine: bytes, log-probs, version; and no failure hangs or hides."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.engine import Engine, ExitInfo
from slime.files.hf_writer import NamedTensors
from slime.weights import EngineAddress, agreement, make_publisher
from slime.weights.publisher import WeightPublisher
from tests.fake_control import FakeAddress
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


class Pushes:
    """A publisher of rank 0, which is alone, and the engines that it pushes to unless it is told otherwise."""

    def __init__(self, args: argparse.Namespace, *engines: EngineAddress) -> None:
        self.publisher = make_publisher(args, 0)
        self.engines = engines

    def publish(
        self, version: int, buckets: Iterable[NamedTensors], engines: Sequence[EngineAddress] = ()
    ) -> dict[str, float]:
        return self.publisher.publish(version, buckets, engines or self.engines)


@pytest.fixture
def publish(service: Service) -> Iterator[Any]:
    """Make what pushes to the service; every publisher is closed afterwards."""
    made: list[Pushes] = []

    def make(transport: str, **changes: Any) -> Pushes:
        args = argparse.Namespace(**(vars(service.args) | {"update_weight_transport": transport} | changes))
        made.append(Pushes(args, service.address))
        return made[-1]

    yield make
    for pushes in made:
        pushes.publisher.close()
    service.control.continue_()  # a push that failed leaves it paused


class TwoRanks:
    """Two training ranks, of which this process is the first, push the tiny model of a seed."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args, self._directory = args, directory
        self._publishers: dict[str, WeightPublisher] = {}
        agreement._numbers = itertools.count()  # as in the second rank, which is a new process each time
        context = torch.multiprocessing.get_context("spawn")
        self._told = context.SimpleQueue()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._second = context.Process(target=_second_rank, args=(store.port, args, directory, self._told), daemon=True)
        self._second.start()
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)

    def publish(
        self,
        transport: str,
        version: int,
        seed: int,
        engines: Sequence[EngineAddress],
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Push; ``before`` is called with the number of each bucket of this rank's."""
        self._told.put((transport, version, seed, engines))
        _publish(self._publishers, self._args, 0, self._directory, (transport, version, seed, engines), before)

    def close(self) -> None:
        self._told.put(None)
        for publisher in self._publishers.values():
            publisher.close()
        dist.destroy_process_group()
        self._second.join(60)
        self._second.kill()


def _publish(
    publishers: dict[str, WeightPublisher],
    args: argparse.Namespace,
    rank: int,
    directory: Path,
    what: tuple[str, int, int, Sequence[EngineAddress]],
    before: Callable[[int], None],
) -> None:
    transport, version, seed, engines = what
    if transport not in publishers:
        args = argparse.Namespace(**(vars(args) | {"update_weight_transport": transport}))
        publishers[transport] = make_publisher(args, rank)

    def buckets() -> Iterator[NamedTensors]:
        for number, bucket in enumerate(buckets_of(random_weights(directory, seed))):
            before(number)
            yield bucket

    publishers[transport].publish(version, buckets(), engines)


def _second_rank(port: int, args: argparse.Namespace, directory: Path, told: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    publishers: dict[str, WeightPublisher] = {}
    while (what := told.get()) is not None:
        with contextlib.suppress(EngineError):
            _publish(publishers, args, 1, directory, what, lambda number: None)
    for publisher in publishers.values():
        publisher.close()
    dist.destroy_process_group()


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
    within = publisher.publisher
    stage, deliver = within._stage, within._deliver

    def corrupt(bucket: NamedTensors) -> NamedTensors:
        broken = [(name, tensor.clone()) for name, tensor in bucket]
        for name, tensor in broken:
            if name == victim:
                tensor[3, 5] += tensor[3, 5] * 2**-20
        return broken

    monkeypatch.setattr(within, "_stage", lambda bucket: stage(corrupt(bucket)))
    monkeypatch.setattr(within, "_deliver", lambda bucket, staged: deliver(corrupt(bucket), staged))
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
    engines: list[EngineAddress] = []
    if not joins:
        control = service.address.control(timeout=60)
        engines.append(FakeAddress(control.url, 1, engine=control))
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
        publisher.publish(version, counted(), engines)
    assert time.monotonic() - started < service.args.weight_update_timeout - 10
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_engine_is_an_error_at_once(service: Service, transport: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        args = argparse.Namespace(**(vars(service.args) | {"update_weight_transport": transport}))
        publisher = make_publisher(args, 0)
        started = time.monotonic()
        with pytest.raises(EngineError, match=url):
            publisher.publish(1, [[("model.norm.weight", torch.ones(64))]], [EngineAddress(url, 1)])
        assert time.monotonic() - started < args.weight_update_timeout - 10
        publisher.close()


def kill_server(engine: Engine) -> None:
    assert engine._process is not None
    children = psutil.Process(engine._process.pid).children()
    (server,) = (child for child in children if "supervisor" not in command_line(child))
    server.kill()


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_joins_and_a_push_in_which_it_dies_is_made_again_without_it(
    service: Service, tiny_model_dir: Path, tmp_path: Path, transport: str
) -> None:
    other = Engine(service.args, 1, "127.0.0.1", KEYS, tmp_path / "engine_1.log", None)
    ranks = TwoRanks(service.args, tiny_model_dir)
    try:
        seeds = [random.randrange(1 << 30) for _ in range(3)]
        models = [random_weights(tiny_model_dir, seed) for seed in seeds]
        alone = [service.address]
        ranks.publish(transport, next(_versions), seeds[0], alone)
        assert engine_log_prob_error(service, models[0]) < 1e-4
        other.start()
        address = EngineAddress(other.url, 1, *KEYS, first_slot=1)
        ranks.publish(transport, first := next(_versions), seeds[1], [*alone, address])
        joined = Service(service.args, other, service.router, address, other.control(timeout=60))
        for each in (service, joined):
            assert each.control.weight_version() == str(first)
            assert engine_log_prob_error(each, models[1]) < 1e-4
        version = next(_versions)
        with pytest.raises(EngineError, match=rf"weight update to version {version} .*{re.escape(other.url)}"):
            ranks.publish(
                transport, version, seeds[2], [*alone, address], lambda number: number == 2 and kill_server(other)
            )
        assert service.control.weight_version() == str(first)
        half = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        with pytest.raises(requests.ReadTimeout):
            requests.post(f"{service.engine.url}/generate", json=half, headers=headers, timeout=3)
        started = time.monotonic()
        ranks.publish(transport, version, seeds[2], alone)
        print(f"{transport}: the second push took {time.monotonic() - started:.1f} s")
        assert service.control.weight_version() == str(version)
        assert engine_log_prob_error(service, models[2]) < 1e-4
        ranks.publish(transport, next(_versions), seeds[0], alone)
        assert engine_log_prob_error(service, models[0]) < 1e-4
    finally:
        ranks.close()
        other.stop()
        service.control.continue_()


class SecondNode:
    """The server of an engine's second node, which is this host too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self, meeting: str) -> None:
        self.engine.join(meeting)

    def ends(self) -> list[ExitInfo]:
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
    ranks = TwoRanks(args, tiny_model_dir)
    try:
        engine.start()
        address = EngineAddress(engine.url, 2, *KEYS)
        spanning = Service(args, engine, service.router, address, engine.control(timeout=60))
        assert len(spanning.control.weight_checksums()) == 2
        for transport in TRANSPORTS:
            ranks.publish(transport, next(_versions), seed := random.randrange(1 << 30), [address])
            assert engine_log_prob_error(spanning, random_weights(tiny_model_dir, seed)) < 1e-4
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
        ranks.close()
        engine.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_hangs_is_an_error_at_the_deadline(service: Service, publish: Any, transport: str) -> None:
    publisher = publish(transport)
    publisher.publish(next(_versions), [[("model.norm.weight", torch.ones(64))]])
    publisher.publisher.timeout = 3.0
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_push_is_proved(
    service: Service, tiny_model_dir: Path, publish: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names and bytes of all tensors, and values of those that the engine has as they are: others are fused, and of
    257 words the vocabulary is padded."""
    publisher = publish(transport)
    model = random_weights(tiny_model_dir, random.randrange(1 << 30))
    for _ in range(2):
        publisher.publish(next(_versions), buckets_of(model))
    proof = publisher.publisher._proof
    assert set(proof._samples) == {
        "model.norm.weight",
        *(
            f"model.layers.{layer}.{name}.weight"
            for layer in range(2)
            for name in ("input_layernorm", "post_attention_layernorm", "mlp.down_proj", "self_attn.o_proj")
        ),
        *(f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in ("q_norm", "k_norm")),
    }
    deliver = publisher.publisher._deliver
    within = publisher.publisher

    def push(change: Callable[[NamedTensors], NamedTensors]) -> None:
        """With engines given something else than the proof notes."""
        monkeypatch.setattr(within, "_stage", lambda bucket: type(within)._stage(within, change(bucket)))
        monkeypatch.setattr(within, "_deliver", lambda bucket, staged: deliver(change(bucket), staged))
        publisher.publish(next(_versions), buckets_of(model))

    engine = rf"{type(within).__name__}\): engine {service.engine.url} rank 0 "
    with pytest.raises(EngineError, match=engine + r"loaded 24 tensors of \d+ bytes in the place of the 25 tensors of"):
        push(lambda bucket: [named for named in bucket if named[0] != "model.norm.weight"])
    with pytest.raises(EngineError, match=engine + "loaded others in the place of the 25 tensors of"):
        push(lambda bucket: [(name.replace("model.norm.weight", "model.none.weight"), each) for name, each in bucket])
    with pytest.raises(EngineError, match=engine + "holds other values than it was sent of model.norm.weight$"):
        push(lambda bucket: [(name, each + (name == "model.norm.weight")) for name, each in bucket])
    with pytest.MonkeyPatch.context() as silent:
        silent.setattr(within, "_complete" if transport == "disk" else "_deliver", lambda *_: None)
        with pytest.raises(EngineError, match=engine + "loaded nothing in the place of the 25 tensors of"):
            publisher.publish(next(_versions), buckets_of(model))
    push(lambda bucket: bucket)
    assert engine_log_prob_error(service, model) < 1e-4
