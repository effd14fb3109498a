"""Stop strings that a client asks for: they end a turn, are no part of what it reads, and their tokens are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.agent.adapters.anthropic_messages import AnthropicMessages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Generated, Session
from slime.data import Sample
from tests import chat_templates

NUM_GPUS = 0
ASK: list[Any] = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def renderer(make_tokenizer: Callable[[str | None], Path]) -> TurnRenderer:
    return TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(chat_templates.QWEN_3))))


class Engine:
    """Says these texts a token at a time; it keeps stop strings, as the run's engines do."""

    def __init__(self, renderer: TurnRenderer, *answers: str, reason: str = "stop") -> None:
        self._renderer, self._answers, self._reason, self.prompts = renderer, list(answers), reason, list[list[int]]()

    async def generate(
        self, prompt: list[int], params: dict[str, Any], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        self.prompts.append(prompt)
        ids = self._renderer.encode(self._answers.pop(0))
        for token in ids if on_tokens is not None else ():
            on_tokens([token])  # type: ignore[misc]
        return Generated(ids, [-0.5] * len(ids), self._reason)

    async def read_calls(self, parser: str, text: str, tools: Any) -> list[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("said", "reason", "stop", "read", "stopped"),
    [
        ("Act.\nObservation:", "stop", "\nObservation:", "Act.", "\nObservation:"),
        ("Act.\nObservation: x", "stop", ["\nObservation:", "zz"], "Act.", "\nObservation:"),  # of one token with it
        ("Act.\nObserv", "length", "\nObservation:", "Act.\nObserv", None),
        ("aXb<|im_end|>", "stop", "X", "aXb", None),  # the model ended the turn by itself
        ("aXYb", "stop", ["XYb", "Y"], "a", "XYb"),
        ("aXY", "stop", None, "aXY", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_read(
    renderer: TurnRenderer, said: str, reason: str, stop: Any, read: str, stopped: str | None, stream: bool
) -> None:
    engine = Engine(renderer, said, "b<|im_end|>", reason=reason)
    made, told = Session(engine, renderer), list[str]()
    body: dict[str, Any] = {"messages": ASK} | ({} if stop is None else {"stop": stop})
    turn = ChatCompletions().request(body, {})
    reply = asyncio.run(made.turn(turn, (lambda delta: told.append(delta[1])) if stream else None))
    assert (reply.message["content"], reply.stop) == (read, stopped)
    assert "".join(told) == (read if stream else "")
    # The conversation goes on behind all that the model said, and all of it is trained.
    asyncio.run(made.turn(ChatCompletions().request({"messages": [*ASK, reply.message, *ASK]}, {})))
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert renderer.decode(engine.prompts[1][len(engine.prompts[0]) :]).startswith(said)
    (sample,) = made.samples(Sample(index=1))
    trained = zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True)
    assert renderer.decode([token for token, mask in trained if mask]) == f"{said}b<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_clients_are_told_which(renderer: TurnRenderer, stream: bool) -> None:
    body: dict[str, Any] = {"messages": ASK, "stop_sequences": ["END"]}
    api, store = AnthropicMessages(), dict[str, Any]()
    turn = api.request(body, store)
    reply = asyncio.run(Session(Engine(renderer, "aEND"), renderer).turn(turn))
    writer = api.reply(body, turn, store)
    told = writer.end(reply)[-2][1]["delta"] if stream else writer.whole(reply)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("stop", [5, [5], "", ["a", ""]])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="a stop string must be text, and not empty"):
        ChatCompletions().request({"messages": ASK, "stop": stop}, {})
