"""Weights to engines of which some are on the trainers' devices and some on devices of their own."""

from __future__ import annotations

from argparse import Namespace

from slime.files.hf_writer import NamedTensors
from slime.weights.distributed import DistributedPublisher
from slime.weights.engines import EngineAddress
from slime.weights.publisher import Wait
from slime.weights.tensor import TensorPublisher


class MixedPublisher(TensorPublisher):
    """Each bucket goes to the engines beside trainers by handle, and from rank 0 to those apart by a collective group.

    It is one publication: all engines pause before the first bucket and go on after the last one, under one version.
    The collective group has no sequence of its own; of `DistributedPublisher` it is only what carries a bucket.
    """

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__(args, rank)
        self._group_of_others = DistributedPublisher(args, rank)

    def close(self) -> None:
        self._group_of_others.close()
        super().close()

    @property
    def _beside_ranks(self) -> list[EngineAddress]:
        return [engine for engine in self.engines if not engine.apart]

    @property
    def _sends_apart(self) -> bool:
        return self.rank == 0 and any(engine.apart for engine in self.engines)

    @property
    def _sends(self) -> bool:
        return super()._sends or self._sends_apart

    def _rank_of(self, engine: EngineAddress, index: int) -> int:
        return 0 if engine.apart else super()._rank_of(engine, index)

    def _prepare(self, version: int) -> None:
        others = self._group_of_others
        others.engines = [engine for engine in self.engines if engine.apart]
        others._deadline, others.group_name = self._deadline, self.group_name
        if others.engines:
            others._prepare(version)
        elif others._group is not None:  # all of them have left
            others._abandon()

    def _deliver(self, bucket: NamedTensors, staged: list[str]) -> Wait:
        waits = []
        # First, as it alone needs memory, and may fail before anything is begun.
        if self._sends_apart:
            waits.append(self._group_of_others._deliver(bucket, None))
        if super()._sends:
            waits.append(super()._deliver(bucket, staged))

        def wait() -> None:
            failures = []
            for each in waits:
                try:
                    each()
                except Exception as error:  # the others still read what is then written over
                    failures.append(error)
            if failures:
                raise failures[0]

        return wait

    def _abandon(self) -> None:
        super()._abandon()
        if self.rank == 0:
            self._group_of_others._abandon()
