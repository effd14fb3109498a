"""The control plane of a push without weights: training rank 0's own calls of engines that do nothing, over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from aiohttp import web

from slime.backends.sglang.loads.loaded import Held, Loaded, Tally
from slime.files.hf_writer import NamedTensors
from slime.ray.cluster import as_actor
from slime.ray.supervision import Deadline, Supervisor
from slime.weights.engines import EngineAddress
from slime.weights.publisher import Wait, WeightPublisher

_START_S = 300.0
"""In which all ranks have started."""
ROOT = Path(__file__).resolve().parents[2]
_BUCKETS: list[NamedTensors] = [[(f"model.layers.{i}.weight", torch.zeros(4))] for i in range(4)]


class ControlPublisher(WeightPublisher):
    """All that a push to engines apart does but the broadcast: each bucket is announced to each engine."""

    def _deliver(self, bucket: NamedTensors, staged: Any) -> Wait:
        said: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": ["float32"],
            "shapes": [[4]],
            "group_name": "none",
        }
        call = {e.url: functools.partial(self.control(e).update_weights_from_distributed, **said) for e in self.engines}
        return self.start("push", call)


@dataclass(frozen=True)
class Measured:
    """Of one push, after those that open what there is to open."""

    wall_s: float
    processor_s: float
    """Of this process, the trainer's: engines are in another."""


def measure(engines: int, ranks: int, parameters: int, pushes: int) -> Measured:
    """The median of some pushes to so many engines, of which each rank tells of so many parameters."""
    args = Namespace(
        check_weight_update_equal=False, asynchronous=False, weight_update_timeout=300.0, drafts_apart=False
    )
    publisher = ControlPublisher(args, 0)
    with stub_engines(engines, ranks, parameters) as urls:
        addresses = [EngineAddress(url, ranks, first_slot=ranks * i) for i, url in enumerate(urls)]
        versions = itertools.count(1)
        return _median(lambda: publisher.publish(next(versions), _BUCKETS, addresses), pushes)


def _median(call: Callable[[], object], times: int) -> Measured:
    found = []
    for _ in range(times + 1):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        found.append(Measured(time.perf_counter() - wall, time.process_time() - processor))
    return sorted(found[1:], key=lambda each: each.processor_s)[times // 2]


class _Idle:
    """A rank that does nothing."""

    def work(self) -> None:
        """At once."""

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """As long as it lives."""
        threading.Event().wait()


def idle_ranks(count: int) -> list[Any]:
    """Ray actors, each in a process of its own, which have started."""
    actors = [as_actor(_Idle).options(num_cpus=0).remote() for _ in range(count)]
    ray.get([actor.work.remote() for actor in actors], timeout=_START_S)
    return actors


def call_ranks(actors: Sequence[Any], times: int) -> Measured:
    """Of one call of each, as `TrainGroup.call` makes it."""
    supervisor = Supervisor()
    for rank, actor in enumerate(actors):
        supervisor.watch(f"trainer {rank}", actor)

    def call() -> None:
        calls = {f"trainer {rank}": actor.work.remote() for rank, actor in enumerate(actors)}
        supervisor.wait(calls, "work", Deadline(60.0))

    return _median(call, times)


@contextlib.contextmanager
def stub_engines(engines: int, ranks: int, parameters: int) -> Iterator[list[str]]:
    """Their URLs, in one process of their own, which ends with the block."""
    command = [sys.executable, "-m", "tools.benchmarks.control", str(engines), str(ranks), str(parameters)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def answers(ranks: int, parameters: int) -> dict[str, Any]:
    """What such an engine says of a push of `_BUCKETS`, by path."""
    tally = Tally()
    for bucket in _BUCKETS:
        for name, tensor in bucket:
            tally.add(name, tensor)
    held = {
        f"model.layers.{i}.mlp.experts.w13": Held("torch.bfloat16", (8, 8), "0" * 16, True) for i in range(parameters)
    }
    told = Loaded(tally, tally.nbytes, parameters=held).as_strings()
    checked = {"ranks": [{"parallelism_info": {"tp_rank": rank}, "checksums": told} for rank in range(ranks)]}
    return {"/openapi.json": {"paths": {}}, "/weights_checker": checked}


async def _serve(engines: int, ranks: int, parameters: int) -> None:
    bodies = {path: json.dumps(answer).encode() for path, answer in answers(ranks, parameters).items()}
    version = {"weight_version": ""}

    async def answer(request: web.Request) -> web.Response:
        body = bodies.get(request.path, b"{}")
        if request.path == "/update_weight_version":
            version["weight_version"] = (await request.json())["new_version"]
        if request.path == "/model_info":
            body = json.dumps(version).encode()
        return web.Response(body=body, content_type="application/json")

    runner = web.AppRunner(web.Application(client_max_size=2**30), access_log=None)
    runner.app.router.add_route("*", "/{path}", answer)
    await runner.setup()
    for _ in range(engines):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps([address[1] for address in runner.addresses]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    """Serve engines until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("engines", "ranks", "parameters"):
        parser.add_argument(name, type=int)
    options = parser.parse_args(argv)
    asyncio.run(_serve(options.engines, options.ranks, options.parameters))
    return 0


if __name__ == "__main__":
    sys.exit(main())
