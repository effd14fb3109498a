"""What a push and a step ask of engines and ranks, counted for up to 64 and 128 of them: it grows by the engine and by
the rank, and by nothing more."""

from __future__ import annotations

import itertools
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.probe import Probe
from slime.driver.pushes import Pushes
from slime.fleet import actors as fleet_actors
from slime.fleet.engines import Engines
from slime.fleet.membership import Member, Membership
from slime.fleet.placement import Placement, Slot
from slime.fleet.routers import Routers
from slime.fleet.spec import Fleet
from slime.fleet.train_group import TrainGroup
from slime.ray.supervision import Deadline, Supervisor
from slime.rollout.engine.loop import background_loop
from slime.rollout.runtime import RolloutRuntime
from slime.utils.device import Memory
from slime.weights import agreement, distributed
from slime.weights.agreement import Agreement
from slime.weights.distributed import DistributedPublisher
from slime.weights.engines import EngineAddress
from slime.weights.tensor import TensorPublisher
from tests.fake_control import Dying, FakeAddress, addresses_of
from tests.small_fleet import ACTOR, entry

NUM_GPUS = 0
_ENGINES, _RANKS = (8, 16, 32, 64), (16, 32, 64, 128)
_LIMIT = Deadline(60.0)


def assert_linear(sizes: tuple[int, ...], counts: list[int]) -> None:
    """Each further one costs no more than those before it."""
    each = np.diff(counts) / np.diff(sizes)
    assert all(later <= earlier for earlier, later in itertools.pairwise(each)), dict(zip(sizes, counts, strict=True))


class Ref:
    """An answer, which comes when somebody waits for it; that of a watch never does."""

    def __init__(self, value: Any, *, comes: bool = True) -> None:
        self.value, self.comes, self.is_there = value, comes, False


class Actor:
    """Answers each method at once with what was set for it; its watch never ends."""

    def __init__(self, **answers: Any) -> None:
        self.calls, self._answers = list[str](), answers

    def __getattr__(self, name: str) -> Any:
        def remote(*values: Any) -> Ref:
            if name != "watch":
                self.calls.append(name)
            return Ref(self._answers.get(name), comes=name != "watch")

        return Namespace(remote=remote, options=lambda **_: Namespace(remote=remote))


