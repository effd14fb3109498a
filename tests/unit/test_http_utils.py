"""Retries, keys and ports: what is sent again, where a key goes, who may take a port."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slime.backends.sglang.client import EngineControl, EngineError, GenerateClient, ask_server
from slime.rollout.engine import state
from slime.rollout.runtime import RolloutRuntime
from slime.utils import http_client
from slime.utils.http_client import Http, current_http
from slime.utils.http_utils import PortReservation, RequestError, ask_directly, get, http_url, is_own_address, post
from tests.fake_client import FakeClient
from tests.fake_servers import Servers
from tests.proxy import RecordingProxy

NUM_GPUS = 0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def http() -> Http:
    """That of the test's runtime."""
    found = current_http()
    assert found is not None
    return found


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server on loopback that answers every request by ``handler``."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await http().close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def quick_and_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.delenv("SLIME_ROUTER_URL", raising=False)
    monkeypatch.delenv("SLIME_REWARD_ROUTER_URL", raising=False)
    monkeypatch.delenv("SLIME_ROUTER_API_KEY", raising=False)


def answers(*replies: tuple[int, Any]) -> tuple[Handler, list[dict[str, Any]]]:
    """A handler that gives these (status, body), the last one for ever, and the list of what it was sent."""
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        seen.append({"method": request.method, "path": request.path, "body": body, "headers": dict(request.headers)})
        status, reply = replies[min(len(seen), len(replies)) - 1]
        return web.json_response(reply, status=status) if not isinstance(reply, str) else web.Response(text=reply)

    return handler, seen


@pytest.mark.parametrize("status", sorted(http_client.RETRIED_STATUSES))
def test_a_server_that_did_not_work_is_asked_again(status: int) -> None:
    async def scenario() -> None:
        handler, seen = answers((status, {}), (status, {}), (200, {"text": "done"}))
        async with serving(handler) as url:
            assert await post(f"{url}/generate", {"n": 3}) == {"text": "done"}
        assert [request["body"] for request in seen] == [{"n": 3}] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("code", http_client._LOST_ENGINE)
def test_a_request_whose_engine_died_is_sent_again(code: str) -> None:
    async def scenario() -> None:
        lost = {"error": {"type": "Internal Server Error", "code": code, "message": "error sending request"}}
        handler, seen = answers((500, lost), (200, {"text": "done"}))
        async with serving(handler) as url:
            assert await post(f"{url}/generate", {}) == {"text": "done"}
        assert len(seen) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500])
def test_other_errors_are_final_and_say_what_came_back(status: int) -> None:
    async def scenario() -> None:
        handler, seen = answers((status, {"error": "prompt too long"}))
        async with serving(handler) as url:
            with pytest.raises(RequestError, match=rf"/generate: status {status}: .*prompt too long") as caught:
                await post(f"{url}/generate", {})
        assert caught.value.status == status
        assert len(seen) == 1

    asyncio.run(scenario())


def test_retries_end() -> None:
    async def scenario() -> None:
        handler, seen = answers((503, {"error": "no_available_workers"}))
        async with serving(handler) as url:
            with pytest.raises(RequestError, match=r"no_available_workers.*tried 4 times"):
                await post(url, {}, max_retries=3)
        assert len(seen) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["before the reply", "within the reply"])
@pytest.mark.parametrize("times", [2, 99], ids=["for a while", "for good"])
def test_a_connection_that_breaks_off_is_tried_again(when: str, times: int) -> None:
    async def scenario() -> None:
        tries = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal tries
            tries += 1
            if tries > times:
                return web.json_response({"text": "done"})
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            if when == "within the reply":
                await response.prepare(request)
                await response.write(b'{"text": "do')
            assert request.transport is not None
            request.transport.abort()
            return response

        async with serving(handler) as url:
            if times < 99:
                assert await post(url, {}, max_retries=3) == {"text": "done"}
                return
            with pytest.raises(RequestError, match=r"(ServerDisconnected|ClientPayload|ClientOS)Error.*tried 4 times"):
                await post(url, {}, max_retries=3)
        assert tries == 4

    asyncio.run(scenario())


def test_a_reply_that_is_no_http_is_final() -> None:
    async def scenario() -> None:
        tries = 0

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal tries
            tries += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            with pytest.raises(RequestError, match=r"tried 1 times"):
                await get(http_url(*server.sockets[0].getsockname()))
        await http().close()
        assert tries == 1

    asyncio.run(scenario())


