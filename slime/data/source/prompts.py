"""Groups from a data source of whatever kind, and back into it."""

from __future__ import annotations

import itertools
import pickle
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.data import Group, Sample
from slime.data.sample import begun_anew
from slime.data.source.buffer_choice import is_group
from slime.data.source.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.data.source.numbers import fill_numbers
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.user_functions import naming

_numbers = itertools.count(1 << 40)
"""For samples to which a user's own data source gave no numbers; far from those that it may have given to others."""


def draw_groups(args: Namespace, data_source: Any, num_groups: int) -> list[Group]:
    """The next groups of a data source; BadInputError where it gave another number of them, or something else.

    A user's source may give groups, or a flat list of samples: those of one ``group_index`` are then a group, and
    samples without one are prompts, each to be answered ``--n-samples-per-prompt`` times.
    """
    with naming(f"--data-source-path {args.data_source_path}", passes=SlimeError):
        drawn = data_source.get_samples(num_groups)
    groups = as_groups(args, drawn)
    if len(groups) != num_groups:
        raise BadInputError(
            f"--data-source-path {args.data_source_path}: get_samples({num_groups}) gave {len(groups)} groups"
        )
    if isinstance(data_source, RolloutDataSource):
        data_source.adopt(groups)
    else:
        for group in groups:
            fill_numbers(group, _numbers.__next__, _numbers.__next__)
    return groups


def as_groups(args: Namespace, drawn: Any) -> list[Group]:
    """What a data source may give, as groups."""
    if not isinstance(drawn, Sequence):
        raise BadInputError(
            f"--data-source-path {args.data_source_path}: get_samples must return a list of groups (lists of Sample) "
            f"or of Sample, not {drawn!r:.120}"
        )
    if all(isinstance(entry, Sample) for entry in drawn):
        return _grouped(args, drawn)
    for entry in drawn:
        if not is_group(entry):
            raise BadInputError(
                f"--data-source-path {args.data_source_path}: a group must be a non-empty list of Sample, not "
                f"{entry!r:.120}"
            )
    return list(drawn)


def _grouped(args: Namespace, samples: Sequence[Sample]) -> list[Group]:
    if any(sample.group_index is None for sample in samples):
        prompts = [pickle.dumps(sample) for sample in samples]
        return [[pickle.loads(prompt) for _ in range(args.n_samples_per_prompt)] for prompt in prompts]
    groups: dict[Any, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def put_back(data_source: Any, groups: list[Group]) -> None:
    """Return groups that were not trained; a source without a buffer counts them as dropped."""
    if not groups:
        return
    if isinstance(data_source, RolloutDataSource) and not isinstance(data_source, RolloutDataSourceWithBuffer):
        data_source.count_dropped(groups, "no_buffer")
    else:
        with naming(f"{type(data_source).__name__}.add_samples (--data-source-path)", passes=SlimeError):
            data_source.add_samples(groups)


def as_prompts(data_source: Any, group: Group) -> Group:
    """A group without its responses: as it was handed out, where the data source knows, else one sample a rollout."""
    handed_out = data_source.as_handed_out(group[0].group_index) if isinstance(data_source, RolloutDataSource) else None
    return begun_anew(handed_out or group)


def count_dropped(data_source: Any, group: Group, reason: str) -> None:
    """Tell a source that counts that a group is thrown away."""
    if isinstance(data_source, RolloutDataSource):
        data_source.count_dropped([group], reason)
