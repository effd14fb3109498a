"""examples/environment_hubs: both sides of the address between them, and the hubs themselves where they are.

SLIME_TEST_HUBS names a directory of virtual environments, ``verifiers``, ``openenv``, ``nemo_gym`` and ``harbor``, each
with its hub's package; without it the hubs' own tests are skipped: none of them installs beside our pins.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import AutoTokenizer

from examples.environment_hubs import agent, make_data, server
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Session
from slime.data import Sample
from slime.utils.http_utils import RequestError
from tests.recorder import run, write_recorder
from tests.unit.test_agent_gateway import END, served, session
from tests.unit.test_example_scripts import environment_of, is_alive, pids
from tests.waiting import wait_for
from tools.make_tiny_model import CHAT_TEMPLATE

__all__ = ["pids"]  # a fixture
NUM_GPUS = 0
PARTS = ("train", "server")
ASKED: dict[str, Any] = {"model": "slime", "max_tokens": 24, "timeout": 60.0}
SERVER = Path(server.__file__)


@pytest.fixture(scope="module")
def renderer(make_tokenizer: Callable[[str | None], Path]) -> TurnRenderer:
    return TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(CHAT_TEMPLATE))))


def fake(episode: Callable[..., Awaitable[Any]]) -> ModuleType:
    module = ModuleType("with_fake")
    module.run = episode  # type: ignore[attr-defined]
    return module


async def play(module: ModuleType, base_url: str, metadata: dict[str, Any]) -> Any:
    """What the agent brings from a server of this module."""
    listening = socket.create_server(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(server.make_app(module, "hub-key"), log_level="warning"))
    task = asyncio.create_task(serving.serve(sockets=[listening]))
    os.environ["HUB_URL"] = f"http://127.0.0.1:{listening.getsockname()[1]}/run"
    try:
        return await agent.run(base_url, "q", ASKED, metadata)
    finally:
        serving.should_exit = True
        await task


@pytest.fixture(autouse=True)
def hub_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_URL", "")
    monkeypatch.setenv("HUB_KEY", "hub-key")


def trained(made: Session) -> str:
    """What the model said and is trained on, of the session's one sample."""
    (sample,) = made.samples(Sample(index=1), 1.0)
    assert sample.loss_mask is not None
    tokens = sample.tokens[-sample.response_length :]
    return made.memory.renderer.decode([token for token, mask in zip(tokens, sample.loss_mask, strict=True) if mask])


def test_an_episode_is_played_elsewhere_by_the_sessions_model(renderer: TurnRenderer) -> None:
    heard: list[Any] = []

    async def episode(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], **request_kwargs}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
        reply = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        heard.append((prompt, metadata, reply["choices"][0]["message"]["content"]))
        return {"reward": 1, "metadata": {"turns": 1}}

    made, engine = session(renderer, f"hi{END}", params={"max_new_tokens": 512})

    async def use(url: str, key: str) -> Any:
        return await play(fake(episode), f"{url}/sessions/{key}/v1", {"label": "l", "task": 3})

    assert asyncio.run(served(made, use)) == {"reward": 1.0, "metadata": {"turns": 1}}
    assert heard == [("q", {"label": "l", "task": 3}, "hi")]
    assert trained(made) == f"hi{END}"
    assert engine.asked[0][1]["max_new_tokens"] == 24


def test_an_environment_that_fails_is_told_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    async def episode(**asked: Any) -> Any:
        raise ValueError("no such task: 7")

    with pytest.raises(RequestError, match="ValueError: no such task: 7"):
        asyncio.run(play(fake(episode), "http://nowhere", {}))
    assert "Traceback" in capsys.readouterr().err


def test_so_many_episodes_are_played_at_a_time() -> None:
    playing = most = 0

    async def episode(**asked: Any) -> Any:
        nonlocal playing, most
        playing += 1
        most = max(most, playing)
        await asyncio.sleep(0.05)
        playing -= 1
        return {"reward": 0}

    async def run() -> list[httpx.Response]:
        application, key = httpx.ASGITransport(server.make_app(fake(episode), "k", 3)), {"Authorization": "Bearer k"}
        async with httpx.AsyncClient(transport=application, base_url="http://hub", headers=key) as client:
            return await asyncio.gather(*(client.post("/run", json={}) for _ in range(10)))

    assert [reply.json() for reply in asyncio.run(run())] == [{"reward": 0}] * 10
    assert most == 3


