"""slime's own rollout: every sample generated through the router and rewarded, under one deadline."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data import Group
from slime.data.source.prompts import draw_groups
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.engine.generation import GenerateState, generate, prompt_tokens
from slime.rollout.engine.loop import background_loop
from slime.rollout.groups.collect import collect
from slime.rollout.groups.group import generate_and_rm, generate_and_rm_group
from slime.rollout.model_urls import get_model_url

__all__ = [
    "GenerateState",
    "draw_first_groups",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_groups",
    "generate_rollout",
    "get_model_url",
    "prompt_tokens",
]


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout of ``--rollout-batch-size`` groups, in the order of the data source; or an evaluation, with the
    version of its weights as ``rollout_id``. DeadlineError past ``--rollout-timeout``, which says how many samples were
    done and what was waited for; RequestError where engines refused, or died; HookError where a user's function failed,
    and ``--on-sample-error`` does not let the run go on."""
    if evaluation:
        from slime.rollout.evaluation import eval_rollout  # it generates by the functions below

        what = f"the evaluation of weight version {rollout_id} (--rollout-timeout)"
        return background_loop().run(eval_rollout(args, rollout_id), timeout=args.rollout_timeout, what=what)
    return generate_groups(args, rollout_id, data_source, draw_first_groups(args, data_source))


def draw_first_groups(args: Namespace, data_source: Any) -> list[Group]:
    """The groups that the next rollout begins with."""
    return draw_groups(args, data_source, args.over_sampling_batch_size or args.rollout_batch_size)


def generate_groups(
    args: Namespace, rollout_id: int, data_source: Any, groups: list[Group], wanted: int | None = None
) -> RolloutFnTrainOutput:
    """Generate and reward ``groups``, and others of ``data_source`` if need be, until ``wanted`` of them are kept;
    default: ``--rollout-batch-size``. Raises as `generate_rollout` does."""
    rollout = collect(args, rollout_id, data_source, groups, wanted or args.rollout_batch_size)
    what = f"rollout {rollout_id} (--rollout-timeout)"
    return background_loop().run(rollout, timeout=args.rollout_timeout, what=what, keeps_it=True)
