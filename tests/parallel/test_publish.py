"""Publishing from training ranks to stand-ins for engines that note every call and open every payload."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.sglang.client import EngineError
from slime.files.hf_writer import NamedTensors
from slime.utils.http_utils import PortReservation
from slime.weights import EngineAddress, make_publisher, tensor
from tests.fake_control import addresses_of, read_payload
from tests.ranks import run_ranks

NUM_GPUS = 0

_LOADING_S = 0.2
Push = tuple[int, list[int]]
"""A seed, and the engines that are pushed to."""


def buckets(seed: int) -> Iterator[NamedTensors]:
    """Odd shapes and mixed types, the same on every rank, with collectives in the iterator as the real one has; of the
    last ones, none: a rank may be ahead of rank 0."""
    generator = torch.Generator().manual_seed(seed)
    for index, shape in enumerate([(3,), (5, 7), (), (2, 3, 4)]):
        if dist.is_initialized() and index < 2:
            dist.barrier()
        yield [
            (f"{index}.half", torch.randn(shape, generator=generator).bfloat16()),
            (f"{index}.byte", torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)),
            (f"{index}.full", torch.randn(shape, generator=generator).permute(tuple(reversed(range(len(shape)))))),
        ]


class FakeEngine:
    """Answers control calls; refuses the call of number ``refuse_push`` that brings weights; loads slowly."""

    def __init__(self, refuse_push: int | None = None, openapi: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.version = "default"
        self.versions: list[str] = []
        self.payload_counts: set[int] = set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                reply = {"weight_version": engine.version, "paths": dict.fromkeys(openapi)}
                self._answer(200, reply)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*engine.handle(self.path, body))

            def _answer(self, status: int, reply: dict[str, Any]) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._refuse_push = refuse_push
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/weights_checker":
            return 400, {"message": f"Unsupported action={body['action']!r}"}  # as a server without our record says
        self.calls.append(path.strip("/"))
        if path == "/update_weight_version":
            self.version = body["new_version"]
            self.versions.append(self.version)
        if path != "/update_weights_from_tensor":
            return 200, {}
        if self.calls.count("update_weights_from_tensor") == self._refuse_push:
            return 400, {"message": "no room"}
        self.payload_counts.add(len(body["serialized_named_tensors"]))
        views: dict[str, torch.Tensor] = {}
        for payload in body["serialized_named_tensors"]:
            opened = read_payload(payload)
            for place in opened["metadata"]:
                flat = opened["flattened_tensor"][place.start_idx : place.end_idx]
                views[place.name] = flat.view(place.dtype).reshape(place.shape)
        time.sleep(_LOADING_S)  # ranks go on meanwhile, and must leave it what it reads
        self.tensors.append({name: view.clone() for name, view in views.items()})
        return 200, {}

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(**kwargs) for kwargs in request.param]
    yield made
    for engine in made:
        engine.close()


def run_rank(
    rank: int, port: int, ranks: int, addresses: list[EngineAddress], pushes: list[Push], results: str
) -> None:
    """One training rank: publish as often as it is told; what that returned or raised, and how often it has made a
    buffer, goes into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo")
    args = argparse.Namespace(
        update_weight_transport="tensor",
        lora_sync="merged",
        weight_update_timeout=200.0,
        drafts_apart=False,
        allow_untested_versions=False,
        check_weight_update_equal=False,
        asynchronous=False,
    )
    made: list[int] = []

    class Counted(tensor.SharedBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(nbytes)

    tensor.SharedBuffer = Counted  # type: ignore[misc]
    publisher = make_publisher(args, rank)
    outcomes: list[Any] = []
    for version, (seed, members) in enumerate(pushes, start=1):
        made.clear()
        try:
            figures = publisher.publish(version, buckets(seed), [addresses[member] for member in members])
            outcomes.append(figures | {"buffers": len(made)})
        except EngineError as error:
            outcomes.append(str(error))
    publisher.close()
    Path(results, str(rank)).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def publish(
    engines: list[FakeEngine], sizes: list[int], pushes: list[Push], tmp_path: Path, ranks: int = 2
) -> list[list[Any]]:
    """What each rank has to say of each push."""
    addresses = addresses_of(engines, sizes)
    addresses = [EngineAddress(each.url, each.num_gpus, first_slot=each.first_slot) for each in addresses]
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    run_ranks(run_rank, (reservation.port, ranks, addresses, pushes, str(tmp_path)), ranks)
    reservation.close()
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(ranks)]