class Cluster:
    """A colocated run of real parts, but for the actors, and for Ray, which hands one answer after the other."""

    def __init__(self, engines: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looked_at = 0
        """References that Ray was handed to wait for, again and again."""
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", lambda ref, timeout: ref.value)
        self.supervisor = Supervisor()
        limits = dict.fromkeys(("rollout_health_check_timeout", "engine_start_timeout", "weight_update_timeout"), 60.0)
        options = {"use_fault_tolerance": True, "engine_restart_limit": 3, "min_engines": 1, "run_dir": "run"}
        options |= {"mismatch_threshold": 1.0, "stop_on_mismatch": True}
        args = Namespace(**options, **limits, offload_rollout=True, use_rollout_routing_replay=False)
        self.engines, self.of_engines = Engines(args, self.supervisor), list[Actor]()
        slots = [Slot(number, "here", None) for number in range(ranks)]
        width = ranks // engines
        kind = entry(count=engines, width=width)
        monkeypatch.setattr(fleet_actors, "as_actor", lambda cls, **threads: self)
        self.engines.create(Fleet(ranks, (kind,)), Placement(slots, slots, [slots[: engines * width]]))
        self.engines.started([f"http://e{number}" for number in range(engines)])
        self.manager = Actor()
        self.engines.serve(self.manager, None)
        self.trainers = TrainGroup(args, self.supervisor)
        answers = {"publish": {"bytes": 1.0}, "score": [-1.0], "wake": Memory(), "train": [{"loss": 1.0}]}
        self.trainers.actors = [Actor(**answers) for _ in range(ranks)]
        self.trainers._dp_ranks = list(range(ranks))
        for rank, actor in enumerate(self.trainers.actors):
            self.supervisor.watch(f"trainer {rank}", actor)
        self._memory = MemoryScheduler(self.trainers, self.engines, _LIMIT, offload_train=True, offload_rollout=True)
        probe = Probe(args, self.supervisor, self.trainers, lambda: [1, 2])
        self.pushes = Pushes(self.trainers, self.engines, self._memory, _LIMIT, probe)
        self.pushes.push(0)

    def options(self, **_: Any) -> Cluster:
        return self

    def remote(self, plan: Any) -> Actor:
        self.of_engines.append(Actor(score=[-1.0]))
        return self.of_engines[-1]

    def _wait(self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        """The slowest that Ray can be: no more answers come than are waited for."""
        self.looked_at += len(refs)
        if timeout:
            for ref in [ref for ref in refs if ref.comes and not ref.is_there][:num_returns]:
                ref.is_there = True
        there = [ref for ref in refs if ref.is_there]
        return there[:num_returns], [ref for ref in refs if ref not in there]

    def step(self, version: int) -> None:
        """What `train.py` asks of engines and ranks between two rollouts."""
        self._memory.to_trainers()
        self.trainers.train(version, [None] * len(self.trainers.actors), _LIMIT)
        self.pushes.push(version)
        assert self.pushes.probed() == {"rollout/push_probe_abs_diff": 0.0}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often two of a kind were compared."""
    counts = Counter[str]()

    def counting(kind: type) -> Callable[[Any, Any], bool]:
        plain: Any = kind.__eq__

        def equal(self: Any, other: Any) -> bool:
            counts[kind.__name__] += 1
            return bool(plain(self, other))

        return equal

    for kind in (Slot, Member, EngineAddress, FakeAddress):
        monkeypatch.setattr(kind, "__eq__", counting(kind))
    return counts


def steps(sizes: list[tuple[int, int]], compared: Counter[str], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of one step of each cluster: calls of engines, of ranks and of the manager, references, comparisons."""
    found = []
    for engines, ranks in sizes:
        with monkeypatch.context() as patch:
            cluster = Cluster(engines, ranks, patch)
            actors = (cluster.of_engines, cluster.trainers.actors, [cluster.manager])
            for actor in itertools.chain(*actors):
                actor.calls.clear()
            cluster.looked_at = 0
            compared.clear()
            cluster.step(1)
            calls = [sum(len(actor.calls) for actor in some) for some in actors]
            assert [len({tuple(actor.calls) for actor in some}) for some in actors] == [1, 1, 1], "each the same"
            found.append([*calls, cluster.looked_at, sum(compared.values())])
    return found


def test_a_step_costs_by_the_engine(compared: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps([(engines, 128) for engines in _ENGINES], compared, monkeypatch)
    for counts in zip(*found, strict=True):
        assert_linear(_ENGINES, list(counts))
    of_engines, of_ranks, _, looked_at, comparisons = found[-1]
    assert (of_engines, of_ranks) == (4 * 64, 6 * 128)
    assert looked_at < 40 * (64 + 128)
    assert comparisons < 5 * 64


def test_a_step_costs_by_the_rank(compared: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps([(16, ranks) for ranks in _RANKS], compared, monkeypatch)
    for counts in zip(*found, strict=True):
        assert_linear(_RANKS, list(counts))


BUCKETS = [[(name, torch.ones(2))] for name in "abc"]


@pytest.mark.parametrize("kind", [DistributedPublisher, TensorPublisher])
def test_a_push_costs_by_the_engine(
    kind: Callable[..., Any], compared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls over HTTP of training rank 0, and threads that make them, of a push after the first one."""
    monkeypatch.setattr(distributed, "join_as_sender", lambda *_: object())
    monkeypatch.setattr(distributed.dist, "broadcast", lambda *_, **__: Namespace(wait=lambda timeout: None))
    begun = Counter[str]()
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.update(["thread"]), start(self)))
    options = {
        "check_weight_update_equal": False,
        "asynchronous": True,
        "drafts_apart": False,
        "allow_untested_versions": False,
    }
    found = []
    for engines in _ENGINES:
        publisher = kind(Namespace(weight_update_timeout=60.0, **options), 0)
        monkeypatch.setattr(publisher, "_open", lambda: None)
        controls = [Dying(f"http://e{number}") for number in range(engines)]
        addresses = addresses_of(controls)
        if kind is TensorPublisher:
            publisher._beside = addresses[0]
        publisher.publish(1, BUCKETS, addresses)
        for control in controls:
            control.calls.clear()
        begun.clear()
        compared.clear()
        publisher.publish(2, BUCKETS, list(addresses))
        found.append([sum(len(control.calls) for control in controls), begun["thread"], sum(compared.values())])
        if kind is DistributedPublisher:
            assert len({tuple(control.calls) for control in controls}) == 1
    for counts in zip(*found, strict=True):
        assert_linear(_ENGINES, list(counts))
    calls, threads, comparisons = (count / 64 for count in found[-1])
    assert calls <= 10
    assert threads <= 14
    assert comparisons <= 8


def test_ranks_agree_at_a_cost_by_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions to the store at which they meet: all together by the rank, of each but the first one the same few."""
    found, of_others = [], set[int]()
    for size in _RANKS:
        store = dist.HashStore()
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda store=store: Namespace(clone=lambda: store))
        ranks, asked = [], [Counter[str]() for _ in range(size)]
        for rank in range(size):
            monkeypatch.setattr(agreement, "_numbers", itertools.count())
            ranks.append(Agreement(rank, size))
            ranks[-1]._store = Asked(ranks[-1]._store, asked[rank])  # type: ignore[assignment]
        threads = [threading.Thread(target=_agree_thrice, args=(each,)) for each in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert ranks[0].words == {rank: f"of {rank}" for rank in range(size)}
        found.append(sum(each.total() for each in asked))
        of_others |= {each.total() for each in asked[1:]}
    assert_linear(_RANKS, found)
    assert len(of_others) == 1


def _agree_thrice(each: Agreement) -> None:
    each.begin()
    for words in ("", f"of {each._rank}", ""):
        each.settle(None, 60.0, words)


class Asked:
    """A store, of which is counted what it is asked: a question about several keys counts as many times."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *values: Any) -> Any:
            self._counts[name] += len(keys) if isinstance(keys, list) else 1
            return getattr(self._store, name)(keys, *values)

        return call


def test_routers_and_aborts_cost_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for engines in _ENGINES:
        options: dict[str, Any] = {
            "sglang_router_ip": None,
            "sglang_router_port": None,
            "run_dir": "run",
            "router_cli": [],
        }
        options |= {"request_timeout": 5.0, "sglang_server_concurrency": 8, "num_engines": engines}
        options |= {"use_rollout_routing_replay": False, "engine_start_timeout": 60.0}
        args = Namespace(**options)
        runtime = RolloutRuntime(args)
        routers = Routers(args, None, runtime)
        told, posted = list[str](), list[str]()
        router: Any = Namespace(add=told.append, wait_registered=lambda urls, timeout: None)
        routers._routers, routers._engines, routers._models = {"actor": router}, {"actor": {}}, {"actor": ACTOR}
        urls = [f"http://e{number}" for number in range(engines)]
        members = [Member(f"engine {i}", entry(), url, None, ()) for i, url in enumerate(urls)]
        routers.serve(Membership(1, tuple(members[:-1])))
        routers.serve(Membership(2, tuple(members)))

        async def post(method: str, url: str, body: Any, posted: list[str] = posted, **_: Any) -> None:
            posted.append(url)

        monkeypatch.setattr(runtime.http, "request", post)
        assert background_loop().run(runtime.abort_requests(None), timeout=60, what="a test")
        assert told == urls
        found.append([len(told), len(posted)])
    for counts in zip(*found, strict=True):
        assert_linear(_ENGINES, list(counts))
    assert found[-1] == [64, 64]
