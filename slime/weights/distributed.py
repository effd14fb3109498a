"""Weights to engines on other devices: one collective group of training rank 0 and every engine rank, NCCL or gloo."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.backends.sglang.client import EngineError
from slime.files.hf_writer import NamedTensors
from slime.utils import device
from slime.utils.http_utils import LOOPBACK, PortReservation, host_ip, host_port
from slime.utils.stores import NODE_ADDRESS_VARIABLE
from slime.weights.engines import EngineAddress, start_all
from slime.weights.publisher import Wait, WeightPublisher

_LEAVE_TIMEOUT_S, _CLOSE_S = 5.0, 6.0
_GRACE_S = 3.0
_group_numbers = itertools.count()


class DistributedPublisher(WeightPublisher):
    """Rank 0 broadcasts each bucket as one flat tensor; the other training ranks have no part in it."""

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__(args, rank)
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._members: list[EngineAddress] = []

    def _prepare(self, version: int) -> None:
        if self._group is None or self._members != self.engines:
            # One that left may be dead: nothing more can be done in this group.
            self._abandon()
            self._meet()

    def _meet(self) -> None:
        # A name of its own for each group: torch refuses one that this process, or an engine alive, has had before.
        self._group_name = self.group_name or f"slime-weights-{os.getpid()}-{next(_group_numbers)}"
        loopback = all(engine.url.startswith(("http://127.", "http://[::1]")) for engine in self.engines)
        # Where the run reaches this host, which may have other addresses that the engines cannot reach.
        own = os.environ.get(NODE_ADDRESS_VARIABLE) or os.environ.get("MASTER_ADDR") or host_ip()
        host = LOOPBACK if loopback else own
        reservation = PortReservation(host)
        self._members = self.engines
        world_size = 1 + sum(engine.num_gpus for engine in self.engines)
        calls: dict[str, Any] = {}
        offset = 1
        for engine in self.engines:
            calls[engine.url] = functools.partial(
                self.control(engine).init_weights_update_group,
                master_address=host,
                master_port=reservation.port,
                rank_offset=offset,
                world_size=world_size,
                group_name=self._group_name,
                backend=device.collective_backend(),
            )
            offset += engine.num_gpus
        # Rank 0 joins in a thread as well: an engine that refuses is then an error at once, not after the deadline.
        calls["training rank 0"] = lambda: join_as_sender(
            host, reservation.port, world_size, self._group_name, timedelta(seconds=self.timeout)
        )
        reservation.release()
        remaining = max(1.0, self._deadline - time.monotonic())
        try:
            self._group = start_all(calls, remaining, "joining the weight update group")()["training rank 0"]
        finally:
            reservation.close()

    def _deliver(self, bucket: NamedTensors, staged: Any) -> Wait:
        # The engine lays the tensors out one after another without padding: larger element sizes first keeps every
        # one of them aligned.
        ordered = sorted(bucket, key=lambda named: -named[1].element_size())
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered])
        device.synchronize()  # the stream that sends it does not wait for this one
        remaining = max(1.0, self._deadline - time.monotonic())
        calls: dict[str, Any] = {
            engine.url: functools.partial(
                self.control(engine).update_weights_from_distributed,
                names=[name for name, _ in ordered],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
                shapes=[list(tensor.shape) for _, tensor in ordered],
                group_name=self._group_name,
            )
            for engine in self.engines
        }
        # In a thread as well: NCCL's first collective of a group does not return before every engine is in it too, not
        # even an asynchronous one; and this thread goes on to the trainers' next gather. No engine has a part in that,
        # no other trainer in this: neither waits for the other.
        calls["training rank 0"] = functools.partial(self._send, flat, timedelta(seconds=remaining))
        return start_all(calls, remaining, "push")

    def _send(self, flat: torch.Tensor, timeout: timedelta) -> None:
        try:
            with device.dedicated_stream(flat.device):
                dist.broadcast(flat, src=0, group=self._group, async_op=True).wait(timeout)
        except RuntimeError:
            # An engine that died breaks the broadcast: its own call fails too, and says more.
            time.sleep(_GRACE_S)
            raise

    def _abandon(self) -> None:
        """Leave the group although a broadcast may hang in it, without waiting for that."""
        # An engine that refused leaves and closes its connections, which ends our broadcast with an error; ours then
        # close, which releases an engine that waits for the rest. gloo has no other way to end a collective early.
        group = self._leave()
        if group is not None:
            group.abort()
            threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True).start()

    def close(self) -> None:
        group = self._leave()
        if group is not None:
            dist.destroy_process_group(group)

    def _leave(self) -> dist.ProcessGroup | None:
        """Have the engines leave, those that still answer; the group that this side has yet to leave."""
        group, name, self._group = self._group, self._group_name, None
        if group is not None:

            def leave(engines: Sequence[EngineAddress]) -> Wait:
                controls = [each.control(_LEAVE_TIMEOUT_S) for each in engines]
                calls = {each.url: functools.partial(each.destroy_weights_update_group, name) for each in controls}
                return start_all(calls, _CLOSE_S, "leave", settle=True)

            leave([each for each in self._members if each not in self.engines])  # not waited for: they may be dead
            with contextlib.suppress(EngineError):
                leave([each for each in self._members if each in self.engines])()
        return group


def join_as_sender(host: str, port: int, world_size: int, group_name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Serve the rendezvous and join, as rank 0, a group of processes that have no default group in common.

    torch has no public call for that. These are the steps that the engine takes on its side
    (``sglang.srt.utils.common.init_custom_process_group``, which cannot be imported without all of SGLang): both sides
    must build the same store prefixes, or they wait for each other until the deadline.
    """
    store, _, _ = next(c10d.rendezvous(f"tcp://{host_port(host, port)}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(device.collective_backend()),
        c10d.PrefixStore(group_name, store),
        group_name=c10d.GroupName(group_name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
