"""Rewards: the built-in ones by ``--rm-type``, and a user's by ``--custom-rm-path``."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from numbers import Real
from typing import Any

from slime.rollout.hooks import HookError, call_hook
from slime.rollout.rm_hub.answers import last_boxed
from slime.rollout.rm_hub.graders import ASKS_A_SERVER, GRADERS, TAKES_THE_BOX
from slime.utils.errors import BadInputError, DeadlineError
from slime.utils.misc import load_function
from slime.utils.types import Sample

Reward = float | dict[str, Any] | None

_BOXED = "boxed_"


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample.

    Who computes it: ``sample.custom_rm_path``, else ``--custom-rm-path``, else ``metadata["rm_type"]``, else
    ``--rm-type``. With the prefix ``boxed_`` only the content of the response's last ``\\boxed{}`` is judged.

    Raises:
        BadInputError: nothing is configured, or an unknown ``rm_type``.
        HookError: the user's function failed or returned no reward.
        DeadlineError: the user's function or ``--rm-url`` took longer than ``--reward-timeout``.
    """
    path, flag = args.custom_rm_path, "--custom-rm-path"
    if sample.custom_rm_path is not None:
        path, flag = sample.custom_rm_path, "Sample.custom_rm_path"
    if path is not None:
        return await _within(args, _custom(args, sample, path, flag, kwargs), f"sample {sample.index} by {flag} {path}")
    name = sample.metadata.get("rm_type") or args.rm_type
    if not name:
        raise BadInputError("there is no reward: give --rm-type, --custom-rm-path or metadata['rm_type']")
    bare = name.removeprefix(_BOXED)
    unbox = name != bare and bare not in TAKES_THE_BOX
    response = (last_boxed(sample.response) or "") if unbox else sample.response
    grader = GRADERS.get(bare)
    if grader is None:
        known = ", ".join(sorted(GRADERS))
        raise BadInputError(f"unknown rm_type {name!r}: there are {known}, each also as {_BOXED}<name>")
    if bare not in ASKS_A_SERVER:
        return await grader(args, sample, response)
    return await _within(args, grader(args, sample, response), f"sample {sample.index} by rm_type {name}")


async def _custom(args: Namespace, sample: Sample, path: str, flag: str, kwargs: dict[str, Any]) -> Reward:
    function = load_function(path, flag=flag, default_names=("reward_func", "custom_rm"))
    return _checked(await call_hook(function, f"{flag} {path}", args, sample, **kwargs), f"{flag} {path}")


def _checked(reward: Any, where: str) -> Reward:
    """A plain number or dict; numpy's and torch's scalars become floats."""
    if reward is None or isinstance(reward, dict):
        return reward
    if isinstance(reward, Real) or getattr(reward, "ndim", None) == 0:
        return float(reward)
    raise HookError(f"{where} must return a number or a dict, not {reward!r:.120}")


async def _within(args: Namespace, call: Any, what: str) -> Any:
    try:
        async with asyncio.timeout(args.reward_timeout) as deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(
            f"the reward of {what} took longer than {args.reward_timeout:g} s (--reward-timeout)"
        ) from error
