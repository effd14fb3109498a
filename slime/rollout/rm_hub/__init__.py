"""Rewards: the built-in ones by ``--rm-type``, and a user's by ``--custom-rm-path``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from numbers import Real
from typing import Any

from slime.data import Sample
from slime.grading.answers import last_boxed
from slime.grading.graders import ASKS_A_SERVER, BOXED, BOXED_GRADERS, GRADERS, remote_reward, rm_type_problem
from slime.options.rollout import GROUP_REWARD_NAMES, REWARD_CALLS, REWARD_NAMES
from slime.rollout.engine.loop import run_all
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.special_tokens import response_without_special_tokens
from slime.rollout.user.hooks import Limit, call_hook, within
from slime.utils.calls import CallError, form_of
from slime.utils.errors import BadInputError, HookError
from slime.utils.misc import load_function

__all__ = [
    "Reward",
    "async_rm",
    "batched_async_rm",
    "built_in_reward",
    "grade_answer_verl",
    "judge_of",
    "remote_rm",
    "response_without_special_tokens",
]


Reward = float | dict[str, Any] | None

_, MANY = REWARD_CALLS


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample; ``kwargs`` are passed on to a user's function.

    Who computes it: ``sample.custom_rm_path``, else ``--custom-rm-path``, else ``metadata["rm_type"]``, else
    ``--rm-type``. Those by name judge the response without special tokens, with the prefix ``boxed_`` only the content
    of its last box. A user's function that takes a list gets one with this sample alone. BadInputError where nothing is
    configured, or an unknown ``rm_type``; HookError where the function failed or gave no reward; DeadlineError past
    ``--reward-timeout``.
    """
    hook = hook_of(args, sample)
    if hook is None:
        return await built_in_reward(args, sample)
    (reward,) = await custom_rewards(args, [sample], *hook, kwargs)
    return reward


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """The rewards of several samples, in their order; each is judged as by `async_rm`, all at the same time.

    A user's function that takes a list gets in one call all those samples that it judges. The first failure cancels
    what is still running.
    """
    hooks = [hook_of(args, sample) for sample in samples]
    together: dict[object, list[int]] = {}
    for place, hook in enumerate(hooks):
        together.setdefault(place if hook is None else hook[0], []).append(place)

    async def judge(places: list[int]) -> list[Reward]:
        judged, hook = [samples[place] for place in places], hooks[places[0]]
        if hook is None:
            return [await built_in_reward(args, judged[0])]
        return await custom_rewards(args, judged, *hook, kwargs)

    rewards = chain(*await run_all([judge(places) for places in together.values()]))
    by_place = dict(zip(chain(*together.values()), rewards, strict=True))
    return [by_place[place] for place in range(len(samples))]


async def remote_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """Upstream's name for ``--rm-type remote_rm`` (`remote_reward`)."""
    reply: Reward = await remote_reward(args, sample, response_without_special_tokens(args, sample))
    return reply


def judge_of(args: Namespace, sample: Sample) -> str:
    """Who computes a sample's reward, as messages name it."""
    hook = hook_of(args, sample)
    if hook is None:
        return f"rm_type {_rm_type(args, sample)}"
    path, flag = hook
    return f"{flag} {path}"


def _rm_type(args: Namespace, sample: Sample) -> str | None:
    return sample.metadata.get("rm_type") or args.rm_type


async def built_in_reward(args: Namespace, sample: Sample) -> Reward:
    """That of ``metadata["rm_type"]``, else of ``--rm-type``; BadInputError where there is none of that name."""
    name = _rm_type(args, sample)
    if not name:
        raise BadInputError(
            f"there is no reward for sample {sample.index}: give --rm-type, --custom-rm-path or metadata['rm_type']"
        )
    if (problem := rm_type_problem(name)) is not None:
        raise BadInputError(problem)
    bare, response = name.removeprefix(BOXED), response_without_special_tokens(args, sample)
    grader = GRADERS[bare]
    if name != bare and bare in BOXED_GRADERS:
        grader = BOXED_GRADERS[bare]
    elif name != bare:
        response = last_boxed(response) or ""
    if bare not in ASKS_A_SERVER:
        return await grader(args, sample, response)
    return await within(limit_of(args, f"sample {sample.index} by rm_type {name}"), grader(args, sample, response))


def hook_of(args: Namespace, sample: Sample) -> tuple[str, str] | None:
    """(path, flag) of the user's function that judges ``sample``; None where a built-in reward does."""
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "Sample.custom_rm_path"
    return None if args.custom_rm_path is None else (args.custom_rm_path, "--custom-rm-path")


async def custom_rewards(
    args: Namespace, samples: Sequence[Sample], path: str, flag: str, kwargs: dict[str, Any]
) -> list[Reward]:
    """The rewards of ``samples`` by one function: in one call where it takes a list, else in one each, all at once.
    HookError for its parameters, its answer or what it raised, DeadlineError past ``--reward-timeout``."""
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
