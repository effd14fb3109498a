"""Servers that run and answer no more: how they are found out, named, and what becomes of the requests they had."""

from __future__ import annotations

import asyncio
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from aiohttp import web
from ray.exceptions import GetTimeoutError, RayActorError

from slime.backends.sglang.client import EngineControl, EngineError, GenerateClient, HangError, NoAnswerError
from slime.backends.sglang.server import Pulse, Server
from slime.ray.examination import Examiner
from slime.utils import http_client
from slime.utils.errors import DeadlineError
from slime.utils.http_client import Http, NoReplyError, RequestError
from tests.fake_client import FakeClient, indices, reply, rollout
from tests.unit.test_engines import failure
from tests.unit.test_http_utils import answers, serving
from tests.waiting import wait_for

NUM_GPUS = 0


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that is stopped: the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def asking(*outcomes: bool) -> tuple[Callable[[float], None], list[float]]:
    """A question that is answered or not, as often as there are outcomes, and then as the last one."""
    asked: list[float] = []

    def ask(timeout: float) -> None:
        asked.append(timeout)
        if not outcomes[min(len(asked), len(outcomes)) - 1]:
            raise NoAnswerError("engine http://e1: GET /health: no answer within 3 s")

    return ask, asked


def test_one_lost_answer_is_no_silence_and_two_in_a_row_are() -> None:
    ask, asked = asking(True, False, True, True, False, False)
    pulse = Pulse(ask, interval=0.01, timeout=3.0)
    pulse.begin()
    wait_for(lambda: pulse.silence, "two questions in a row without an answer")
    assert asked == [3.0] * 6
    assert pulse.silence is not None
    begin = "engine http://e1: GET /health: no answer within 3 s, 2 times in a row; it last answered at 2"
    assert pulse.silence.startswith(begin)
    pulse.end()


def test_trouble_of_ones_own_neither_ends_the_asking_nor_is_the_servers() -> None:
    calls: list[float] = []

    def ask(timeout: float) -> None:
        calls.append(timeout)
        if len(calls) == 1:
            raise OSError("too many open files")

    pulse = Pulse(ask, interval=0.01, timeout=3.0)
    pulse.begin()
    wait_for(lambda: len(calls) > 2, "it is asked again")
    assert pulse.silence is None
    pulse.end()


def test_a_server_that_was_stopped_in_order_is_not_called_silent() -> None:
    ask, asked = asking(False)
    pulse = Pulse(ask, interval=0.01, timeout=3.0)
    pulse.end()
    pulse.begin()
    assert pulse.examine() is None
    assert not asked


class Stub(Server):
    """A server whose process runs, at an address."""

    def __init__(self, url: str, tmp_path: Path) -> None:
        args = Namespace(rollout_health_check_interval=0.05, rollout_health_check_timeout=1.0)
        super().__init__("engine 1", args, "127.0.0.1", tmp_path / "log")
        self.url = url

    def _ask(self, timeout: float) -> None:
        EngineControl(self.url, None, None, timeout).ask("/health")


def test_a_stopped_server_is_not_alive_and_says_since_when_and_what_it_was_asked(silent: str, tmp_path: Path) -> None:
    server, said = Stub(silent, tmp_path), []
    server.check()  # nobody listens to it yet
    server.listen()

    def hangs() -> bool:
        try:
            server.check()
        except HangError as error:
            said.append(str(error))
        return bool(said)

    wait_for(hangs, "the server is found to hang")
    asked = f"engine {silent}: GET /health: no answer within 1 s, 2 times in a row; it last answered at 2"
    assert said[0].startswith(f"engine 1 at {silent} hangs: {asked}")
    server.stop()


def test_a_server_that_has_gone_is_for_its_exit_status_to_tell(silent: str, tmp_path: Path) -> None:
    server = Stub("http://127.0.0.1:1", tmp_path)
    server.listen()
    server.examine("nothing")
    server.check()
    with pytest.raises(HangError, match=r"hangs: .* 2 times in a row"):  # who is asked for more must be there
        server.examine("a push", lambda timeout: EngineControl(server.url, None, None, timeout).ask("/server_info"))
    server.stop()


@pytest.mark.parametrize("before", [0, 5])
def test_a_server_that_has_died_is_not_said_to_hang_whatever_it_is_asked(before: int, tmp_path: Path) -> None:
    """Its supervisor may take a moment to end its tree."""
    server = Stub("http://127.0.0.1:1", tmp_path)
    server.listen()
    statuses = iter([None] * before)
    server._process = Namespace(  # type: ignore[assignment]
        poll=lambda: next(statuses, 137), tail=lambda lines: "bang", stop=lambda: None
    )
    with pytest.raises(EngineError, match=r"ended with status 137 \(signal 9\)") as ended:
        server.examine("a push", lambda timeout: EngineControl(server.url, None, None, timeout).ask("/server_info"))
    assert not isinstance(ended.value, HangError)
    server.stop()


