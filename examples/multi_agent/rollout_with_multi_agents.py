"""Several agents, one model: solvers answer, rewriters improve on all answers, a selector picks the final one.

One rollout becomes a list of samples, one an agent, which share ``rollout_id``: the loss averages within a rollout
first, so that a rollout with more agents does not weigh more. Each sample has a prompt, a loss mask, a reward and
metadata of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from argparse import Namespace
from collections.abc import Coroutine, Iterable
from typing import Any

from slime.grading.graders import math_reward
from slime.rollout.observation import response_text
from slime.rollout.sampling import request_seed
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.types import Sample

SOLVER, REWRITER, SELECTOR = ROLES = ("solver", "rewriter", "selector")
CHOICE = re.compile(r"\\boxed\{\s*(\d+)\s*\}")


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Flags of this example; slime adds them because a ``--custom-*-path`` names this module."""
    parser.add_argument("--agents-solvers", type=int, default=3, help="Solvers of a rollout.")
    parser.add_argument("--agents-rewriters", type=int, default=2, help="Rewriters of a rollout.")
    parser.add_argument("--agents-trained", nargs="+", choices=ROLES, default=list(ROLES), help="Whose tokens train.")
    parser.add_argument(
        "--agents-team-weight", type=float, default=0.2, help="Share of each reward that is the final answer's."
    )


def solver_prompt(question: str) -> str:
    """What a solver is asked."""
    return question


def rewriter_prompt(question: str, answers: list[str]) -> str:
    """What a rewriter is asked."""
    return "\n".join([question, *answers, "Improve."])


def selector_prompt(question: str, answers: list[str]) -> str:
    """What the selector is asked; it answers with a number in a box."""
    return "\n".join([question, *(f"{number}: {answer}" for number, answer in enumerate(answers, 1)), "Which?"])


async def generate_with_multi_agents(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """All agents' samples, rewarded; in an evaluation the final answer's alone, with the reward of that."""
    question = sample.prompt[-1]["content"] if isinstance(sample.prompt, list) else sample.prompt
    solutions = await _all(
        _ask(args, sample, sampling_params, SOLVER, number, solver_prompt(question))
        for number in range(args.agents_solvers)
    )
    answers = [answer_of(args, part) for part in solutions]
    rewrites = await _all(
        _ask(args, sample, sampling_params, REWRITER, number, rewriter_prompt(question, answers))
        for number in range(args.agents_rewriters)
    )
    candidates = [part for part in rewrites if part.response_length] or solutions
    answers = [answer_of(args, part) for part in candidates]
    selector = await _ask(args, sample, sampling_params, SELECTOR, 0, selector_prompt(question, answers))
    if any(part.status is Sample.Status.ABORTED for part in (*solutions, *rewrites, selector)):
        # The rollout ends here. Nothing of half a discussion is kept: a later rollout begins it anew.
        sample.status = Sample.Status.ABORTED
        return [sample]
    final = chosen(selector, candidates)
    await reward_all(args, [*solutions, *rewrites], selector, final)
    if evaluation:
        result = final or selector
        result.reward = result.metadata["team_score"]
        return [result]
    # An agent whose prompt left it no room has said nothing, and there is nothing to train.
    parts = [part for part in (*solutions, *rewrites, selector) if part.response_length]
    for part in parts:
        if part.metadata["agent"] not in args.agents_trained:
            part.loss_mask = [0] * part.response_length
    return parts


async def _all(asks: Iterable[Coroutine[Any, Any, Sample]]) -> list[Sample]:
    """The samples of agents that work at the same time; where one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask) for ask in asks]
    return [task.result() for task in tasks]


async def _ask(
    args: Namespace, origin: Sample, sampling_params: dict[str, Any], role: str, number: int, text: str
) -> Sample:
    """One agent's response, as a sample of the rollout of ``origin``."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    part = Sample(
        group_index=origin.group_index,
        index=origin.index,
        rollout_id=origin.rollout_id,
        prompt=prompt,
        tokens=tokenizer(prompt, add_special_tokens=False)["input_ids"],
        label=origin.label,
        metadata={**origin.metadata, "agent": role, "agent_number": number},
    )
    if "sampling_seed" in sampling_params:
        # Agents of one role have the same prompt: with one seed a deterministic engine would answer them all alike.
        sampling_params = sampling_params | {
            "sampling_seed": request_seed(sampling_params["sampling_seed"], role, number)
        }
    return await generate_turn(args, part, sampling_params)


def answer_of(args: Namespace, part: Sample) -> str:
    """The text of a response as other agents get to read it: without end-of-turn tokens, which would end theirs."""
    return response_text(args, part, skip_special_tokens=True).strip()


def chosen(selector: Sample, candidates: list[Sample]) -> Sample | None:
    """The candidate whose number the selector boxed last; None where there is no such number."""
    numbers = CHOICE.findall(selector.response)
    position = int(numbers[-1]) if numbers else 0
    return candidates[position - 1] if 1 <= position <= len(candidates) else None


async def reward_all(args: Namespace, answering: list[Sample], selector: Sample, final: Sample | None) -> None:
    """Give every agent its own score, mixed by ``--agents-team-weight`` with whether the final answer is right.

    The own score of those who answer is whether they are right; the selector's is the team's.
    """
    scores = [await math_reward(args, part, part.response) for part in answering]
    team = next((score for part, score in zip(answering, scores, strict=True) if part is final), 0.0)
    weight = args.agents_team_weight
    for part, score in zip([*answering, selector], [*scores, team], strict=True):
        part.metadata |= {"own_score": score, "team_score": team}
        part.reward = (1 - weight) * score + weight * team
