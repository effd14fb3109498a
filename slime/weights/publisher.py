"""The sequence that every transport follows: pause, flush, push, set and check the version, go on.

While engines load a bucket, all ranks gather and convert the next one, and put it where engines will find it.
"""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.sglang.client import EngineControl, EngineError
from slime.weights.engines import EngineAddress, start_all
from slime.weights.equality import EqualityCheck
from slime.weights.hf_directory import NamedTensors

Wait = Callable[[], object]
"""Waits for what was begun, and raises what went wrong in it."""


@dataclass
class _Update:
    """One publication under way."""

    version: int
    paused_at: float | None = None
    nbytes: int = 0
    check: EqualityCheck | None = None
    under_way: Wait | None = None
    """For engines to have loaded the bucket that was delivered last."""

    def settle(self) -> None:
        """Wait for the delivery under way; a second time there is none."""
        wait, self.under_way = self.under_way, None
        if wait is not None:
            wait()

    def note(self, bucket: NamedTensors) -> None:
        """Keep a bucket for the check, if there is to be one."""
        if self.check is not None:
            self.check.add(bucket)


class WeightPublisher:
    """Brings the trainer's weights to every engine. Every training rank has one; rank 0's talks to the engines.

    Each publication names the engines that it is for. They may be others than the last time: a transport opens what it
    has to those that joined, which get everything like the others, and gives up what it has to those that left, which
    may be dead.

    A transport overrides `_open`, `_close`, `_stage` (collective, every rank) and `_deliver` (rank 0). At most one
    delivery is under way: it begins when the one before has ended, and goes on while the next bucket is gathered and
    staged. So `_stage` must not write what the latest delivery reads; what earlier ones have read is free.
    """

    pauses_for_buckets = True
    """Whether buckets go straight into the engines, which must then be paused from the first one on."""

    engines_check = False
    """Whether the engines themselves compare what they get with the trainer's digests."""

    def __init__(self, args: Namespace, rank: int) -> None:
        """
        Args:
            args: the run's options.
            rank: this process's rank among the trainers.
        """
        self.args = args
        self.rank = rank
        self.engines: list[EngineAddress] = []
        """Those of the present or the latest publication."""
        self.timeout: float = args.weight_update_timeout
        self.controls: dict[EngineAddress, EngineControl] = {}
        """Of these, on rank 0."""
        self._version = -1
        self._deadline = 0.0

    def publish(
        self,
        version: int,
        buckets: Iterable[NamedTensors],
        engines: Sequence[EngineAddress],
        whole: Iterable[NamedTensors] | None = None,
    ) -> dict[str, float]:
        """Push weights; collective over the training ranks.

        Whatever happens, the buckets are drained on every rank: their iterator holds collectives that other ranks wait
        in. Engines that were paused stay so after a failure, because their weights may be of two versions, and the same
        version may be published again, from the first bucket on.

        Args:
            version: larger than any before.
            buckets: the same names and shapes on every rank, each a full tensor on this rank's device; a bucket is not
                used after the next one has been asked for. Where `tensor.own_experts_do` says so, each rank's experts
                are its own, as many as any other's.
            engines: all that are to have these weights, at least one; the same on every rank.
            whole: the same weights with all tensors on rank 0, for ``--check-weight-update-equal``, where ``buckets``
                have a rank's own experts.

        Returns:
            ``paused_seconds`` without generation, ``bytes`` to each rank of an engine.

        Raises:
            ValueError: a version that does not grow; engines that the transport does not reach.
            EngineError: it names engine, phase and version; on the ranks that took part in what failed, which is
                rank 0 unless the buckets could not be made. The engines' weights are then undefined.
            torch.OutOfMemoryError: instead, where they do not fit into this rank's GPU.
        """
        # The others do not know whether rank 0 has failed.
        if self.rank == 0 and version <= self._version:
            raise ValueError(f"weight version {version} does not grow: {self._version} was published before")
        start = time.monotonic()
        self._deadline = start + self.timeout
        self.engines = list(engines)
        if self.rank == 0:
            known = self.controls
            self.controls = {each: known.get(each) or each.control(self.timeout) for each in engines}
        self._open()
        update = _Update(version)
        failure = self._attempt(lambda: self._begin(update))
        try:
            for bucket in buckets:
                update.nbytes += sum(tensor.nbytes for _, tensor in bucket)
                staged = self._stage(bucket)
                # After any failure too: engines may still be reading what `_stage` writes next.
                late = self._attempt(update.settle)
                failure = failure or late or self._attempt(functools.partial(self._push, update, bucket, staged))
                if whole is None:
                    failure = failure or self._attempt(functools.partial(update.note, bucket))
                del bucket, staged  # the next one is gathered in their place
            late = self._attempt(update.settle)
            for bucket in whole or ():
                failure = failure or self._attempt(functools.partial(update.note, bucket))
                del bucket
            failure = failure or late or self._attempt(lambda: self._finish(update))
            self._release()
        except Exception as error:
            failure = failure or error
        self._end(update, failure)
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure  # the caller knows what has the memory
        if failure is not None:
            raise EngineError(f"weight update to version {version} ({type(self).__name__}): {failure}") from failure
        self._version = version
        end = time.monotonic()
        paused = update.paused_at or start
        return {"paused_seconds": end - paused, "bytes": float(update.nbytes)}

    def close(self) -> None:
        """Leave the transport; may be called again, and with engines that are gone."""
        self._close()

    def _open(self) -> None:
        """Prepare what ranks need among each other for `engines` (every rank; collective), if it is not there yet."""

    def _close(self) -> None:
        """Undo `_open` and `_prepare`; must not raise for engines that are gone."""

    def _prepare(self, version: int) -> None:
        """Before the first bucket (rank 0); here engines that joined are met."""

    def _stage(self, bucket: NamedTensors) -> Any:
        """Make a bucket ready (every rank; may be collective); its result goes to `_deliver` on rank 0."""
        return None

    def _deliver(self, bucket: NamedTensors, staged: Any) -> Wait | None:
        """Begin to bring a bucket to every engine (rank 0).

        Returns:
            What waits for the end of it, which must not need the bucket's own tensors; None if nothing is left to do.
        """
        raise NotImplementedError

    def _seal(self, version: int) -> None:
        """After the last bucket, and before engines that did not take them pause (rank 0)."""

    def _complete(self, version: int) -> None:
        """After the last bucket, with the engines paused, before the version is set (rank 0)."""

    def _release(self) -> None:
        """After the last bucket (every rank; may be collective)."""

    def _abandon(self) -> None:
        """After a failure: drop what an engine may still be waiting in, or what is half written (rank 0)."""

    def each_engine(
        self, phase: str, call: Callable[[EngineControl], Any], timeout: float | None = None
    ) -> dict[str, Any]:
        """``call`` on all engines at the same time, within what is left of the deadline; results by URL."""
        return self.start_each(phase, call, timeout)()

    def start_each(
        self, phase: str, call: Callable[[EngineControl], Any], timeout: float | None = None
    ) -> Callable[[], dict[str, Any]]:
        """Begin what `each_engine` does; what waits for it and returns the results."""
        remaining = max(0.0, self._deadline - time.monotonic()) if timeout is None else timeout
        calls = {engine.url: functools.partial(call, control) for engine, control in self.controls.items()}
        # Others may still be reading the buffer or the files that are given up after a failure.
        return start_all(calls, remaining, phase, settle=True)

    def _attempt(self, step: Callable[[], None]) -> Exception | None:
        """Take a step of rank 0; what it raised. Other ranks skip it, and must hear of a failure only at the end."""
        if self.rank != 0:
            return None
        try:
            step()
        except Exception as error:
            return error
        return None

    def _begin(self, update: _Update) -> None:
        if self.args.check_weight_update_equal and not self.engines_check:
            update.check = EqualityCheck(self.args, update.version)
        self._prepare(update.version)
        if self.pauses_for_buckets:
            self._pause(update)

    def _push(self, update: _Update, bucket: NamedTensors, staged: Any) -> None:
        update.under_way = self._deliver(bucket, staged)

    def _pause(self, update: _Update) -> None:
        update.paused_at = time.monotonic()
        if self.args.asynchronous:
            # No other run has requests under way now.
            self.each_engine("abort", lambda control: control.abort_all())
        self.each_engine("pause", lambda control: control.pause())
        # Keys and values that the old weights made must not serve tokens of the new ones.
        self.each_engine("flush", lambda control: control.flush_cache())
        self.each_engine("begin", lambda control: control.begin_weight_update())

    def _finish(self, update: _Update) -> None:
        self._seal(update.version)
        if not self.pauses_for_buckets:
            self._pause(update)
        self._complete(update.version)
        self.each_engine("end", lambda control: control.end_weight_update())
        if update.check is not None:
            update.check.run(self.each_engine)
        version = str(update.version)
        self.each_engine("set version", lambda control: control.set_weight_version(version))
        found = self.each_engine("check version", lambda control: control.weight_version())
        wrong = {url: value for url, value in found.items() if value != version}
        if wrong:
            raise EngineError(f"check version: engines report {wrong} instead of {version}")
        self.each_engine("continue", lambda control: control.continue_())

    def _end(self, update: _Update, failure: Exception | None) -> None:
        if self.rank != 0:
            return
        self._attempt(update.settle)  # where the gather failed, engines are still reading the bucket before
        if update.check is not None:
            update.check.discard()
        if failure is not None:
            self._abandon()


def trainer_world_size() -> int:
    """Number of training ranks; 1 in a process without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1
