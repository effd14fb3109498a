"""What trainers write of a run: checkpoints, Hugging Face directories and adapters, each aside until it is whole."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.files import atomic_io
from slime.files.checkpoints import checkpoint_directory
from slime.files.exports import exports_after
from slime.fleet.train_group import TrainGroup
from slime.ray.supervision import Deadline, limit_of


class Saver:
    """Has trainers write, and knows what they have not finished."""

    def __init__(self, args: argparse.Namespace, trainers: TrainGroup) -> None:
        self._args, self._trainers = args, trainers
        self._unfinished: list[Path] = []

    @property
    def limit(self) -> Deadline:
        """Of whatever is saved."""
        return limit_of(self._args, "checkpoint_timeout")

    def save(self, rollout_id: int, state: dict[str, Any]) -> None:
        """Write what is asked for after a rollout; ``state`` is what a resumed run needs besides the trainers' own."""
        args, phase = self._args, f"save after rollout {rollout_id}"
        if args.save:
            saves = (args.save, args.critic_save if args.use_critic else None)
            values = [(rollout_id, None if rank else state) for rank in range(len(self._trainers.actors))]
            with self._staging([checkpoint_directory(each, rollout_id) for each in saves if each]):
                self._trainers.call_each(phase, "save", self.limit, values)
        self.export(rollout_id, exports_after(args, rollout_id), phase)

    def export(self, rollout_id: int, places: dict[str, str], phase: str) -> None:
        """Write the directories of ``places``, by the trainers' method that does."""
        for method, directory in places.items():
            with self._staging([Path(directory)]):
                self._trainers.call(phase, method, self.limit, directory, rollout_id)

    def clean_up(self) -> list[str]:
        """Remove what is unfinished, now that no trainer writes there: it would keep a full disk full. What could not
        be put back, for a warning: the disk that a save failed on may fail here too."""
        lost = []
        for final in self._unfinished:
            try:
                atomic_io.put_back(final)
            except OSError as error:
                why = error.strerror or str(error)
                lost.append(f"{final}: {why}; what was there before may be at {atomic_io.replaced(final)}")
            atomic_io.discard_directory(final)
        return lost

    @contextlib.contextmanager
    def _staging(self, finals: list[Path]) -> Iterator[None]:
        """Within, trainers write what becomes ``finals``; what is unfinished when that fails is left to `clean_up`."""
        self._unfinished = finals
        yield
        self._unfinished = []
