"""What is other on a resume than the data source's state in the checkpoint has it."""

from __future__ import annotations

import pickle
from typing import Any

from slime.data import Group
from slime.data.sample import begun_anew
from slime.utils.errors import BadInputError

_RESTART = "--restart-epoch begins this epoch anew with the data as it is now"


def cursor_over(then: dict[str, Any], now: dict[str, Any], *, restart: bool) -> tuple[int, str | None]:
    """Where in its epoch a run goes on, and a warning if its data changed, where ``restart`` begins the epoch anew.
    BadInputError where the position lies beyond the data."""
    cursor, names = then["cursor"], ["num_prompts", "shuffle"]
    if then.get("prompts_digest") and now.get("prompts_digest"):  # not in states of earlier versions
        names.append("prompts_digest")
    changed = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in names if then[name] != now[name])
    if not changed:
        return cursor, None
    if restart:
        return 0, f"--restart-epoch: epoch {then['epoch']} begins anew, since the prompts have changed ({changed})"
    if cursor > now["num_prompts"]:
        raise BadInputError(
            f"--prompt-data has {now['num_prompts']} prompts, the checkpoint was {cursor} into an epoch of "
            f"{then['num_prompts']}: resume with the data it was made with, or {_RESTART}"
        )
    return cursor, (
        f"resuming over other prompts than the checkpoint's ({changed}): the run goes on {cursor} prompts into its "
        f"epoch, whichever these are now, so that some may be trained twice and others not at all; {_RESTART}"
    )


def changed_group_size(then: dict[str, Any], waiting: int, size: int) -> str | None:
    """A warning if groups that wait in a checkpoint were made with another ``--n-samples-per-prompt`` than ``size``.

    The state ``then`` has no such size where an earlier version wrote it.
    """
    former = then.get("n_samples_per_prompt", size)
    if former == size or not waiting:
        return None
    change = f"cut to {size} samples" if size < former else f"given {size - former} more samples each"
    return (
        f"--n-samples-per-prompt is {size}, and {waiting} groups that wait in the checkpoint were made with {former}: "
        f"those of {former} are {change}"
    )


def resized(group: Group, former: int, size: int, *, judged_together: bool) -> Group:
    """A group of ``former`` rollouts of one prompt with ``size``: the first ones of it, and where it has too few as
    many more, which have no numbers of their own yet. Any other group, which a user's code has made, as it is.

    With ``judged_together`` (``--group-rm``) rewards are taken back: they were of other samples beside these.
    """
    rollouts = list(dict.fromkeys(sample.rollout_id for sample in group))
    if len(rollouts) != former or any(sample.prompt != group[0].prompt for sample in group):
        return group
    kept = [sample for sample in group if sample.rollout_id in rollouts[:size]]
    for sample in kept if judged_together else ():
        sample.reward = None
    prompt = pickle.dumps(group[0])
    for _ in range(size - former):
        (more,) = begun_anew([pickle.loads(prompt)])
        more.index = more.rollout_id = more.session_id = more.trace = None
        kept.append(more)
    return kept
