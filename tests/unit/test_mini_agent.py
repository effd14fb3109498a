"""slime/agent/harness/mini_agent.py against a scripted chat API, served by slime.agent.aiohttp_threaded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import mini_agent

NUM_GPUS = 0


def call(command: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"id": f"call-{number}", "type": "function", "function": function}


def says(content: str = "", *calls: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return {"choices": [{"message": message, "finish_reason": reason}]}


class Scripted:
    """Answers in order; a number is a status that the API fails with."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.headers: dict[str, str] = {}

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Authorization"])
        self.asked.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "not now"}}, status=answer, headers=self.headers)
        return web.json_response(answer)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    scripted = Scripted()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", scripted.answer)
    server = run_app_in_thread(app, "127.0.0.1", 0)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-session")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield scripted
    assert server.stop()


def run(api: Scripted, *answers: dict[str, Any] | int, more: tuple[str, ...] = ()) -> int:
    api.answers = list(answers)
    return mini_agent.main(["the task", "--pause", "0.01", *more])


def test_it_works_until_no_tool_is_called(api: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt is the last one, its answer as it came, and the tools' results; nothing of it is changed later."""
    first = says("I look.", call("echo one; echo err >&2", 1), call("exit 3", 2), reason="tool_calls")
    first["choices"][0]["message"]["reasoning_content"] = "thoughts"
    assert run(api, first, says("Done.")) == mini_agent.DONE
    assert api.keys == ["Bearer key-of-the-session"] * 2
    earlier, later = (asked["messages"] for asked in api.asked)
    assert [message["role"] for message in earlier] == ["system", "user"]
    assert earlier[1]["content"] == "the task"
    assert later[:2] == earlier
    assert later[2] == first["choices"][0]["message"]
    assert later[3:] == [
        {"role": "tool", "tool_call_id": "call-1", "content": "one\nerr\n[exit status 0]"},
        {"role": "tool", "tool_call_id": "call-2", "content": "[exit status 3]"},
    ]
    assert api.asked[0]["tools"][0]["function"]["name"] == "bash"
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [*later, {"role": "assistant", "content": "Done."}]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ({"name": "bash", "arguments": "{not json"}, "error: the only tool is bash"),
        ({"name": "bash", "arguments": "[]"}, "error: the only tool is bash"),
        ({"name": "bash", "arguments": '{"command": 3}'}, "error: the only tool is bash"),
        ({"name": "python", "arguments": '{"command": "ls"}'}, "error: the only tool is bash"),
        ({}, "error: the only tool is bash"),
        ({"name": "bash", "arguments": '{"command": "a\\u0000b"}'}, "error: the command could not be run: embedded"),
        ({"name": "bash", "arguments": '{"command": "\\ud83d"}'}, "error: the command could not be run: 'utf-8'"),
        ({"name": "bash", "arguments": json.dumps({"command": "x" * 200_000})}, "error: the command could not be run:"),
    ],
)
def test_a_wrong_call_is_told_so(api: Scripted, function: dict[str, str], told: str) -> None:
    assert run(api, says("", {"id": "x", "function": function}), says()) == mini_agent.DONE
    assert api.asked[1]["messages"][-1]["content"].startswith(told)


@pytest.mark.parametrize(
    ("answers", "status", "more"),
    [
        ([503, 502, says()], mini_agent.DONE, ()),
        ([503, 503], mini_agent.FAILED, ("--tries", "2")),
        ([401], mini_agent.FAILED, ()),
        ([429], mini_agent.FAILED, ()),
        ([{"choices": []}, says()], mini_agent.DONE, ()),
        ([says("cut off", reason="length")], mini_agent.FULL, ()),
        ([says("", call("true"))] * 3, mini_agent.NO_TURNS, ("--max-turns", "3")),
    ],
)
def test_how_it_ends(api: Scripted, answers: list[Any], status: int, more: tuple[str, ...]) -> None:
    try:
        ended = run(api, *answers, more=more)
    except SystemExit as error:
        ended = int(str(error.code))
    assert ended == status
    assert not api.answers


def test_it_does_not_ask_again_where_that_is_of_no_use(api: Scripted) -> None:
    api.headers = {"x-should-retry": "false"}
    with pytest.raises(SystemExit):
        run(api, 503, says())
    assert len(api.asked) == 1


def test_limits_of_a_command(api: Scripted) -> None:
    started = time.monotonic()
    flood, hangs = call("head -c 50000000 /dev/zero | tr '\\0' x"), call("echo so far; sleep 300 & sleep 300")
    assert run(api, says("", flood, hangs), says(), more=("--output-chars", "100", "--command-timeout", "3")) == 0
    told = [message["content"] for message in api.asked[1]["messages"][-2:]]
    assert told[0].startswith("x" * 50 + "\n[")
    assert len(told[0]) < 200
    assert told[1] == "so far\n[exit status none: ended after 3 s]"
    assert time.monotonic() - started < 60


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{held.getsockname()[1]}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        with pytest.raises(SystemExit) as ended:
            mini_agent.main(["task", "--tries", "2", "--pause", "0"])
    assert ended.value.code == mini_agent.FAILED


# aiohttp_threaded itself


def test_an_app_answers_while_the_callers_loop_is_busy_and_stops() -> None:
    cleaned: list[str] = []

    async def name(request: web.Request) -> web.Response:
        return web.Response(text=threading.current_thread().name)

    async def clean(app: web.Application) -> None:
        cleaned.append(threading.current_thread().name)

    app = web.Application()
    app.router.add_get("/", name)
    app.on_cleanup.append(clean)
    server = run_app_in_thread(app, "127.0.0.1", 0)

    async def busy() -> bytes:
        with socket.create_connection((server.host, server.port), timeout=60) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: client.recv(4096), b""))

    assert b"aiohttp-0" in asyncio.run(busy())
    assert server.stop()
    assert cleaned == ["aiohttp-0"]
    assert server.stop(), "again is harmless"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((server.host, server.port), timeout=60)


def test_an_open_request_does_not_hold_the_end() -> None:
    entered = threading.Event()

    async def hang(request: web.Request) -> web.Response:
        entered.set()
        await asyncio.sleep(600)
        raise AssertionError

    app = web.Application()
    app.router.add_get("/", hang)
    server = run_app_in_thread(app, "127.0.0.1", 0)
    with socket.create_connection((server.host, server.port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert entered.wait(60)
        assert server.stop(30)


def test_an_app_that_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    async def block(app: web.Application) -> None:
        free.wait(60)

    app = web.Application()
    app.on_cleanup.append(block)
    server = run_app_in_thread(app, "127.0.0.1", 0)
    assert not server.stop(0.2)
    assert f"the server at {server.url} has not ended within 0.2 s" in caplog.text
    free.set()
    assert server.stop(60)


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held, pytest.raises(OSError, match="address already in use"):
        run_app_in_thread(web.Application(), "127.0.0.1", held.getsockname()[1])
