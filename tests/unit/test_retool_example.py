"""examples/retool: turns by script with programs that are not run; the sandbox itself is in test_sandbox.py."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from examples.retool import generate_with_retool as retool
from slime.data import Sample, Status
from tests.fake_client import FakeClient
from tests.scripted_turns import Args, Scripted, Use, example_args, one, turn_by_turn

NUM_GPUS = 0
search = importlib.import_module("examples.search-r1.generate_with_search")


def interpreted(args: Namespace, client: FakeClient, use: Use, label: str = "42") -> tuple[Sample, float]:
    use(client)

    async def run() -> tuple[Sample, float]:
        done = await one(retool, args, Sample(prompt="q", label=label))
        return done, await retool.reward_func(args, done)

    return asyncio.run(run())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that were run, in a sandbox that answers without running them."""
    ran: list[str] = []

    async def run_python(code: str, limits: retool.Limits) -> Any:
        from slime.agent.sandbox.python_code import Result

        ran.append(code)
        if code == "broken sandbox":
            raise retool.SandboxError("no namespaces")
        return Result("" if code == "pass" else f"said {code} \\boxed{{42}}", code != "error")

    monkeypatch.setattr(retool, "run_python", run_python)
    return ran


@pytest.mark.parametrize(
    ("turns", "programs", "reward"),
    [
        (["\\boxed{42}"], [], 1.0),
        (["<code>a</code>", "\\boxed{42}"], ["a"], 1.0),
        (["<code>\n```python\na\nb\n```\n</code>", "\\boxed{42}"], ["a\nb\n"], 1.0),
        (["<code>a</code>", "\\boxed{41}"], ["a"], 0.1),
        (["<code>a</code>", "no box, but the program printed one"], ["a"], 0.1),
        (["<code>error</code>", "\\boxed{41}"], ["error"], 0.0),
        (["\\boxed{41}"], [], 0.0),
        (["<code>a</code>", "<code>pass</code>", "\\boxed{42}"], ["a", "pass"], 1.0),
    ],
)
def test_code_and_answer(
    make_args: Args, use: Use, runs: list[str], turns: list[str], programs: list[str], reward: float
) -> None:
    args = example_args(make_args, retool)
    client = Scripted(args, *turns)
    sample, got = interpreted(args, client, use)
    assert runs == programs
    assert got == pytest.approx(reward)
    assert [text for mask, text in turn_by_turn(args, sample) if mask] == turns
    told = [text for mask, text in turn_by_turn(args, sample) if not mask]
    said = ["(no output)" if code == "pass" else f"said {code} \\boxed{{42}}" for code in programs]
    assert told == [f"\n<interpreter>{output}</interpreter>\n" for output in said]
    assert all(params["stop"] == ["</code>"] for _, params, _ in client.requests)


def test_a_sandbox_that_fails_ends_nothing(make_args: Args, use: Use, runs: list[str]) -> None:
    args = example_args(make_args, retool, max_turns=2)
    sample, _ = interpreted(args, Scripted(args, "<code>broken sandbox</code>", "<code>a</code>"), use)
    assert f"<interpreter>{retool.FAILED}</interpreter>" in sample.response
    assert (sample.remove_sample, sample.status, sample.metadata["tool_calls"]) == (True, Status.TRUNCATED, 0)


@pytest.mark.parametrize(("module", "flag"), [(retool, "--tool-concurrency"), (search, "--search-concurrency")])
def test_no_place_at_all_is_refused(module: ModuleType, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "0"])
    assert f"argument {flag}: 0 is not above 0" in capsys.readouterr().err
