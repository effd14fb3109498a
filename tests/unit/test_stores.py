"""torch's stores listen on one address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed import rendezvous as meet

from slime.fleet.placement import Placement, Slot
from slime.ray.train_actor import TrainActor
from slime.utils import stores
from slime.utils.http_utils import PortReservation
from slime.utils.stores import NODE_ADDRESS_VARIABLE, _rendezvous, serve_store, serve_stores_where_they_are_reached

NUM_GPUS = 0
LIMIT = timedelta(seconds=60)


def addresses(port: int) -> set[str]:
    """On which this process listens at a port."""
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {c.laddr.ip for c in listening if c.laddr.port == port}


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rendezvous, "_create_c10d_store", _rendezvous._create_c10d_store)
    serve_stores_where_they_are_reached()
    once = _rendezvous._create_c10d_store
    serve_stores_where_they_are_reached()
    assert _rendezvous._create_c10d_store is once


@pytest.fixture
def port() -> Iterator[int]:
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    yield reservation.port
    reservation.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_is_reached_by_its_host_alone(host: str) -> None:
    store = serve_store(host, wait_for_workers=False)
    assert len(addresses(store.port)) == 1
    assert addresses(store.port) <= {"127.0.0.1", "::1"}
    client = TCPStore(host, store.port, is_master=False, timeout=LIMIT)
    client.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("many", [1, 2], ids=["one group", "another at the same store"])
def test_groups_meet_there(port: int, many: int) -> None:
    found = []

    def join(rank: int) -> None:
        for _ in range(many):
            store, _, _ = next(meet(f"tcp://127.0.0.1:{port}", rank, 2, timeout=LIMIT))
            found.append(store)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join(60)
    assert len(found) == 2 * many
    assert addresses(port) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "leads_to", "node", "everywhere"),
    [
        ("me", "127.0.1.1", None, True),  # as Debian has it
        ("me", "127.0.1.1", "192.0.2.2", True),
        ("me", "127.0.1.1", "127.0.0.1", False),  # the run has this host alone
        ("localhost", "127.0.0.1", None, False),
        ("127.0.0.1", "127.0.0.1", None, False),
    ],
)
def test_a_name_that_is_loopback_to_its_own_host_alone(
    name: str, leads_to: str, node: str | None, everywhere: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts are led to its address, at which a store of loopback does not answer."""
    monkeypatch.delenv(NODE_ADDRESS_VARIABLE, raising=False)
    if node is not None:
        monkeypatch.setenv(NODE_ADDRESS_VARIABLE, node)
    ask = socket.getaddrinfo

    def lead(host: Any, *words: Any, **options: Any) -> Any:
        return ask(leads_to if host == name else host, *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lead)
    bound: list[str] = []
    monkeypatch.setattr(stores, "serve_store", lambda host, *_, **__: bound.append(host))
    served: list[str] = []
    create = stores._bound(lambda host, *_, **__: served.append(host))
    create(name, port, 0, 2, LIMIT)
    assert (served, bound) == (([name], []) if everywhere else ([], [name]))


@pytest.mark.usefixtures("patched")
def test_a_port_that_is_taken_is_still_an_error(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RuntimeError, match=r"(?i)address already in use"):
        next(meet(f"tcp://127.0.0.1:{port}", 0, 1, timeout=LIMIT))


@pytest.mark.parametrize(("on_one_host", "expected"), [(True, "127.0.0.1"), (False, "0.0.0.0")])
def test_trainers_of_one_host_meet_on_loopback(
    on_one_host: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "0.0.0.0")
    actor = TrainActor.__new__(TrainActor)
    host, port = actor.serve_rendezvous(on_one_host)
    assert host == expected
    assert addresses(port) == {expected}


@pytest.mark.parametrize(
    ("hosts", "given", "expected"),
    [(["a", "a", "a"], None, "lo"), (["a", "a", "b"], None, None), (["a", "a", "a"], "eth7", "eth7")],
)
def test_gloo_listens_on_loopback_where_the_run_has_one_host(
    hosts: list[str], given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    slots = [Slot(i, host, None) for i, host in enumerate(hosts)]
    placement = Placement(slots, train=slots[:2], engines=[slots[2:]])
    given_to_workers = placement.interface()
    assert given_to_workers.get("GLOO_SOCKET_IFNAME") == expected
    assert given_to_workers.get(NODE_ADDRESS_VARIABLE) == ("127.0.0.1" if expected else None)