def test_a_server_that_answers_may_still_fail_an_examination(tmp_path: Path) -> None:
    """Its scheduler may be stopped: what it answers by itself says nothing of that."""

    async def scenario() -> None:
        handler, _ = answers((200, "ok"))
        async with serving(handler) as url:
            server = Stub(url, tmp_path)
            server.listen()
            await asyncio.to_thread(server.examine, "a request")
            ask, asked = asking(False)
            with pytest.raises(HangError, match=r"hangs: .*it last answered at 2.* \(asked because of a request\)"):
                await asyncio.to_thread(server.examine, "a request", ask)
            assert len(asked) == 2
            with pytest.raises(HangError, match="hangs"):
                server.check()  # as the actor's watch does
            server.stop()

    asyncio.run(scenario())


def test_an_error_status_is_an_answer_unless_a_success_is_asked_for() -> None:
    async def scenario() -> None:
        async def busy(request: web.Request) -> web.Response:
            return web.Response(status=503)

        async with serving(busy) as url:
            control = EngineControl(url, None, None, 5.0)
            await asyncio.to_thread(control.ask, "/health")
            with pytest.raises(EngineError, match=r"GET /health_generate: status 503"):
                await asyncio.to_thread(lambda: control.ask("/health_generate", succeeds=True))

    asyncio.run(scenario())


# ---- who asks for an examination