def test_who_has_no_key_has_no_episode_played(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode(**asked: Any) -> Any:
        raise AssertionError("it was played")

    for key in ("", "hub-ke", "hub-k\u00e9y"):
        monkeypatch.setenv("HUB_KEY", key)
        with pytest.raises(RequestError, match="status 401: HUB_KEY of the training side is not the server's"):
            asyncio.run(play(fake(episode), "http://nowhere", {}))
    monkeypatch.delenv("HUB_KEY")
    with pytest.raises(SystemExit, match="HUB_KEY is not set"):
        server.serve(ModuleType("with_fake"), "127.0.0.1", 0, 1)


def test_an_episode_has_the_runs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode(**asked: Any) -> Any:
        await asyncio.sleep(0.5)

    monkeypatch.setitem(ASKED, "timeout", 0.1)
    with pytest.raises(RequestError, match=r"no reply within 0\.1 s$"):
        asyncio.run(play(fake(episode), "http://nowhere", {}))


def test_an_episode_whose_answer_is_lost_is_not_begun_again_in_its_session() -> None:
    begun = 0

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        begun += bool(await reader.readuntil(b"}}"))
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(lose, "127.0.0.1", 0) as losing:
            os.environ["HUB_URL"] = f"http://127.0.0.1:{losing.sockets[0].getsockname()[1]}/run"
            with pytest.raises(RequestError):
                await agent.run("http://nowhere", "q", ASKED, {})

    asyncio.run(run())
    assert begun == 1


def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server.REQUIREMENTS, "harbor", "slime-has-no-such-package==0.26.0")
    with pytest.raises(SystemExit) as ended:
        server.load("harbor")
    told = str(ended.value)
    assert "\n" not in told
    assert all(word in told for word in (sys.executable, "pip install slime-has-no-such-package==0.26.0", "HUB_PYTHON"))


@pytest.mark.parametrize(("tasks", "held_out"), [(464, 64), (1000, 64), (40, 10), (3, 0)])
def test_tasks_that_are_trained_on_are_not_held_out(tmp_path: Path, tasks: int, held_out: int) -> None:
    hub = SimpleNamespace(
        tasks=lambda output: [{"prompt": str(i)} for i in range(tasks)],
        demonstration=lambda rng: [{"role": "user", "content": str(rng.random())}],
    )
    for name in ("a", "b"):
        server.write_tasks(hub, tmp_path / name, seed=5)  # type: ignore[arg-type]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")  # what it would write is there
    python.chmod(0o755)
    make_data.write(tmp_path / "a", "verifiers", str(python), 5)
    rows = {name: (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "eval", "sft")}
    assert (len(rows["eval"]), len(rows["train"])) == (held_out, min(tasks, 464) - held_out)
    assert not set(rows["eval"]) & set(rows["train"])
    assert rows["eval"] + rows["train"] == (tmp_path / "b" / "tasks.jsonl").read_text().splitlines()
    assert rows["sft"] == (tmp_path / "b" / "demonstrations.jsonl").read_text().splitlines()


