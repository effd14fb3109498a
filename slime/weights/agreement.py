"""What the training ranks of a push tell each other: whether one of them has failed."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.backends.sglang.client import EngineError

_numbers = itertools.count()
"""One of each that this process has made: the ranks make theirs in the same order."""


class OtherRankError(EngineError):
    """What another rank has failed in, in its words."""


class Agreement:
    """Has every training rank know what any of them failed in, a few times a push.

    By way of the store at which the ranks have met, which costs each of them two short questions: a group of all would
    have to be of gloo, in which each rank holds a connection to each other, or of NCCL, which holds memory of the GPU.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        # A connection of its own: a question that waits holds up all others of its connection, such as NCCL's.
        store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"slime-weights-{next(_numbers)}", store)
        self._push, self._phase = 0, 0
        self._told: tuple[list[str], list[str]] = [], []
        """The keys of the push before and of this one."""
        self.words: dict[int, str] = {}
        """On rank 0, of each rank, what it said beside when they last agreed."""

    def begin(self) -> None:
        """Go on with the next push, wherever this rank has left the one before."""
        self._push, self._phase = self._push + 1, 0
        for key in self._told[0]:  # nobody waits in the push before the last one any more
            self._store.delete_key(key)
        self._told = self._told[1], []

    def tell(self, failure: Exception | None) -> None:
        """Tell the others, and do not wait for them, which this rank will not meet again in this push."""
        words = "" if failure is None else str(failure) or repr(failure)
        self._set(self._rank, words)
        if self._rank == 0 and failure is not None:
            self._set(None, words)

    def settle(self, failure: Exception | None, timeout: float, words: str = "") -> Exception | None:
        """Wait ``timeout`` seconds until every rank has told (collective): this rank's ``failure``, otherwise an
        OtherRankError with the words of the first that has one. EngineError names those that have told nothing in
        time. Rank 0 is told the ``words`` of each, where they have any."""
        if words:
            self._set(f"{self._rank}/words", words)
        self.tell(failure)
        everyone = range(self._world_size) if self._rank == 0 else [None]
        keys = [self._key(rank) for rank in everyone]
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            missing = [str(rank or 0) for rank, key in zip(everyone, keys, strict=True) if not self._store.check([key])]
            raise EngineError(f"no word within {timeout:.0f} s from training rank {', '.join(missing)}") from error
        reason = next(filter(None, self._store.multi_get(keys)), b"")
        if self._rank == 0:
            self._set(None, reason.decode())
            if words and not reason:  # then each rank has come here, and said them before it told
                said = self._store.multi_get([self._key(f"{rank}/words") for rank in range(self._world_size)])
                self.words = {rank: each.decode() for rank, each in enumerate(said)}
        self._phase += 1
        return failure or (OtherRankError(reason.decode()) if reason else None)

    def _set(self, rank: int | str | None, words: str) -> None:
        key = self._key(rank)
        self._store.set(key, words)
        self._told[1].append(key)

    def _key(self, rank: int | str | None) -> str:
        return f"{self._push}/{self._phase}/{'all' if rank is None else rank}"
