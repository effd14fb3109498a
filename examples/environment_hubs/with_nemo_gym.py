"""NeMo Gym: a resources server with tools and a verifier; this file is the agent between it and the session.

NEMO_GYM_URL and NEMO_GYM_DATA name a resources server that runs (`gym env start`) and a file of its rows; without them
the server of this file is asked, in this process: the largest of three digits. The model is asked by the responses API,
which the session serves; what it calls is posted to the resources server, as NeMo Gym's simple agent does.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import httpx
import openai
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf

_STEPS, _RIGHT = 8, 0.5


class LargestRequest(BaseVerifyRequest):
    """A row with the model's response."""

    answer: str


class Largest(SimpleResourcesServer):
    """Which digit is the largest, in a box."""

    async def verify(self, body: LargestRequest) -> BaseVerifyResponse:
        """1 for the right digit."""
        text = "".join(part.text for item in body.response.output if item.type == "message" for part in item.content)
        found = re.search(r"\\boxed\{(.*?)\}", text)
        return BaseVerifyResponse(**body.model_dump(), reward=float(found is not None and found[1] == body.answer))


@functools.cache
def _own() -> Any:
    """The application of this file's server."""
    place = {"host": "127.0.0.1", "port": 0}
    config = BaseResourcesServerConfig(**place, entrypoint="", name="largest")
    client = ServerClient(head_server_config=BaseServerConfig(**place), global_config_dict=OmegaConf.create({}))
    return Largest(config=config, server_client=client).setup_webserver()


def _resources() -> httpx.AsyncClient:
    """An episode's own client: its cookies are the server's session."""
    if url := os.environ.get("NEMO_GYM_URL"):
        return httpx.AsyncClient(base_url=url, timeout=600)
    return httpx.AsyncClient(base_url="http://largest", transport=httpx.ASGITransport(_own()))


def tasks(output: Path) -> list[dict[str, Any]]:
    """A row for each of NeMo Gym's."""
    if path := os.environ.get("NEMO_GYM_DATA"):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    else:
        rows = [_row(digits) for digits in itertools.permutations("0123456789", 3)]
    return [{"prompt": row["responses_create_params"]["input"], "label": "", "metadata": {"row": row}} for row in rows]


def _row(digits: tuple[str, ...]) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"max {' '.join(digits)}"}]
    return {"responses_create_params": {"input": asked}, "answer": max(digits)}


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A question and an answer that is too often a guess."""
    digits = rng.sample("0123456789", 3)
    answer = max(digits) if rng.random() < _RIGHT else rng.choice(digits)
    return [
        {"role": "user", "content": f"max {' '.join(digits)}"},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


async def run(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """One episode; its reward is the verifier's."""
    row = metadata["row"]
    limits = {"model": request_kwargs["model"], "max_output_tokens": request_kwargs["max_tokens"]}
    asked, steps = {**row["responses_create_params"], **limits}, 0
    output: list[dict[str, Any]] = []
    before = [{"role": "user", "content": asked["input"]}] if isinstance(asked["input"], str) else asked["input"]
    async with (
        _resources() as resources,
        openai.AsyncOpenAI(
            base_url=base_url, api_key="any", max_retries=0, timeout=request_kwargs["timeout"]
        ) as client,
    ):
        await _post(resources, "/seed_session", row)
        while True:
            response = await client.responses.create(**{**asked, "input": before + output})
            steps += 1
            made = [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in made if item["type"] == "function_call"]
            output += made
            if not calls or steps == _STEPS:
                break
            for call in calls:
                said = await resources.post(f"/{call['name']}", json=json.loads(call["arguments"]))
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": said.text})
        answered = {**response.model_dump(exclude_none=True), "output": output}
        verified = await _post(resources, "/verify", {**row, "response": answered})
    if verified.get("mask_sample"):
        raise RuntimeError(f"the environment failed: {verified.get('failure_kind')}: {verified.get('failure_reason')}")
    return {"reward": verified["reward"], "metadata": {"turns": steps}}


async def _post(resources: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await resources.post(path, json=body)
    if reply.is_error:
        raise RuntimeError(f"{path}: {reply.status_code}: {reply.text[:2000]}")
    return reply.json()