def assert_received(engine: FakeEngine, seed: int, since: int = -4) -> None:
    sent = [dict(bucket) for bucket in buckets(seed)]
    received = engine.tensors[since:][: len(sent)]
    for expected, got in zip(sent, received, strict=True):
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("engines", [[{}, {}]], indirect=True)
def test_each_rank_serves_the_engine_beside_it(engines: list[FakeEngine], tmp_path: Path) -> None:
    outcomes = publish(engines, [1, 1], [(11, [0, 1]), (12, [0, 1])], tmp_path)
    for engine in engines:
        assert (
            engine.calls
            == [
                "pause_generation",
                "flush_cache",
                *["update_weights_from_tensor"] * 4,
                "update_weight_version",
                "continue_generation",
            ]
            * 2
        )
        assert engine.payload_counts == {1}
        assert engine.version == "2"
        assert_received(engine, 12)
    assert [outcome["bytes"] for outcome in outcomes[0]] == [outcome["bytes"] for outcome in outcomes[1]]


@pytest.mark.parametrize(
    "engines", [[{"openapi": ("/begin_weight_update", "/end_weight_update")}]], indirect=True, ids=["sessions"]
)
def test_one_engine_of_two_ranks_gets_a_payload_of_each(engines: list[FakeEngine], tmp_path: Path) -> None:
    publish(engines, [2], [(5, [0])], tmp_path)
    (engine,) = engines
    assert engine.payload_counts == {2}
    assert engine.calls[:3] == ["pause_generation", "flush_cache", "begin_weight_update"]
    assert engine.calls[-3:] == ["end_weight_update", "update_weight_version", "continue_generation"]
    assert_received(engine, 5)


@pytest.mark.parametrize("engines", [[{}, {}]], indirect=True)
def test_engines_join_and_leave_between_pushes(engines: list[FakeEngine], tmp_path: Path) -> None:
    outcomes = publish(engines, [1, 1], [(31, [0]), (32, [0, 1]), (33, [1]), (34, [0, 1])], tmp_path)
    for engine, versions in zip(engines, (["1", "2", "4"], ["2", "3", "4"]), strict=True):
        assert engine.versions == versions
        assert engine.calls.count("update_weights_from_tensor") == 4 * 3
        assert engine.calls.count("continue_generation") == 3
        assert_received(engine, 34)
    assert_received(engines[1], 33, -8)
    assert_received(engines[1], 32, -12)
    # torch would keep a GPU's memory, of which nobody opens the handle, until the trainer ends.
    assert [[figures["buffers"] > 0 for figures in of_rank] for of_rank in outcomes] == [
        [True, True, False, True],
        [False, True, True, True],
    ]


@pytest.mark.parametrize("engines", [[{}, {"refuse_push": 2}]], indirect=True)
def test_a_refusal_reaches_every_rank_and_engines_stay_paused_until_a_push_succeeds(
    engines: list[FakeEngine], tmp_path: Path
) -> None:
    """Of ranks 0 and 1 beside an engine, 2 beside the one that refuses, and 3 beside none."""
    outcomes = publish(engines, [2, 1], [(21, [0, 1]), (22, [0, 1])], tmp_path, ranks=4)
    for error, figures in outcomes:
        assert error.startswith("weight update to version 1 (MixedPublisher): push: engine " + engines[1].url)
        assert "no room" in error
        assert figures["bytes"] > 0
    assert [engine.payload_counts for engine in engines] == [{2}, {1}]
    assert engines[1].calls[:4] == ["pause_generation", "flush_cache", *["update_weights_from_tensor"] * 2]
    for engine in engines:
        first = engine.calls.index("continue_generation")
        assert engine.calls[:first].count("pause_generation") == 2, "nothing is generated by weights of two versions"
        assert engine.versions == ["2"]
        assert_received(engine, 22)