def test_a_server_that_starts_late_is_reached() -> None:
    async def scenario() -> None:
        reservation = PortReservation("127.0.0.1")
        url = http_url("127.0.0.1", reservation.port)
        reservation.release()
        request = asyncio.create_task(post(url, {}))
        await asyncio.sleep(0.05)
        handler, _ = answers((200, {"late": True}))
        app = web.Application()
        app.router.add_post("/", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", reservation.port).start()
        assert await asyncio.wait_for(request, 60) == {"late": True}
        await http().close()
        await runner.cleanup()
        reservation.close()

    asyncio.run(scenario())


def test_a_reply_that_is_no_json_is_text_and_get_sends_no_body() -> None:
    async def scenario() -> None:
        handler, seen = answers((200, "plain words"))
        async with serving(handler) as url:
            assert await get(f"{url}/health") == "plain words"
        assert (seen[0]["method"], seen[0]["body"]) == ("GET", None)

    asyncio.run(scenario())


def test_a_key_for_some_paths_goes_there_only() -> None:
    async def scenario() -> None:
        handler, seen = answers((200, {}))
        async with serving(handler) as ours:
            http().add_api_keys({ours: "generate", f"{ours}/workers": "admin"})
            for path in ("/generate", "/workers", "/workers/1", "/workers?x=1", "/workersx", "/x/workers", "/", ""):
                await get(ours + path)
        sent = [request["headers"]["Authorization"].removeprefix("Bearer ") for request in seen]
        assert sent == ["generate", "admin", "admin", "admin", *["generate"] * 4]

    asyncio.run(scenario())


def test_keys_go_to_their_own_origin_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        handler, seen = answers((200, {}))
        async with serving(handler) as ours, serving(handler) as foreign:
            http().add_api_keys({ours: "k1"})
            await post(f"{ours}/x", {})
            await post(f"{foreign}/x", {})
            await post(f"{ours}/x", {}, headers={"Authorization": "Bearer mine"})
            monkeypatch.setenv("SLIME_ROUTER_API_KEY", "k2")
            await post(f"{foreign}/x", {})
            monkeypatch.setenv("SLIME_ROUTER_URL", foreign)
            await post(f"{foreign}/x", {})
            monkeypatch.setenv("SLIME_ROUTER_URL", "http://127.0.0.1:9")
            await post(f"{foreign}/x", {})
            monkeypatch.setenv("SLIME_REWARD_ROUTER_URL", foreign)
            await post(f"{foreign}/x", {})
        sent = [request["headers"].get("Authorization") for request in seen]
        assert sent == ["Bearer k1", None, "Bearer mine", None, "Bearer k2", None, "Bearer k2"]

    asyncio.run(scenario())


def test_posts_to_the_router_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, {"router": 0, "tool": 0}

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal inside
        inside += 1
        name = request.path.strip("/")
        most[name] = max(most[name], inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return web.json_response({})

    async def scenario() -> None:
        async with serving(handler) as ours, serving(handler) as tool:
            http().limit_posts(ours, state.place_of_request)
            async with state.rollout_state(Namespace()):
                await asyncio.gather(*(post(f"{ours}/router", {}) for _ in range(12)))
                await asyncio.gather(*(post(f"{tool}/tool", {}) for _ in range(12)))
            assert most == {"router": 3, "tool": 12}
            await asyncio.gather(*(post(f"{ours}/router", {}) for _ in range(12)))
        assert most["router"] == 12, "outside of a rollout nobody counts"

    monkeypatch.setattr(state, "make_client", lambda *_: FakeClient())
    with RolloutRuntime(Namespace(request_timeout=60.0, sglang_server_concurrency=3, num_engines=1)).active():
        asyncio.run(scenario())


def test_posts_that_wait_when_the_rollout_has_enough_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "make_client", lambda *_: FakeClient())
    asked = 0

    async def scenario() -> None:
        enough = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            await enough.wait()
            return web.json_response({})

        async with serving(handler) as ours:
            http().limit_posts(ours, state.place_of_request)
            async with state.rollout_state(Namespace()) as under_way:
                posts = [asyncio.create_task(post(f"{ours}/generate", {})) for _ in range(4)]
                while not asked:
                    await asyncio.sleep(0.01)
                under_way.ending = True
                enough.set()
                results = await asyncio.gather(*posts, return_exceptions=True)
                assert [type(result) for result in results] == [dict, RequestError, RequestError, RequestError]
                assert await post(f"{ours}/generate", {}) == {}, "a hook of the whole batch"

    with RolloutRuntime(Namespace(request_timeout=60.0, sglang_server_concurrency=1, num_engines=1)).active():
        asyncio.run(asyncio.wait_for(scenario(), 100))
    assert asked == 2


def test_the_limit_of_a_post_is_the_flags_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def hang(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            return web.Response()

        async with serving(hang) as url:
            with pytest.raises(RequestError, match=rf"^POST {url}/x: no reply within 0.2 s \(--request-timeout\)$"):
                await post(f"{url}/x", {})

    with Http(0.2).active():
        asyncio.run(scenario())


def test_a_post_outside_of_a_runtime_has_the_key_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a thread of a hook's own, which has no context, or in a program that it starts."""

    async def scenario() -> None:
        handler, seen = answers((200, {}))
        async with serving(handler) as ours:
            http().add_api_keys({ours: "of the context"})
            monkeypatch.setenv("SLIME_ROUTER_URL", ours)
            monkeypatch.setenv("SLIME_ROUTER_API_KEY", "of the environment")
            await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(post(f"{ours}/x", {})))
            await asyncio.to_thread(lambda: asyncio.run(post(f"{ours}/x", {})))
        sent = [request["headers"]["Authorization"] for request in seen]
        assert sent == ["Bearer of the environment", "Bearer of the context"]

    asyncio.run(scenario())


def test_post_works_on_one_event_loop_after_another() -> None:
    async def scenario() -> Any:
        handler, _ = answers((200, {"ok": 1}))
        async with serving(handler) as url:
            return await post(url, {})

    assert asyncio.run(scenario()) == asyncio.run(scenario()) == {"ok": 1}


def test_generate_client_sends_its_key_and_bounds_its_time() -> None:
    async def scenario() -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            payload = await request.json()
            assert request.headers["Authorization"] == "Bearer k"
            assert payload["return_logprob"] is True
            await asyncio.sleep(payload["sampling_params"]["seconds"])
            return web.json_response({"echo": payload["input_ids"], "rid": payload.get("rid")})

        async with serving(handler) as url:
            client = GenerateClient(http(), url, "k", retries=2)
            replies = await asyncio.gather(*[client.generate([i], {"seconds": 0.05}, rid=str(i)) for i in range(9)])
            assert [reply["echo"] for reply in replies] == [[i] for i in range(9)]
            assert replies[4]["rid"] == "4"
            hasty = Http(0.5)
            with pytest.raises(RequestError, match=r"no reply within 0\.5 s \(--request-timeout\)"):
                await GenerateClient(hasty, url, "k", retries=2).generate([1], {"seconds": 60})
            await hasty.close()

    asyncio.run(scenario())


def test_a_session_is_closed_while_nobody_reads_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.utils.http_client._CLOSE_S", 0.2)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            http = Http(600.0)
            client = GenerateClient(http, url, None, retries=0)
            request = asyncio.create_task(client.generate(list(range(4_000_000)), {}))
            connection, _ = await asyncio.to_thread(server.accept)
            with connection:
                await asyncio.to_thread(connection.recv, 1 << 16)
                await asyncio.wait_for(http.close(), 60)
                request.cancel()
                await asyncio.wait([request], timeout=60)
                assert request.done()

    asyncio.run(scenario())


def test_control_errors_name_engine_call_and_answer_without_keys() -> None:
    async def scenario() -> None:
        async def refuse(request: web.Request) -> web.StreamResponse:
            return web.json_response({"message": f"no, {request.headers['Authorization']}"}, status=400)

        async def hang(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            return web.Response()

        async with serving(refuse) as url:
            control = EngineControl(url, "admin-s3cret", "generate-s3cret", timeout=60)
            with pytest.raises(EngineError) as caught:
                await asyncio.to_thread(control.pause)
            expected = rf'engine {url}: POST /pause_generation: status 400: {{"message": "no, Bearer ***"}}'
            assert str(caught.value) == expected
        async with serving(hang) as url:
            control = EngineControl(url, None, None, timeout=0.2)
            with pytest.raises(EngineError, match=rf"engine {url}: POST /continue_generation: no answer within"):
                await asyncio.to_thread(control.continue_)
            assert not await asyncio.to_thread(control.health)

    asyncio.run(scenario())


def test_flush_waits_for_requests_that_are_leaving() -> None:
    async def scenario() -> None:
        handler, seen = answers((400, {"m": "busy"}), (400, {"m": "busy"}), (200, {}))
        async with serving(handler) as url:
            await asyncio.to_thread(EngineControl(url, None, None, timeout=60).flush_cache)
        assert len(seen) == 3
        busy, _ = answers((400, {"m": "busy"}))
        async with serving(busy) as url:
            with pytest.raises(EngineError, match="flush_cache: status 400"):
                await asyncio.to_thread(EngineControl(url, None, None, timeout=2).flush_cache)

    asyncio.run(scenario())


def test_requests_and_replies_that_strict_json_does_not_know() -> None:
    async def scenario() -> None:
        handler, seen = answers((200, '{"text": "x", "meta_info": {"log_prob": NaN}}'))
        async with serving(handler) as url:
            reply = await GenerateClient(http(), url, None, retries=0).generate([1, 2], {"logit_bias": {7: -1.5}})
        assert reply["text"] == "x"
        assert math.isnan(reply["meta_info"]["log_prob"])
        assert seen[0]["body"]["sampling_params"] == {"logit_bias": {"7": -1.5}}

    asyncio.run(scenario())


OPEN_FILES = """
import asyncio, resource, sys
from argparse import Namespace
from slime.backends.sglang.client import GenerateClient
from slime.rollout.runtime import RolloutRuntime
from slime.utils.http_client import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
async def main():
    runtime = RolloutRuntime(Namespace(request_timeout=60.0, sglang_server_concurrency=500, num_engines=2))
    client = GenerateClient(runtime.http, "http://127.0.0.1:9", None, retries=0)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    taken = []
    try:
        while True:
            taken.append(open("/dev/null"))
    except OSError:
        pass
    try:
        await client.generate([1], {})
    except Exception as error:
        print(error)
    allow_open_files()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
asyncio.run(main())
"""


@pytest.mark.parametrize(("hard", "allowed"), [(2048, 1512), (128, 128)])
def test_files_that_a_process_may_open_are_raised_and_too_few_are_named(hard: int, allowed: int) -> None:
    words = [sys.executable, "-c", OPEN_FILES, str(hard)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    raised, error, all_of_them = done.stdout.splitlines()
    assert (int(raised), int(all_of_them)) == (allowed, hard)
    assert re.search(rf"Too many open files.* {allowed} open files.*ulimit -Hn.*--sglang-server-concurrency", error)
    assert ("up to 1000 requests may be in flight, but this process may have" in done.stderr) == (hard < allowed + 1)


def test_a_reserved_port_is_taken_until_released_and_never_reserved_twice() -> None:
    first = PortReservation("127.0.0.1")
    in_another_process = "from slime.utils.http_utils import PortReservation as R; print(R('127.0.0.1').port)"
    other = subprocess.run([sys.executable, "-c", in_another_process], capture_output=True, text=True, check=True)
    assert int(other.stdout) != first.port
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            server.bind(("127.0.0.1", first.port))
        first.release()
        assert PortReservation("127.0.0.1").port != first.port, "released for the server, still ours"
        server.bind(("127.0.0.1", first.port))
    first.close()


def test_reserved_ports_are_free_on_every_address_and_in_a_row() -> None:
    with socket.socket() as somebody:
        free = PortReservation("127.0.0.1")
        free.release()
        somebody.bind(("127.0.0.2", free.port))
        free.close()
        block = PortReservation("127.0.0.1", 7)
        after = PortReservation("127.0.0.1")
        ports = range(block.port, block.port + 7)
        assert free.port not in ports
        assert after.port not in ports
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("0.0.0.0", port))
        after.close()
        block.close()


@pytest.mark.parametrize("stream", [False, True])
def test_servers_are_asked_past_the_hosts_proxies(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left of a body can be read when the request is over."""
    proxy, servers = RecordingProxy(), Servers()
    servers.answers["/file"] = 200, "x" * (1 << 20)
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    try:
        url, key = f"{servers.url}/file", {"Authorization": "k"}
        with ask_directly("GET", url, timeout=10.0, headers=key, stream=stream) as reply:
            assert reply.json() == "x" * (1 << 20)
        assert ask_directly("POST", url, timeout=(5.0, 10.0), data=b"[1]").ok
        assert (servers.asked, servers.posted) == ([("/file", "k")], [("/file", [1])])
    finally:
        servers.close()
        assert proxy.close() == []


def test_an_ipv6_address_is_written_in_brackets_once() -> None:
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert http_url("fd00::1", 80) == http_url("[fd00::1]", 80) == "http://[fd00::1]:80"


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address of this machine"):
        PortReservation("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.7", False), ("no-such-host.invalid", False)]
)
def test_addresses_of_this_machine(host: str, own: bool) -> None:
    assert is_own_address(host) == own


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Failed to establish a new connection: [Errno 111] Connection refused"),
        ("http://127.0.0.1:99999", "Failed to parse: http://127.0.0.1:99999/health"),
    ],
)
def test_a_server_that_is_not_there_is_told_in_a_word(url: str, why: str) -> None:
    with pytest.raises(EngineError) as told:
        ask_server("the server", url, "GET", "/health", key=None, timeout=5)
    assert str(told.value) == f"the server: GET /health: {why}"
