"""The sequence that every transport follows: pause, flush, push, set and check the version, go on.

While engines load a bucket, all ranks gather and convert the next one, and put it where engines will find it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from slime.backends.sglang.client import EngineControl, EngineError
from slime.files.hf_writer import NamedTensors
from slime.observability.trace import span
from slime.utils import device
from slime.weights.agreement import Agreement, OtherRankError
from slime.weights.engines import EngineAddress, start_all
from slime.weights.equality import EqualityCheck
from slime.weights.proof import PushProof

_AGREE_S = 30.0
"""What ranks wait for each other beyond the deadline, by which the calls of engines have ended."""
Wait = Callable[[], object]
"""Waits for what was begun, and raises what went wrong in it."""


@dataclass
class _Update:
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
            with span("push/deliver"):
                wait()

    def note(self, bucket: NamedTensors) -> None:
        """Keep a bucket for the check, if there is to be one."""
        if self.check is not None:
            self.check.add(bucket)


class WeightPublisher:
    """Brings the trainer's weights to every engine. Every training rank has one; rank 0's has the engines pause, take
    the version and go on.

    Each publication names the engines that it is for. They may be others than the last time: a transport opens what it
    has to those that joined, which get everything like the others, and gives up what it has to those that left, which
    may be dead.

    A transport overrides `_open`, `close`, `_stage` (collective, every rank) and `_deliver` (each rank that sends).
    Of each sender's deliveries at most one is under way: it begins when the one before has ended, and goes on while the
    next bucket is gathered and staged. So `_stage` must not write what the latest delivery reads; what earlier ones
    have read is free.
    """

    pauses_for_buckets = True
    """Whether buckets go straight into the engines, which must then be paused from the first one on."""

    engines_check = False
    """Whether the engines themselves compare what they get with the trainer's digests."""

    def __init__(self, args: Namespace, rank: int) -> None:
        """``rank`` is this process's among the trainers."""
        self.args = args
        self.rank = rank
        self.engines: list[EngineAddress] = []
        """Those of the present or the latest publication."""
        self.timeout: float = args.weight_update_timeout
        self.group_name = ""
        """What a collective group is called that this publication opens; empty where that is nobody else's concern."""
        self._controls: dict[EngineAddress, EngineControl] = {}
        self._agreement: Agreement | None = None
        """Where there are other ranks."""
        self._proof = PushProof()
        self._version = -1
        self._have_version: set[EngineAddress] = set()
        self._deadline = 0.0

    def publish(
        self,
        version: int,
        buckets: Iterable[NamedTensors],
        engines: Sequence[EngineAddress],
        full_buckets: Iterable[NamedTensors] | None = None,
    ) -> dict[str, float]:
        """Push weights; collective over the training ranks.

        Whatever happens, the buckets are drained on every rank: their iterator holds collectives that other ranks wait
        in. Engines that were paused stay so after a failure, because their weights may be of two versions, and the same
        version may be published again, from the first bucket on.

        Args:
            version: larger than any before, or the latest one again for engines that were not among those it was for.
            buckets: the same names and shapes on every rank, each a full tensor on this rank's device; a bucket is not
                used after the next one has been asked for. Where `can_push_local_experts` says so, each rank's experts
                are its own, as many as any other's.
            engines: all that are to have these weights, at least one; the same on every rank.
            full_buckets: the same with all tensors on rank 0, for ``--check-weight-update-equal``, where ``buckets``
                have a rank's own experts.

        Returns:
            ``paused_seconds`` without generation, ``bytes`` to each rank of an engine.

        Raises:
            ValueError: a version that does not grow, for an engine that has it.
            EngineError: it names engine, phase and version; on every rank, whichever of them failed, with the same
                words: on those that only heard of it an OtherRankError. Only ranks that wait in a collective of the
                buckets for one that has raised do not hear. The engines' weights are then undefined.
            RuntimeError: instead, that of `device.out_of_memory`, where they do not fit into this rank's GPU.
        """
        if version < self._version or (version == self._version and not self._have_version.isdisjoint(engines)):
            raise ValueError(f"weight version {version} does not grow: {self._version} was published before")
        start = time.monotonic()
        self._deadline = start + self.timeout
        self.engines = list(engines)
        self._controls = {engine: self._controls[engine] for engine in engines if engine in self._controls}
        update = _Update(version)
        if self._agreement is None and trainer_world_size() > 1:
            self._agreement = Agreement(self.rank, trainer_world_size())
        if self._agreement is not None:
            self._agreement.begin()
        self._proof.begin(version)
        try:
            failure = self._push(update, buckets, full_buckets)
        except Exception as error:
            failure = error
            if self._agreement is not None:
                with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, may be dead
                    self._agreement.tell(error)
        self._end(update, failure)
        if failure is not None and device.out_of_memory(failure):
            raise failure  # the caller knows what has the memory
        if failure is not None:
            kind = OtherRankError if isinstance(failure, OtherRankError) else EngineError
            raise kind(f"weight update to version {version} ({type(self).__name__}): {failure}") from failure
        self._have_version = {*engines, *(self._have_version if version == self._version else ())}
        self._version = version
        end = time.monotonic()
        paused = update.paused_at or start
        return {"paused_seconds": end - paused, "bytes": float(update.nbytes)}

    def close(self) -> None:
        """Leave the transport: undo `_open` and `_prepare`. May be called again, and with engines that are dead."""

    @property
    def _sends(self) -> bool:
        """Whether this rank brings buckets to engines."""
        return self.rank == 0

    def _open(self) -> None:
        """Prepare what ranks need among each other for `engines` (every rank; collective), if it is not there yet."""

    def _prepare(self, version: int) -> None:
        """Before the first bucket (rank 0); here engines that joined are met."""

    def _stage(self, bucket: NamedTensors) -> Any:
        """Make a bucket ready (every rank; may be collective); its result goes to `_deliver` on ranks that send."""
        return None

    def _deliver(self, bucket: NamedTensors, staged: Any) -> Wait | None:
        """Begin to bring a bucket to the engines that this rank sends to (ranks that send). What waits for the end of
        it must not need the bucket's own tensors; None if nothing is left to do."""
        raise NotImplementedError

    def _seal(self, version: int) -> None:
        """After the last bucket, and before engines that did not take them pause (rank 0)."""

    def _complete(self, version: int) -> None:
        """After the last bucket, with the engines paused, before the version is set (rank 0)."""

    def _release(self) -> None:
        """When every rank's deliveries have ended (every rank)."""

    def _abandon(self) -> None:
        """After a failure: drop what an engine may still wait in, or what is half written (rank 0; ranks that send)."""

    def _rank_of(self, engine: EngineAddress, index: int) -> int:
        """Which training rank's buckets one of an engine's ranks gets."""
        return 0

    def control(self, engine: EngineAddress) -> EngineControl:
        """The client of one of `engines`."""
        return self._controls.setdefault(engine, engine.control(self.timeout))

    def each_engine(
        self, phase: str, call: Callable[[EngineControl], Any], engines: Sequence[EngineAddress] | None = None
    ) -> dict[str, Any]:
        """``call`` on all engines, or on these, at the same time, within what is left of the deadline; results by
        URL."""
        whom = self.engines if engines is None else engines
        with span("push/call", phase=phase):
            return self.start(phase, {each.url: functools.partial(call, self.control(each)) for each in whom})()

    def start(self, phase: str, calls: Mapping[str, Callable[[], Any]]) -> Callable[[], dict[str, Any]]:
        """Begin calls, within what is left of the deadline; what waits for them and returns their results."""
        # Others may still be reading the buffer or the files that are given up after a failure.
        return start_all(calls, max(0.0, self._deadline - time.monotonic()), phase, settle=True)

    def _push(
        self, update: _Update, buckets: Iterable[NamedTensors], full_buckets: Iterable[NamedTensors] | None
    ) -> Exception | None:
        """A publication, and what it failed in: the same on every rank, unless this one raises and leaves the others.

        Rank 0 alone has the engines pause and go on, and gives them the version: a handful of calls a push, and one
        place that knows all engines to have everything. So the others wait for it before their first bucket, and it for
        them after their last one.
        """
        self._open()
        failure = self._agree(self._attempt(self.rank == 0, self._begin, update))
        late = self._drain(update, buckets, full_buckets, failure)
        if failure is None:
            failure = self._agree(late, self._proof.words())
        self._release()
        if failure is None:
            failure = self._agree(self._attempt(self.rank == 0, self._finish, update))
        return failure

    def _drain(
        self,
        update: _Update,
        buckets: Iterable[NamedTensors],
        full_buckets: Iterable[NamedTensors] | None,
        failure: Exception | None,
    ) -> Exception | None:
        """Take every bucket, and deliver them as long as this rank knows of no failure; the first that it knows of."""
        for bucket in _gathered(buckets):
            update.nbytes += sum(tensor.nbytes for _, tensor in bucket)
            with span("push/stage"):
                staged = self._stage(bucket)
            # After any failure too: engines may still be reading what `_stage` writes next.
            late = self._attempt(self._sends, update.settle)
            failure = failure or late or self._attempt(self._sends, self._begin_delivery, update, bucket, staged)
            with span("push/note"):
                self._proof.note(bucket)
            if full_buckets is None:
                failure = failure or self._attempt(self.rank == 0, update.note, bucket)
            del bucket, staged  # the next one is gathered in their place
        late = self._attempt(self._sends, update.settle)
        for bucket in full_buckets or ():
            failure = failure or self._attempt(self.rank == 0, update.note, bucket)
            del bucket
        return failure or late

    def _agree(self, failure: Exception | None, words: str = "") -> Exception | None:
        """What any rank has failed in (collective); rank 0 then knows the ``words`` of each."""
        if self._agreement is None:
            return failure
        return self._agreement.settle(failure, max(0.0, self._deadline - time.monotonic()) + _AGREE_S, words)

    def _attempt(self, here: bool, step: Callable[..., None], *args: Any) -> Exception | None:
        """Take a step where it is to be taken; what it raised, of which the other ranks hear when they next agree."""
        if not here:
            return None
        try:
            step(*args)
        except Exception as error:
            return error
        return None

    def _begin(self, update: _Update) -> None:
        if self.args.check_weight_update_equal and not self.engines_check:
            update.check = EqualityCheck(self.args, update.version)
        self._prepare(update.version)
        self._proof.meet(self.each_engine, self.engines)
        if self.pauses_for_buckets:
            self._pause(update)

    def _begin_delivery(self, update: _Update, bucket: NamedTensors, staged: Any) -> None:
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
        words = (self._agreement.words if self._agreement is not None else {}) | {0: self._proof.words()}
        self._proof.check(self.each_engine, self.engines, words, self._rank_of)
        self.each_engine("end", lambda control: control.end_weight_update())
        if update.check is not None:
            update.check.run(self.each_engine)
            self._proof.forget()
        version = str(update.version)
        self.each_engine("set version", lambda control: control.set_weight_version(version))
        found = self.each_engine("check version", lambda control: control.weight_version())
        wrong = {url: value for url, value in found.items() if value != version}
        if wrong:
            raise EngineError(f"check version: engines report {wrong} instead of {version}")
        self.each_engine("continue", lambda control: control.continue_())

    def _end(self, update: _Update, failure: Exception | None) -> None:
        self._attempt(self._sends, update.settle)  # where the gather failed, engines still read the bucket before
        if update.check is not None:
            update.check.discard()
        if failure is not None:
            self._proof.forget()
        if failure is not None and (self._sends or self.rank == 0):
            self._abandon()


def _gathered(buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
    """Each bucket as it comes from all ranks; it is let go of before the next one is gathered."""
    iterator = iter(buckets)
    while True:
        with span("push/gather"):
            bucket = next(iterator, None)
        if bucket is None:
            return
        yield bucket
        del bucket


def trainer_world_size() -> int:
    """Number of training ranks; 1 in a process without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1
