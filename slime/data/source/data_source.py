"""Where prompts come from: an endless, reproducible stream of groups over a data set, and a buffer in front of it."""

from __future__ import annotations

import abc
import logging
import pickle
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from slime.data import Group, Sample
from slime.data.rows.dataset import PromptDataset, load_prompts, train_prompt_spec
from slime.data.sample import flatten_samples
from slime.data.source.buffer_choice import Choice, is_group
from slime.data.source.changed_data import changed_group_size, cursor_over, resized
from slime.data.source.numbers import fill_numbers, numbers_kept
from slime.data.source.rollout_context import current_rollout
from slime.options.data import DEFAULT_SOURCE
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.misc import load_function
from slime.utils.user_functions import naming

logger = logging.getLogger(__name__)


class DataSource(abc.ABC):
    """What ``--data-source-path`` names a subclass of.

    The state of `RolloutDataSource` and its subclasses (`state_dict`) goes into the run's checkpoint. `save` and `load`
    are for what a class keeps besides: those that it defines itself, subclasses of `RolloutDataSource` included, are
    called with every checkpoint and on resume, and decide for themselves where they write.
    """

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """The next ``num_samples`` groups (prompts), each of ``--n-samples-per-prompt`` samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to be handed out again."""

    def save(self, rollout_id: int) -> None:  # noqa: B027
        """Write own state; called after rollout ``rollout_id``."""

    def load(self, rollout_id: int | None = None) -> None:  # noqa: B027
        """Read what `save` wrote."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of prompts in an epoch."""


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data`` in the order of a shuffle per epoch, as many epochs as asked for.

    ``RolloutDataSource(args)``, or ``RolloutDataSource(dataset, args)`` over any sequence of samples.

    A group that was handed out is *in flight* until it is trained, dropped or put back. A checkpoint holds those groups
    as they were handed out, and a resumed run gets them first: so none is lost, whatever was under way.
    """

    def __init__(self, *dataset_and_args: Any) -> None:
        *given, args = dataset_and_args
        self.args: Namespace = args
        self.dataset: Sequence[Sample] | PromptDataset = given[0] if given else self._load(args)
        self.num_bad = getattr(self.dataset, "num_bad", 0)
        """Rows left out by ``--skip-bad-rows``."""
        self.num_too_long = getattr(self.dataset, "num_too_long", 0)
        """Rows left out by ``--rollout-max-prompt-len``."""
        self.lock = threading.RLock()
        """Held by every method that changes the source: rollouts under way use it from several threads."""
        self.metadata: dict[str, Any] = {}
        """What hooks keep by `update_metadata`."""
        self.num_trained = 0
        """Groups that were handed to the trainer, in the whole run."""
        self.num_dropped: Counter[str] = Counter()
        """Groups that were thrown away, by reason."""
        self.num_added = 0
        """Groups that nobody had handed out: copies, and others of a user's code."""
        self._epoch = 0
        self._cursor = 0
        self.num_read = 0
        """Groups made of the data, in the whole run."""
        self._num_samples = 0
        self._order = self._shuffled(0)
        self._in_flight: dict[int | None, list[tuple[int | None, bytes]]] = {}
        """By group_index, in the order of handing out: for which rollout, and the group as it was then."""
        self._again: list[Group] = []
        """What was in flight when the checkpoint was written, to be handed out before anything else."""

    @property
    def rollout_id(self) -> int | None:
        """The rollout that asks; several may be under way."""
        return current_rollout()

    @staticmethod
    def _load(args: Namespace) -> Sequence[Sample] | PromptDataset:
        if args.disable_rollout_global_dataset:
            return [Sample()]  # the rollout function fills it in
        if not args.prompt_data:
            raise BadInputError("--prompt-data is missing")
        return load_prompts(train_prompt_spec(args))

    def __len__(self) -> int:
        return len(self.dataset)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Row order of an epoch, by a generator of its own: the global ones belong to the user's code."""
        if not self.args.rollout_shuffle:
            return np.arange(len(self))
        return np.random.default_rng([self.args.rollout_seed, epoch]).permutation(len(self))

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next ``num_samples`` groups; beyond the end of the data the next epoch begins, as often as needed."""
        with self.lock:
            again = self._hand_again(num_samples)
            return again + self._hand_out([self._next_group() for _ in range(num_samples - len(again))])

    def _hand_again(self, num_samples: int) -> list[Group]:
        taken, self._again = self._again[:num_samples], self._again[num_samples:]
        return self._hand_out(taken)

    def _hand_out(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            entries = self._in_flight.setdefault(group[0].group_index, [])
            entries.append((current_rollout(), pickle.dumps(group)))
        return groups

    def adopt(self, groups: list[Group]) -> None:
        """Number groups that a subclass or a user gave without numbers, and count them as read and handed out."""
        with self.lock:
            self._hand_out([group for group in groups if self._number(group)])

    def _number(self, group: Group) -> bool:
        return fill_numbers(group, self._next_number, self._next_index)

    def _next_number(self) -> int:
        self.num_read += 1
        return self.num_read - 1

    def _next_index(self) -> int:
        self._num_samples += 1
        return self._num_samples - 1

    def _came_back(self, samples: Iterable[Sample]) -> None:
        """Take groups out of those in flight; one that is not among them came from a user's code, and is added."""
        for group_index in {sample.group_index for sample in samples}:
            entries = self._in_flight.get(group_index)
            if not entries:
                self.num_added += 1
                continue
            entries.pop(0)
            if not entries:
                del self._in_flight[group_index]

    def _next_group(self) -> Group:
        # Copies that share nothing; far faster than deepcopy for long token lists.
        if self._cursor == len(self._order):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        prompt = pickle.dumps(self.dataset[int(self._order[self._cursor])])
        self._cursor += 1
        group: Group = [pickle.loads(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:  # a data set of the user's own may have given some
            sample.group_index = sample.index = sample.rollout_id = None
        self._number(group)
        return group

    def add_samples(self, samples: list[Group]) -> None:
        """Refused, by a RuntimeError: this source has no buffer."""
        if samples:
            raise RuntimeError(
                f"{type(self).__name__} has no buffer to take {len(samples)} groups back into; use "
                f"--data-source-path {DEFAULT_SOURCE}"
            )

    def hand_out_again(self) -> None:
        """Hand out once more, before anything else and as it was, what is in flight: nobody works on it any longer."""
        with self.lock:
            in_flight = [pickle.loads(group) for entries in self._in_flight.values() for _, group in entries]
            self._in_flight, self._again = {}, [*in_flight, *self._again]

    def get_buffer_length(self) -> int:
        """Number of groups that wait here to be handed out before new prompts."""
        return len(self._again)

    def num_in_flight(self, after: int = -1) -> int:
        """Groups in flight, less those that were handed out for rollouts up to ``after``."""
        with self.lock:
            rollouts = [rollout_id for entries in self._in_flight.values() for rollout_id, _ in entries]
        return sum(rollout_id is None or rollout_id > after for rollout_id in rollouts)

    def as_handed_out(self, group_index: int | None) -> Group | None:
        """A copy of a group in flight as it was handed out; None where there is none of that index."""
        with self.lock:
            entries = self._in_flight.get(group_index)
        return pickle.loads(entries[0][1]) if entries else None

    def count_trained(self, samples: Sequence[Sample]) -> None:
        """Note that these samples go to the trainer; samples of one ``group_index`` are one group."""
        with self.lock:
            self.num_trained += len({sample.group_index for sample in samples})
            self._came_back(samples)

    def count_dropped(self, groups: Sequence[Group], reason: str) -> None:
        """Note that these groups are thrown away: for rollout functions and buffers that choose among groups."""
        if groups:
            with self.lock:
                self.num_dropped[reason] += len(groups)
                self._came_back(flatten_samples(groups))

    def get_metadata(self) -> dict[str, Any]:
        """What `update_metadata` has put there; checkpoints keep it."""
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep plain values of a hook's own with the run's position in the data."""
        self.metadata.update(metadata)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next, and where the prompts went, as plain values."""
        with self.lock:
            handed_out = [pickle.loads(group) for entries in self._in_flight.values() for _, group in entries]
            return {
                "epoch": self._epoch,
                "cursor": self._cursor,
                "num_groups": self.num_read,
                "num_samples": self._num_samples,
                "num_added": self.num_added,
                "num_trained": self.num_trained,
                "num_dropped": dict(self.num_dropped),
                "in_flight": _as_dicts([*handed_out, *self._again]),
                "metadata": dict(self.metadata),
                "num_prompts": len(self),
                "prompts_digest": getattr(self.dataset, "digest", None),
                "n_samples_per_prompt": int(self.args.n_samples_per_prompt),
                "shuffle": [bool(self.args.rollout_shuffle), int(self.args.rollout_seed)],
            }

    def going_on(self, state: dict[str, Any]) -> tuple[int, list[str]]:
        """Where in its epoch it would go on from a state, and what is other than then of rows, shuffle or sizes of
        groups, in lines. BadInputError where the position lies beyond the data, or the state has what would be lost."""
        self._check_buffer(state)
        cursor, warning = cursor_over(state, self.state_dict(), restart=self.args.restart_epoch)
        waiting = len(state.get("in_flight", [])) + len(state.get("buffer", []))
        lines = warning, changed_group_size(state, waiting, self.args.n_samples_per_prompt)
        return cursor, [line for line in lines if line is not None]

    def _check_buffer(self, state: dict[str, Any]) -> None:
        if state.get("buffer"):
            raise BadInputError(
                f"the checkpoint has {len(state['buffer'])} groups in its buffer, and {type(self).__name__} has none: "
                f"resume with the --data-source-path it was made with, such as {DEFAULT_SOURCE}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; what `going_on` says of that is warned of."""
        cursor, warnings = self.going_on(state)
        for line in warnings:
            logger.warning(line)
        self._epoch, self._cursor = state["epoch"], cursor
        self.num_read, self._num_samples = state["num_groups"], state["num_samples"]
        self.num_added = state["num_added"]
        self.num_trained, self.num_dropped = state["num_trained"], Counter(state["num_dropped"])
        self.metadata = dict(state.get("metadata", {}))
        self._order = self._shuffled(self._epoch)
        self._in_flight, self._again = {}, self._waiting(state, "in_flight")

    def _waiting(self, state: dict[str, Any], name: str) -> list[Group]:
        groups = [[Sample.from_dict(fields) for fields in group] for group in state.get(name, [])]
        size = self.args.n_samples_per_prompt
        if (former := state.get("n_samples_per_prompt", size)) != size:
            together = self.args.group_rm
            groups = [resized(group, former, size, judged_together=together) for group in groups]
            for group in groups:
                self._number(group)
        return groups


def _as_dicts(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[sample.to_dict() for sample in group] for group in groups]


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A `RolloutDataSource` that takes groups back and hands them out again before new prompts."""

    def __init__(self, *dataset_and_args: Any) -> None:
        super().__init__(*dataset_and_args)
        self.buffer: list[Group] = []

    def buffer_filter(self, args: Namespace, buffer: list[Group], num_samples: int) -> list[Group]:
        """Choose up to ``num_samples`` groups and take them out of ``buffer``, as ``--buffer-filter-path`` does.

        For subclasses to override; such a method may leave what it returns in the buffer, as the API document's does.
        What is taken out and not returned is thrown away.
        """
        path = args.buffer_filter_path
        if path is None:
            return pop_first(args, self.rollout_id, buffer, num_samples)
        function = load_function(path, flag="--buffer-filter-path")
        with naming(f"--buffer-filter-path {path}"):
            return function(args, self.rollout_id, buffer, num_samples)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups of the buffer, as `buffer_filter` chooses them, then new ones. BadInputError where it may not choose
        so (`Choice.settle`), HookError where it raised; the buffer is then as it was."""
        with self.lock:
            again = self._hand_again(num_samples)
            wanted = num_samples - len(again)
            groups = self._choose(wanted) if self.buffer and wanted else []
            return again + self._hand_out(groups) + super().get_samples(wanted - len(groups))

    def _choose(self, wanted: int) -> list[Group]:
        own_method = type(self).buffer_filter is not RolloutDataSourceWithBuffer.buffer_filter
        where = f"--buffer-filter-path {self.args.buffer_filter_path}"
        if own_method:
            where = f"{type(self).__name__}.buffer_filter (--data-source-path)"
        before = self.buffer
        choice = Choice(before, wanted, where, pops=not own_method)
        try:
            with numbers_kept(flatten_samples(before), where), naming(where, passes=SlimeError):
                self.buffer = choice.views
                chosen = self.buffer_filter(self.args, self.buffer, wanted)
            choice.settle(chosen, self.buffer)
            before[:] = choice.left
        finally:
            self.buffer = before  # after an error as it was: what the filter has popped is not lost with it
        if choice.num_dropped:
            self.num_dropped["buffer_filter"] += choice.num_dropped
        self._number_added(choice.made)
        return choice.chosen

    def add_samples(self, samples: list[Group]) -> None:
        """Append groups, non-empty lists of samples of whatever number; TypeError for anything else."""
        for group in samples:
            if not is_group(group):
                raise TypeError(f"add_samples takes non-empty lists of Sample, got {group!r:.120}")
        with self.lock:
            self._number_added(samples)
            self.buffer.extend(samples)

    def _number_added(self, groups: list[Group]) -> None:
        for group in groups:
            if not self._number(group):
                self._came_back(group)

    def get_buffer_length(self) -> int:
        """Number of groups that wait here to be handed out before new prompts, those in the buffer included."""
        return super().get_buffer_length() + len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        """`RolloutDataSource.state_dict` and the buffer, unfinished samples included."""
        with self.lock:
            return super().state_dict() | {"buffer": _as_dicts(self.buffer)}

    def _check_buffer(self, state: dict[str, Any]) -> None:
        if "buffer" not in state:
            had = f"the checkpoint's data source had no buffer, {type(self).__name__} has one"
            raise BadInputError(f"{had}: resume with the --data-source-path it was made with")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`RolloutDataSource.load_state_dict`; the state of a class without a buffer is refused too."""
        super().load_state_dict(state)
        self.buffer = self._waiting(state, "buffer")


def pop_first(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """First in, first out."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
