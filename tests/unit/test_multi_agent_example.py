"""examples/multi_agent: whose answer each agent sees, what it is rewarded for, and which are left out."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

from examples.multi_agent import rollout_with_multi_agents as agents
from slime.data import Sample, Status
from slime.rollout.base_types import flatten_samples
from slime.rollout.engine.state import rollout_state
from slime.rollout.groups.group import GroupRun
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from tests.fake_client import FakeClient, rollout
from tests.scripted_turns import Args, Use, example_args

NUM_GPUS = 0


class Agents(FakeClient):
    """Solvers and rewriters say 1 and 0 by turns; the selector always makes the same choice."""

    def __init__(self, args: Namespace, choice: str = "2") -> None:
        super().__init__(self._answer, seconds=0)
        self._tokenizer, self._choice, self.seeds = load_tokenizer(args.hf_checkpoint), choice, []

    def _answer(self, number: int, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        asked = self._tokenizer.decode(ids)
        self.seeds.append(params.get("sampling_seed"))
        digit = self._choice if "Which?" in asked else str(number % 2)
        text = f"\\boxed{{{digit}}}"
        tokens = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        pairs = [[-0.5, token, None] for token in tokens]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": pairs}
        return {"text": text + "<|im_end|>", "output_ids": tokens, "meta_info": meta}


def multi(make_args: Args, **changes: Any) -> Namespace:
    rows = {"num_prompts": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2}
    path = "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"
    return example_args(make_args, agents, **rows, custom_generate_function_path=path, **changes)


def test_agents_of_a_rollout(make_args: Args, use: Use) -> None:
    args = multi(make_args, sglang_enable_deterministic_inference=True, agents_trained=["solver", "selector"])
    client = use(Agents(args))
    (group,) = rollout(args).samples
    assert len(group) == 2
    for parts in group:
        roles = [part.metadata["agent"] for part in parts]
        assert roles == ["solver"] * 3 + ["rewriter"] * 2 + ["selector"]
        assert len({part.rollout_id for part in parts}) == 1
        for part in parts:
            assert part.loss_mask == [int(part.metadata["agent"] != "rewriter")] * part.response_length
            assert part.prompt.endswith("<|im_start|>assistant\n")
            assert part.prompt.count("<|im_end|>") == 1, "no agent's end of turn is in another one's prompt"
        right = [float(part.response == "\\boxed{1}<|im_end|>") for part in parts[:5]]
        team = float(parts[4].response == "\\boxed{1}<|im_end|>")
        assert [part.reward for part in parts] == pytest.approx([0.8 * r + 0.2 * team for r in [*right, team]])
    assert len({parts[0].rollout_id for parts in group}) == 2
    assert len(set(client.seeds)) == len(client.seeds) == 12, "equal seeds would give equal answers"


def test_evaluation_scores_the_final_answer(make_args: Args, use: Use) -> None:
    args = multi(make_args)
    for choice, label, reward in (("1", "0", 1.0), ("2", "0", 0.0), ("2", "1", 1.0), ("9", "0", 0.0), ("0", "0", 0.0)):
        use(Agents(args, choice))
        question = Sample(prompt=[{"role": "user", "content": "?"}], label=label)
        (part,) = asyncio.run(
            agents.generate_with_multi_agents(args, question, train_sampling_params(args), evaluation=True)
        )
        assert part.reward == reward, (choice, part.response)
        assert part.metadata["agent"] == ("rewriter" if choice in "12" else "selector")


def test_agents_without_room_are_left_out(make_args: Args, use: Use) -> None:
    args = multi(make_args, rollout_max_context_len=50)
    use(Agents(args))
    (group,) = rollout(args).samples
    assert {part.metadata["agent"] for part in flatten_samples(group)} == {"solver"}


def test_half_a_discussion_is_begun_anew(make_args: Args, use: Use) -> None:
    args = multi(make_args, partial_rollout=True)
    question = Sample(prompt="?", label="1", rollout_id=3)

    async def run() -> Any:
        async with rollout_state(args) as state:
            client = use(Agents(args))
            state.client = client
            group = GroupRun(args, state, [question], train_sampling_params(args))
            task = asyncio.create_task(group.run())
            while len(client.requests) < 4:
                await asyncio.sleep(0)
            state.ending = True
            await task
            return group.unfinished()

    (again,) = asyncio.run(run())
    assert (again.prompt, again.status, again.response_length) == ("?", Status.PENDING, 0)
    assert "agent" not in again.metadata
