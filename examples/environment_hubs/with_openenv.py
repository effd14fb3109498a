"""OpenEnv: an environment behind its server and client, reset and step; what is said and done is this file's part.

OPENENV_URL names a server that runs; without it the environment of this file is served: a digit to be guessed, with
hints. For another environment change `said` and `done`, the two places where text and its observations meet.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

_TURNS = 4
_RULES = "guess 0-9"


class Guess(Action):
    """A digit."""

    digit: int


class Hint(Observation):
    """What the guess was to the digit."""

    hint: str


class Guessing(Environment[Guess, Hint, State]):
    """A digit that its seed chooses; 1 for the first guess, a quarter less for each that follows."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        """A new digit."""
        self._digit, self._state = random.Random(seed).randrange(10), State(episode_id=episode_id)
        return Hint(hint=_RULES)

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        """A guess."""
        self._state.step_count += 1
        if action.digit == self._digit:
            return Hint(hint="yes", done=True, reward=1 - (self._state.step_count - 1) / _TURNS)
        hint = "higher" if action.digit < self._digit else "lower"
        return Hint(hint=hint, done=self._state.step_count == _TURNS, reward=0.0)

    @property
    def state(self) -> State:
        """How many guesses there were."""
        return self._state


def said(observation: dict[str, Any]) -> str:
    """What the model is told."""
    return str(observation["hint"])


def done(text: str) -> dict[str, Any] | None:
    """What it does; None where that is no action."""
    return {"digit": int(text)} if text in set("0123456789") else None


def tasks(output: Path) -> list[dict[str, Any]]:
    """A row for each seed."""
    return [{"prompt": _RULES, "label": "", "metadata": {"seed": seed}} for seed in range(464)]


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A game of guesses that only half of the players fit to the hints."""
    game, heeds, low, high = Guessing(), rng.random() < 0.5, 0, 9
    seen, messages = game.reset(seed=rng.randrange(10**6)), []
    while True:
        digit = rng.randint(low, high) if heeds else rng.randrange(10)
        messages += [{"role": "user", "content": seen.hint}, {"role": "assistant", "content": str(digit)}]
        seen = game.step(Guess(digit=digit))
        if seen.done:
            return messages
        low, high = (max(low, digit + 1), high) if seen.hint == "higher" else (low, min(high, digit - 1))


@functools.cache
def _serve() -> str:
    """The address of this file's environment, which a thread serves from now on."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


async def run(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """One episode; its reward is the sum of its steps' rewards. It ends, too, with what is no action."""
    reward, turns = 0.0, 0
    messages: list[Any] = []
    async with (
        GenericEnvClient(base_url=os.environ.get("OPENENV_URL") or _serve()) as environment,
        openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client,
    ):
        seen = await environment.reset(seed=metadata["seed"])
        while not seen.done:
            messages.append({"role": "user", "content": said(seen.observation)})
            reply = await client.chat.completions.create(messages=messages, **request_kwargs)
            text, turns = reply.choices[0].message.content or "", turns + 1
            messages.append({"role": "assistant", "content": text})
            if (action := done(text.strip())) is None:
                break
            seen = await environment.step(action)
            reward += float(seen.reward or 0.0)
    return {"reward": reward, "metadata": {"turns": turns}}