def test_data_of_a_hub_that_fails_are_not_made(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        make_data.write(tmp_path / "data", "verifiers", str(tmp_path / "python"), 0)
    assert ended.value.code == 3
    with pytest.raises(SystemExit, match=r"^make_data.py: error: HUB_PYTHON=/nowhere cannot be run: No such file"):
        make_data.write(tmp_path / "data", "verifiers", "/nowhere", 0)


def test_a_port_that_somebody_has_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        server.serve(ModuleType("with_fake"), "127.0.0.1", port := taken.getsockname()[1], 1)
    assert str(ended.value).startswith(
        f"environment_hubs: error: the server cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def python_of(hub: str) -> str:
    """The Python of a hub's virtual environment; the test is skipped without one."""
    python = Path(os.environ.get("SLIME_TEST_HUBS", "/nowhere")) / hub / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{server.REQUIREMENTS[hub]} needs a Python of its own: SLIME_TEST_HUBS/{hub}")
    return str(python)


@pytest.fixture
def hub_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """A hub, the address of its server, and its rows."""
    hub = request.param
    python = python_of(hub)
    subprocess.run([python, str(SERVER), hub, "--tasks", str(tmp_path)], check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    process = subprocess.Popen([python, "-u", str(SERVER), hub, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield hub, process.stdout.readline().split()[-1], rows
    finally:
        process.terminate()
        process.wait(60)


def answers(hub: str, row: dict[str, Any], right: bool) -> tuple[list[str], float]:
    """What a model could say to a row, and the reward for that."""
    if hub == "openenv":
        return (["9", "5", "3"], 0.5) if right else (["0", "0", "0", "0"], 0.0)
    asked = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
    digits = re.findall(r"\d", asked)
    digit = max(digits) if right else min(digits)
    return ([f"echo {digit} > a", "done"] if hub == "harbor" else [f"\\boxed{{{digit}}}"]), float(right)


@pytest.mark.parametrize("hub_server", sorted(server.REQUIREMENTS), indirect=True)
def test_a_hubs_environment_is_played_and_rewards(
    renderer: TurnRenderer, hub_server: tuple[str, str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, address, rows = hub_server
    monkeypatch.setenv("HUB_URL", address)
    row = next(row for row in rows if hub != "openenv" or row["metadata"]["seed"] in (3, 4))  # whose digit is 3
    for right in (True, False):
        said, reward = answers(hub, row, right)
        made, engine = session(renderer, *(f"{text}{END}" for text in said), params={"max_new_tokens": 512})

        async def use(url: str, key: str) -> Any:
            metadata = {"label": row["label"], **row["metadata"]}
            return await agent.run(f"{url}/sessions/{key}/v1", row["prompt"], ASKED, metadata)

        assert asyncio.run(served(made, use))["reward"] == reward
        assert trained(made) == "".join(f"{text}{END}" for text in said)
        assert engine.answers == []
        assert all(params["max_new_tokens"] == 24 for _, params in engine.asked)


def test_a_dry_run_names_the_hub_in_everything(tmp_path: Path) -> None:
    write_recorder(tmp_path)
    arguments = ("openenv", "--lr", "1")
    ran, commands = run(str(SERVER.with_name("run.sh")), tmp_path, tmp_path / "record", *arguments, DRY_RUN="1")
    assert ran.returncode == 0, ran.stderr
    _, data, _, grpo = commands
    assert data == ["-m", "examples.environment_hubs.make_data", "outputs/openenv/data", "--seed", "0"]
    assert grpo[grpo.index("--prompt-data") + 1] == "outputs/openenv/data/train.jsonl"
    assert grpo[-3:] == ["--lr", "1", "--dry-run"]


def test_the_hubs_server_ends_with_the_run(pids: Path) -> None:
    command = ["bash", str(SERVER.with_name("run.sh")), "openenv"]
    script = subprocess.Popen(command, env=environment_of(pids) | {"HUB_PORT": "18770"})
    wait_for(lambda: all((pids / part).exists() and (pids / part).read_text() for part in PARTS), "the start")
    script.terminate()
    assert script.wait(60) == 7, "train.py's own status"
    wait_for(lambda: not any(is_alive(int((pids / part).read_text())) for part in PARTS), "the end")


@pytest.mark.parametrize("given", [[], ["gym"]])
def test_a_run_says_which_hubs_there_are(tmp_path: Path, given: list[str]) -> None:
    """Before it makes anything."""
    environment = os.environ | {"OUTPUT_DIR": str(tmp_path / "out"), "PYTHON": "/nowhere"}
    command = ["bash", str(SERVER.with_name("run.sh")), *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    words = f"environment_hubs: error: which hub: verifiers, openenv, nemo_gym or harbor; not '{''.join(given)}'\n"
    assert (ended.returncode, ended.stderr) == (2, words)
