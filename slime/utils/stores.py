"""torch's TCP stores, at which the ranks of a group meet, on one address each: by themselves they listen on all."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from typing import Any

from torch.distributed import TCPStore

from slime.utils.environment import address_of
from slime.utils.patching import Patch

_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function so named
NODE_ADDRESS_VARIABLE = "SLIME_NODE_ADDRESS"
"""Where all of the run reaches a trainer's host; MASTER_ADDR is loopback already where only the trainers are on one."""


def serve_store(host: str, port: int = 0, **options: Any) -> TCPStore:
    """Serve a store that only ``host``, an address or a name of this machine, leads to; ``options`` are torch's.
    OSError where ``host`` is none of this machine's, or ``port`` (0: one that the kernel chooses) is taken."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    # The kernel's own limit: all ranks may come at once.
    listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)


def serve_stores_where_they_are_reached() -> None:
    """Has the store at which a group meets listen on the group's own address, not on all of the host."""
    if not hasattr(_rendezvous._create_c10d_store, "__wrapped__"):
        _rendezvous._create_c10d_store = _bound(_rendezvous._create_c10d_store)


RENDEZVOUS: Patch[Any] = Patch(
    "rendezvous", "torch", ">=2.11.0,<=2.13.0", "every process of a server, and every training rank",
    "torch has an option for it.", serve_stores_where_they_are_reached,
)  # fmt: skip


def _bound(create: Any) -> Any:
    @functools.wraps(create)
    def create_bound(hostname: str, port: int, rank: int, world_size: int, *rest: Any, **options: Any) -> Any:
        if rank == 0 and not _rendezvous._torchelastic_use_agent_store() and not _is_this_host_to_itself(hostname):
            timeout = rest[0] if rest else options["timeout"]
            try:
                return serve_store(hostname, port, world_size=world_size, timeout=timeout, multi_tenant=True)
            except OSError:
                pass  # a name that only others know, or a store of this process that serves several groups
        return create(hostname, port, rank, world_size, *rest, **options)

    return create_bound


def _is_this_host_to_itself(name: str) -> bool:
    """Whether a name leads to loopback here alone: many systems map the host's own so, and other hosts do not.

    Where the run has one host all ask from here; the name and the addresses of loopback say that they do.
    """
    if name == "localhost" or any(map(_is_loopback, (name, os.environ.get(NODE_ADDRESS_VARIABLE, "")))):
        return False
    try:
        return any(_is_loopback(str(found[4][0])) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    address = address_of(host)
    return address is not None and address.is_loopback
