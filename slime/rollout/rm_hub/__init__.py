"""Rewards: the built-in ones by ``--rm-type``, and a user's by ``--custom-rm-path``."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from numbers import Real
from typing import Any

from slime.rollout.hooks import HookError, call_hook
from slime.rollout.rm_hub.answers import last_boxed
from slime.rollout.rm_hub.graders import GRADERS, TAKES_THE_BOX
from slime.utils.misc import load_function
from slime.utils.types import Sample

Reward = float | dict[str, Any] | None

_BOXED = "boxed_"


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample.

    Who computes it: ``sample.custom_rm_path``, else ``--custom-rm-path``, else ``metadata["rm_type"]``, else
    ``--rm-type``. With the prefix ``boxed_`` only the content of the response's last ``\\boxed{}`` is judged.

    Raises:
        ValueError: nothing is configured, or an unknown ``rm_type``.
        HookError: the user's function failed or returned no reward.
        TimeoutError: it took longer than ``--reward-timeout``.
    """
    path, flag = _custom_path(args, sample)
    if path is not None:
        return await _within(args, _custom(args, sample, path, flag, kwargs), f"sample {sample.index} by {flag} {path}")
    name = sample.metadata.get("rm_type") or args.rm_type
    if not name:
        raise ValueError("there is no reward: give --rm-type, --custom-rm-path or metadata['rm_type']")
    bare = name.removeprefix(_BOXED)
    unbox = name != bare and bare not in TAKES_THE_BOX
    response = (last_boxed(sample.response) or "") if unbox else sample.response
    grader = GRADERS.get(bare)
    if grader is None:
        known = ", ".join(sorted(GRADERS))
        raise ValueError(f"unknown rm_type {name!r}: there are {known}, each also as {_BOXED}<name>")
    return await _within(args, grader(args, sample, response), f"sample {sample.index} by rm_type {name}")


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """Rewards of a group: with ``--group-rm`` one call of ``--custom-rm-path`` with the list, else one by one.

    Raises:
        HookError: the user's function failed, or returned another number of rewards than there are samples.
    """
    path, flag = _custom_path(args, samples[0])
    if path is None or not getattr(args, "group_rm", False):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    function = load_function(path, flag=flag, default_names=("batched_custom_rm", "reward_func", "custom_rm"))
    call = call_hook(function, f"{flag} {path}", args, list(samples), **kwargs)
    rewards = await _within(args, call, f"group {samples[0].group_index} by {flag} {path}")
    if not isinstance(rewards, Sequence) or len(rewards) != len(samples):
        raise HookError(f"{flag} {path} must return a list of {len(samples)} rewards, not {rewards!r:.120}")
    return [_checked(reward, f"{flag} {path}") for reward in rewards]


def _custom_path(args: Namespace, sample: Sample) -> tuple[str | None, str]:
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "Sample.custom_rm_path"
    return args.custom_rm_path, "--custom-rm-path"


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
        raise TimeoutError(
            f"the reward of {what} took longer than {args.reward_timeout:g} s (--reward-timeout)"
        ) from error
