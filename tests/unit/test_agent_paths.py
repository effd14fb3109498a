"""Sessions whose clients change what was said before: each turn is a path, and what is remembered beside is bounded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.agent import memory as agent_memory
from slime.agent import messages as agent_messages
from slime.agent.memory import TokenMemory
from slime.agent.messages import Chainer, chain_of
from slime.agent.rendering import TurnRenderer
from slime.agent.trajectory import TurnRecord
from tests import chat_templates

NUM_GPUS = 0
TURNS = 20


def conversation(turns: int, first: str) -> list[dict[str, Any]]:
    said = [{"role": "system", "content": first}, {"role": "user", "content": "?"}]
    for turn in range(turns):
        said += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"u{turn}"}]
    return said


@pytest.fixture
def memory(make_tokenizer: Callable[[str | None], Path], monkeypatch: pytest.MonkeyPatch) -> TokenMemory:
    monkeypatch.setattr(agent_memory, "_MANY_PATHS", TURNS // 2)
    agent_memory._warn_of_paths.cache_clear()
    return TokenMemory(TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(chat_templates.QWEN_3)))))


def play(memory: TokenMemory, first: Callable[[int], str]) -> None:
    for turn in range(TURNS):
        prompt = memory.prompt(conversation(turn, first(turn)))
        reply = {"role": "assistant", "content": f"a{turn}"}
        memory.record(prompt, TurnRecord(prompt.ids, [1], "stop", [-0.5]), reply)


@pytest.mark.parametrize(("first", "warnings"), [("It is %d o'clock.", 1), ("It is now.", 0)])
def test_a_client_that_makes_each_turn_a_path_is_told_once(
    memory: TokenMemory, caplog: pytest.LogCaptureFixture, first: str, warnings: int
) -> None:
    with caplog.at_level(logging.WARNING):
        play(memory, lambda turn: first % turn if "%" in first else first)
    assert len(memory.trajectory.roots) == (TURNS if warnings else 1)
    assert caplog.text.count(f"a session has begun {TURNS // 2} paths, and now one more") == warnings


def test_many_conversations_of_one_session_are_no_cause_for_a_warning(
    memory: TokenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for turn in range(TURNS):
            prompt = memory.prompt(conversation(0, f"subagent {turn}"))
            memory.record(prompt, TurnRecord(prompt.ids, [1], "stop", [-0.5]), {"role": "assistant", "content": "a"})
    assert caplog.text == ""


def test_what_is_remembered_of_messages_is_bounded_and_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_messages, "_PLACES", 100)
    chainer, most = Chainer(), 0
    for turn in range(200):
        messages = conversation(turn, f"It is {turn} o'clock.")
        assert chainer.chain(messages) == chain_of(messages)
        most = max(most, chainer._places)
    assert most <= 100 + 3 * len(messages)
    known = chainer.chain(messages)
    monkeypatch.setattr(agent_messages._Place, "follow", None)  # nothing is read again
    assert chainer.chain(messages) == known
