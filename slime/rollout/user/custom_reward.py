"""Rewards by a user's function: told apart by its parameters, called under its deadline, its answer checked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from numbers import Real
from typing import Any

from slime.data import Sample
from slime.options.flags.calls import CallError, form_of
from slime.options.rollout import GROUP_REWARD_NAMES, REWARD_CALLS, REWARD_NAMES
from slime.rollout.engine.loop import run_all
from slime.rollout.user.hooks import Limit, call_hook
from slime.utils.errors import HookError
from slime.utils.misc import load_function

Reward = float | dict[str, Any] | None

_, MANY = REWARD_CALLS


def hook_of(args: Namespace, sample: Sample) -> tuple[str, str] | None:
    """(path, flag) of the user's function that judges ``sample``; None where a built-in reward does."""
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "Sample.custom_rm_path"
    return None if args.custom_rm_path is None else (args.custom_rm_path, "--custom-rm-path")


async def custom_rewards(
    args: Namespace, samples: Sequence[Sample], path: str, flag: str, kwargs: dict[str, Any]
) -> list[Reward]:
    """The rewards of ``samples`` by one function: in one call where it takes a list, else in one each, all at once.

    Raises HookError for its parameters, its answer or what it raised, DeadlineError past ``--reward-timeout``.
    """
    where = f"{flag} {path}"
    function = load_function(path, flag=flag, default_names=GROUP_REWARD_NAMES if args.group_rm else REWARD_NAMES)
    try:
        takes_list = form_of(function, REWARD_CALLS, where) is MANY
    except CallError as error:  # of a path in the data, which is not looked at with the flags
        raise HookError(str(error)) from None
    if takes_list:
        limit = limit_of(args, f"samples {_indices(samples)} by {where}")
        answer = await call_hook(function, where, args, list(samples), limit=limit, **kwargs)
        return _checked_list(answer, len(samples), where)

    async def one(sample: Sample) -> Reward:
        limit = limit_of(args, f"sample {sample.index} by {where}")
        answer = await call_hook(function, where, args, sample, limit=limit, **kwargs)
        return _checked(answer, f"{where} must return")

    return await run_all([one(sample) for sample in samples])


def _checked_list(answer: Any, count: int, where: str) -> list[Reward]:
    if not isinstance(answer, list | tuple):
        raise HookError(f"{where} must return a list of {count} rewards, one a sample (`{MANY}`), not {answer!r:.120}")
    if len(answer) != count:
        raise HookError(
            f"{where} must return as many rewards as it was given samples, {count} (`{MANY}`), not {len(answer)}: "
            f"{answer!r:.120}"
        )
    return [_checked(reward, f"{where} must return a list whose entry {i} is") for i, reward in enumerate(answer)]


def _checked(reward: Any, must: str) -> Reward:
    """A plain number or dict; numpy's and torch's scalars become floats."""
    if reward is None or isinstance(reward, dict):
        return reward
    if isinstance(reward, Real) or getattr(reward, "ndim", None) == 0:
        return float(reward)
    raise HookError(f"{must} a number or a dict, not {reward!r:.120}")


def _indices(samples: Sequence[Sample]) -> str:
    shown = ", ".join(str(sample.index) for sample in samples[:8])
    return shown if len(samples) <= 8 else f"{shown} and {len(samples) - 8} more"


def limit_of(args: Namespace, what: str) -> Limit:
    """How long the judgement of ``what`` may take."""
    return Limit(args.reward_timeout, "--reward-timeout", f"the reward of {what}")
