"""examples/agent_tool_use: sessions by script through the gateway, its rewards, and the control's."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.agent_tool_use import agent, make_data
from slime.agent.rollout import AgentError, generate
from slime.data import Sample, Status
from slime.data.rows.conversation import ConversationEncoder
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sampling import train_sampling_params
from slime.utils.errors import HookError
from slime.utils.user_functions import naming
from tests.fake_client import FakeClient
from tests.scripted_turns import Args, Scripted, Use, end_of_rollout, held_up, turn_by_turn
from tools.make_tiny_model import TOOL_CHAT_TEMPLATE

NUM_GPUS = 0
TABLE = {"c7": "d4", "d4": "42", "x0": "17"}
END = "<|im_end|>"


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "find", "arguments": {{"key": "{key}"}}}}\n</tool_call>{END}'


@pytest.fixture
def args(make_args: Args, make_tokenizer: Callable[[str | None], Path], runtime: RolloutRuntime) -> Iterator[Namespace]:
    args = make_args(hf_checkpoint=str(make_tokenizer(TOOL_CHAT_TEMPLATE)), rollout_max_response_len=80)
    args.custom_agent_function_path = "examples.agent_tool_use.agent.run"
    yield args
    runtime.services["agent gateway"][1].stop()


def session(args: Namespace, use: Use, *turns: str) -> tuple[Sample, FakeClient]:
    """The one sample of a session in which the model says these turns."""
    client = use(Scripted(args, *turns))
    sample = Sample(prompt=make_data.question("c7"), label="42", index=3, metadata={"table": TABLE})
    made = asyncio.run(generate(args, sample, train_sampling_params(args)))
    assert isinstance(made, list)
    return made[0], client


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("5", "it must return None or a dict, not 5"),
        ("{'rewards': 1.0}", "it returned 'rewards', which nothing reads: 'reward' and 'metadata' are"),
        ("{'reward': 'good'}", "the reward must be a finite number, or a dict (--reward-key), not 'good'"),
        ("{'reward': float('nan')}", "the reward must be a finite number, or a dict (--reward-key), not nan"),
        ("{'reward': 1.0, 'metadata': 5}", "the metadata must be a dict, not 5"),
    ],
)
def test_what_an_agent_must_not_return_is_one_line(
    args: Namespace, use: Use, tmp_path: Path, returned: str, words: str
) -> None:
    own = "from examples.agent_tool_use import agent\n\nasync def run(*given):\n    await agent.run(*given)\n"
    (tmp_path / "own.py").write_text(f"{own}    return {returned}\n")
    args.custom_agent_function_path = f"{tmp_path}/own.py:run"
    with pytest.raises(AgentError) as refused, naming("--custom-generate-function-path"):  # in whose words it stays
        session(args, use, f"42{END}")
    assert str(refused.value) == f"--custom-agent-function-path {tmp_path}/own.py:run: {words}"


def test_what_an_agent_makes_of_a_session_that_the_rollout_ended_does_not_count(
    args: Namespace, use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "import contextlib\nfrom examples.agent_tool_use import agent\n\nasync def run(*given):\n"
    own += "    with contextlib.suppress(Exception):\n        await agent.run(*given)\n    return {'reward': 'none'}\n"
    (tmp_path / "own.py").write_text(own)
    args.custom_agent_function_path = f"{tmp_path}/own.py:run"
    end_of_rollout(monkeypatch)
    sample = Sample(prompt=make_data.question("c7"), label="42", index=3, metadata={"table": TABLE})
    made = asyncio.run(generate(args, sample, train_sampling_params(args)))
    assert isinstance(made, Sample)
    assert made.status is Status.ABORTED


def test_an_answer_is_waited_for_as_long_as_the_run_gives_it(
    args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(monkeypatch, args)
    with pytest.raises(HookError, match=r"agent_tool_use\.agent\.run.*TimeoutError"):
        session(args, use)


@pytest.mark.parametrize(
    ("turns", "told", "reward"),
    [
        ([f"42{END}"], [], 1.0),
        ([f"17{END}"], [], 0.0),
        ([call("c7"), f"d4{END}"], ["d4"], 0.0),
        ([call("c7"), call("d4"), f"42{END}"], ["d4", "42"], 1.0),
        ([call("c7"), call("z9"), f" 42\n{END}"], ["d4", "none"], 1.0),
        ([call("c7"), f"<tool_call>42{END}"], ["d4"], 0.0),
        ([call("d4")] * agent.MAX_TURNS, ["42"] * (agent.MAX_TURNS - 1), 0.0),
    ],
)
def test_what_the_model_says_is_trained_and_what_the_tool_says_is_not(
    args: Namespace, use: Use, turns: list[str], told: list[str], reward: float
) -> None:
    sample, client = session(args, use, *turns)
    assert len(client.requests) == len(turns)
    said = turn_by_turn(args, sample)
    assert [text for mask, text in said if mask] == turns
    opening = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [text for mask, text in said if not mask] == [opening.format(each) for each in told]
    assert sample.reward == reward
    assert sample.metadata["calls"] == sum("</tool_call>" in turn for turn in turns)
    assert sample.metadata["agent"]["forks"] == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [('{"key": "d4"}', "42"), ('{"key": "D4"}', "none"), ('{"key": ["d4"]}', "none"), ('{"name": "d4"}', "none")],
)
def test_the_tool_knows_the_table_and_no_more(arguments: str, found: str) -> None:
    assert agent.find(TABLE, arguments) == found


def test_a_demonstration_is_rendered_as_the_gateway_renders_its_session(args: Namespace, use: Use) -> None:
    """So what the warm-up teaches is what the model meets: the same tokens, and the same of them trained."""
    way = ["c7", "d4", "42"]
    shown = next(
        messages
        for messages in (make_data.demonstration(way, random.Random(seed)) for seed in range(100))
        if len(messages) == 6
    )
    encoded = ConversationEncoder(args.hf_checkpoint).encode(shown, [agent.FIND])
    sample, _ = session(args, use, call("c7"), call("d4"), f"42{END}")
    assert encoded.tokens.tolist() == sample.tokens
    assert encoded.mask[-sample.response_length :].tolist() == sample.loss_mask


def test_tables_lead_from_the_question_to_the_number() -> None:
    rng = random.Random(0)
    for calls in (1, 2, 3) * 30:
        table, way = make_data.task("c7", calls, rng)
        assert len(way) == calls + 1
        assert len(table) > calls
        key = "c7"
        for _ in range(calls):
            key = table[key]
        assert key == way[-1]
        assert key in make_data.NUMBERS
        assert key not in table


def test_demonstrations_go_all_the_way_only_sometimes() -> None:
    """Two calls are made with a probability of 0.6 * 0.6."""
    rng = random.Random(0)
    shown = [make_data.demonstration(["c7", "d4", "42"], rng) for _ in range(2000)]
    assert sum(len(messages) == 6 for messages in shown) / len(shown) == pytest.approx(0.36, abs=0.04)
    assert sum(len(messages) == 2 for messages in shown) / len(shown) == pytest.approx(0.4, abs=0.04)


def test_random_rewards_are_a_coins_toss_for_each_session_and_hide_no_true_one() -> None:
    random.seed(0)
    args = Namespace(reward_key=None)
    samples = [
        Sample(index=index, group_index=index // 8, rollout_id=index, reward=float(index % 8 == 0))
        for index in range(800)
        for _ in range(2)  # the paths of one session
    ]
    raw, trained = agent.random_rewards(args, samples)
    assert raw == [sample.reward for sample in samples]
    assert trained[::2] == trained[1::2]
    assert sum(trained) == pytest.approx(0.0, abs=1e-6)
    for true in (0.0, 1.0):
        those = [value for value, was in zip(trained, raw, strict=True) if was == true]
        assert abs(sum(those) / len(those)) < 0.25
    assert {value > 0 for value in trained} == {True, False}