class Actor:
    """Of an engine; its examinations wait for ``released`` and then raise ``error``, if any."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.released = error, threading.Event()
        self.released.set()
        self.asked: list[str] = []
        self.examine = Namespace(remote=self._examine)

    def _examine(self, because: str, *, paused: bool) -> Actor:
        assert not paused, "the question is whether it generates"
        self.asked.append(because)
        return self


@pytest.fixture(autouse=True)
def answer_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(actor: Actor, timeout: float) -> None:
        if not actor.released.wait(timeout):
            raise GetTimeoutError
        if actor.error is not None:
            raise actor.error

    monkeypatch.setattr(ray, "get", get)


def hanging(rank: int) -> Exception:
    return failure(HangError(f"engine {rank} at http://e{rank} hangs: no answer\nlast lines of its log:\nbang"))


def ask(examiner: Examiner) -> str | None:
    with examiner.working():
        return asyncio.run(examiner("POST: no reply"))


def test_engines_that_may_be_asleep_are_not_asked() -> None:
    actors = {"http://e0": Actor(hanging(0))}
    examiner = Examiner(lambda: actors, 1.0, lambda url: None)
    assert asyncio.run(examiner("POST: no reply")) == "no rollout is under way, so that no engine was asked"
    assert not actors["http://e0"].asked


def test_the_engines_that_hang_are_left_out() -> None:
    actors = {"http://e0": Actor(), "http://e1": Actor(hanging(1)), "http://e2": Actor(RayActorError())}
    removed: dict[str, Actor] = {}
    examiner = Examiner(lambda: actors, 1.0, lambda url: removed.update({url: actors.pop(url)}))
    assert ask(examiner) is None
    assert list(removed) == ["http://e1", "http://e2"]
    assert removed["http://e1"].asked == ["POST: no reply"]
    told = ask(examiner)
    assert told is not None
    assert told.startswith("the only engine left answers")
    assert len(removed["http://e1"].asked) == 1, "it is left alone"


def test_when_all_engines_hang_each_is_named_and_none_is_removed() -> None:
    actors = {f"http://e{rank}": Actor(hanging(rank)) for rank in range(2)}
    examiner = Examiner(lambda: actors, 1.0, lambda url: pytest.fail("the driver ends the run, with every cause"))
    with pytest.raises(RequestError, match=r"no engine is left that answers\nengine 0 .*\nengine 1 .* no answer$"):
        ask(examiner)


def test_those_that_come_back_are_left_out_also_when_all_hang_and_requests_are_sent_again() -> None:
    actors = {f"http://e{rank}": Actor(hanging(rank)) for rank in range(2)}
    examiner = Examiner(lambda: actors, 1.0, lambda url: actors.pop(url), come_back=True)
    assert ask(examiner) is None
    assert not actors
    assert ask(examiner) is None, "nobody is there, for now"


def test_requests_that_fail_together_share_an_examination_and_one_that_gives_up_spoils_it_for_nobody() -> None:
    actors = {"http://e0": Actor(), "http://e1": Actor(hanging(1))}
    actors["http://e0"].released.clear()
    examiner = Examiner(lambda: actors, 1.0, lambda url: None)

    async def scenario() -> list[str | None]:
        first, *others = [asyncio.ensure_future(examiner("POST: no reply")) for _ in range(5)]
        while not actors["http://e0"].asked:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        actors["http://e0"].released.set()
        return await asyncio.gather(*others)

    with examiner.working():
        assert asyncio.run(scenario()) == [None] * 4
    assert len(actors["http://e0"].asked) == 1


class Turn:
    """A lock that tells who waits for it."""

    def __init__(self) -> None:
        self._lock, self.waited = threading.Lock(), threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.waited.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def test_nothing_is_examined_while_engines_are_paused_for_a_push() -> None:
    actors = {"http://e0": Actor()}
    examiner = Examiner(lambda: actors, 1.0, lambda url: None)
    examiner._turn = turn = Turn()  # type: ignore[assignment]
    examiner.forbid()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, examiner)
        assert turn.waited.wait(10)
        assert not actors["http://e0"].asked
        examiner.allow()
        assert asked.result(10) is not None
        # And a push waits for an examination that is under way.
        turn.waited.clear()
        actors["http://e0"].released.clear()
        asked = pool.submit(ask, examiner)
        wait_for(lambda: len(actors["http://e0"].asked) == 2, "the second examination")
        held = pool.submit(examiner.forbid)
        assert turn.waited.wait(10)
        assert not held.done()
        actors["http://e0"].released.set()
        held.result(10)
        examiner.allow()


def test_a_push_that_may_not_begin_leaves_the_examination_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = {"http://e0": Actor()}
    examiner = Examiner(lambda: actors, 1.0, lambda url: None)
    actors["http://e0"].released.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, examiner)
        wait_for(lambda: actors["http://e0"].asked, "the examination")
        monkeypatch.setattr(examiner, "_limit", 0.0)
        with pytest.raises(DeadlineError, match=r"not ended within 0 s \(--rollout-health-check-timeout\)"):
            examiner.forbid()
        examiner.allow()
        actors["http://e0"].released.set()
        assert str(asked.result(10)).startswith("the only engine left answers")
    examiner.forbid()
    examiner.allow()
    examiner.allow()


def test_an_engine_that_could_not_be_left_out_is_asked_again() -> None:
    actors = {"http://e0": Actor(), "http://e1": Actor(hanging(1))}
    failures = [RequestError("router: no answer")]

    def remove(url: str) -> None:
        if failures:
            raise failures.pop()

    examiner = Examiner(lambda: actors, 1.0, remove)
    with pytest.raises(RequestError, match="router"):
        ask(examiner)
    assert ask(examiner) is None
    assert len(actors["http://e1"].asked) == 2


@pytest.mark.parametrize("verdict", ["hangs", "answers", "none left"])
def test_a_request_without_a_reply_is_sent_again_where_an_engine_hangs(
    verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_FIRST_BACKOFF_S", 0.01)
    told: list[str] = []
    requests: list[web.Request] = []

    async def examine(problem: str) -> str | None:
        told.append(problem)
        if verdict == "none left":
            raise RequestError("no engine is left that answers")
        return None if verdict == "hangs" else "all 2 engines answer"

    async def handler(request: web.Request) -> web.Response:
        requests.append(request)
        if len(requests) == 1:
            await asyncio.sleep(60)
        return web.json_response({"text": "late"})

    async def scenario() -> Any:
        async with serving(handler) as url:
            http = Http(0.5)
            http.examine_by(url, examine)
            try:
                return await GenerateClient(http, url, None, retries=3).generate([1], {})
            finally:
                await http.close()

    if verdict == "hangs":
        assert asyncio.run(scenario()) == {"text": "late"}
    elif verdict == "answers":
        with pytest.raises(NoReplyError, match=r"no reply within 0.5 s; all 2 engines answer \(--request-timeout\)"):
            asyncio.run(scenario())
    else:
        with pytest.raises(RequestError, match="no engine is left") as raised:
            asyncio.run(scenario())
        assert not isinstance(raised.value, NoReplyError)
    assert len(told) == 1
    assert told[0].endswith("/generate: no reply within 0.5 s")
    assert len(requests) == (2 if verdict == "hangs" else 1)


def test_a_response_that_takes_too_long_on_engines_that_answer_is_one_sample_that_failed(
    make_args: Callable[..., Namespace], use: Callable[..., FakeClient]
) -> None:
    def answer(number: int, input_ids: list[int], params: Any) -> Any:
        if len(input_ids) == 2:
            raise NoReplyError("POST http://r/generate: no reply within 9 s; all 2 engines answer (--request-timeout)")
        return reply("x")

    use(FakeClient(answer))
    output = rollout(make_args(on_sample_error="drop"))
    assert indices(output.samples) == [0, 2, 3, 4]
    assert output.metrics is not None
    assert output.metrics["rollout/sample_failures/generate_timeout"] >= 1
