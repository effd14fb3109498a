"""Which deaths of engines a run survives, with stand-ins for Ray and the actors."""

from __future__ import annotations

import asyncio
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.backends.sglang.client import EngineError
from slime.ray.engines import Engines
from slime.ray.rollout_manager import RolloutManager
from slime.ray.supervision import Deadline, RunError, Supervisor
from slime.rollout import abort
from slime.rollout.gate import _gates
from slime.rollout.loop import background_loop
from slime.rollout.model_urls import ACTOR, REWARD
from slime.rollout.state import concurrency
from slime.weights import EngineAddress

NUM_GPUS = 0

_LIMIT = Deadline(5.0)


class Ref:
    """A reference to an answer that comes when `give` is called."""

    def __init__(self) -> None:
        self.given: Any = None
        self.is_done = False

    def give(self, value: Any) -> Ref:
        self.given, self.is_done = value, True
        return self


def failure(error: Exception) -> Exception:
    """What Ray raises in the driver when an actor's method raised ``error``."""
    try:
        raise error
    except Exception as caught:
        return RayTaskError("f", traceback.format_exc(), caught, "title", 1, "10.0.0.1").as_instanceof_cause()


class Actor:
    """Answers each method at once with what was set for it; its watch ends by `die`."""

    def __init__(self, rank: int, **answers: Any) -> None:
        self.rank = rank
        self.watching = Ref()
        self.calls: list[tuple[Any, ...]] = []
        self.answers = answers

    def die(self, error: Exception | None = None) -> None:
        end = f"engine {self.rank} at http://e{self.rank} ended with status 137 (signal 9)"
        log = "many\n" * 99 + "bang"
        self.watching.give(error or failure(EngineError(f"{end}\nlast lines of its log:\n{log}")))

    def __getattr__(self, name: str) -> Any:
        def remote(*values: Any, **keywords: Any) -> Ref:
            self.calls.append((name, *values))
            answer = self.answers.get(name)
            return Ref().give(answer() if callable(answer) else answer)

        return Namespace(remote=(lambda: self.watching) if name == "watch" else remote)


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    """Ray's calls on `Ref`; the actors that were killed."""
    killed: list[Actor] = []

    def wait(refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        done = [ref for ref in reversed(refs) if ref.is_done][:num_returns]  # the watches, which come last, first
        return done, [ref for ref in refs if ref not in done]

    def get(ref: Ref, timeout: float) -> Any:
        if not ref.is_done:
            raise GetTimeoutError
        if isinstance(ref.given, Exception):
            raise ref.given
        return ref.given

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    return killed


class Cluster:
    """Two engines that serve, a manager and a trainer."""

    def __init__(self, serving: bool = True, count: int = 2) -> None:
        self.supervisor = Supervisor()
        args = Namespace(run_dir="run", rollout_health_check_timeout=1.0)
        self.engines = Engines(args, self.supervisor)
        self.actors = [Actor(rank, start=f"http://e{rank}", sleep=rank) for rank in range(count)]
        self.manager, self.trainer = Actor(8), Actor(9)
        self.engines.watch(self.actors)
        urls = self.supervisor.wait(self.engines.begin("start"), "start", _LIMIT)
        if serving:
            self.engines.survive([EngineAddress(url, 1) for url in urls], self.manager)
        self.supervisor.watch("the rollout manager", self.manager)
        self.supervisor.watch("trainer 0", self.trainer)

    def rollout(self) -> list[Any]:
        """A wait of the driver's, for somebody else."""
        return self.supervisor.wait({"the rollout manager": Ref().give("samples")}, "rollout 3", _LIMIT)


def test_a_run_goes_on_without_an_engine_and_says_so_once(
    killed: list[Actor], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster()
    assert cluster.engines.metrics() == {"rollout/engines_alive": 2}
    cluster.actors[1].die()
    assert cluster.rollout() == cluster.rollout() == ["samples"]
    assert cluster.engines.metrics() == {"rollout/engines_alive": 1}
    assert killed == [cluster.actors[1]]
    assert cluster.manager.calls == [("remove_engine", "http://e1")]
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: rollout 3: engine 1 failed (weight version none yet): engine 1 at http://e1 ended with" in line
    assert "status 137 (signal 9); going on with 1 of 2 engines, which get its requests (log: run/logs/" in line
    assert cluster.engines.call("sleep", "sleep", _LIMIT) == [0]
    assert cluster.engines.living == cluster.actors[:1]


def test_a_call_to_an_engine_that_dies_of_it_is_no_failure() -> None:
    cluster = Cluster()

    def die() -> Exception:
        cluster.actors[1].die(RayActorError())
        return failure(EngineError("connection refused"))

    cluster.actors[1].answers["sleep"] = die
    assert cluster.engines.call("sleep", "sleep", _LIMIT) == [0]
    assert len(cluster.engines.living) == 1


def test_a_call_that_fails_while_another_engine_dies_is_a_failure() -> None:
    cluster = Cluster()

    def die() -> Exception:
        cluster.actors[1].die()
        return failure(EngineError("refused"))

    cluster.actors[0].answers["sleep"] = die
    with pytest.raises(RunError, match=r"sleep: engine 0 failed .*refused"):
        cluster.engines.call("sleep", "sleep", _LIMIT)


@pytest.mark.parametrize("count", [2, 3])
def test_a_push_is_made_again_without_those_that_died_in_it(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, attempts = Cluster(count=3), []

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        attempts.append([engine.url for engine in engines])
        if len(attempts) < count:
            cluster.actors[len(attempts)].die()
            answer: Any = failure(EngineError("connection reset"))
        else:
            answer = {"seconds": 1.0}
        calls: dict[str, Any] = {"trainer 0": Ref().give(answer)}
        return cluster.supervisor.wait(calls, "push weights of version 4", _LIMIT)[0]  # type: ignore[no-any-return]

    assert cluster.engines.push(4, publish) == {"seconds": 1.0}
    assert attempts == [["http://e0", "http://e1", "http://e2"], ["http://e0", "http://e2"], ["http://e0"]][:count]
    lines = [line for line in capsys.readouterr().err.splitlines() if "push of version" in line]
    assert len(lines) == count - 1
    assert "push of version 4: skipped engine 1, which was lost at 2" in lines[0]
    cluster.engines.push(5, publish)
    assert "push of version" not in capsys.readouterr().err


def test_a_push_that_no_engine_is_seen_to_fail_finds_the_one_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its server listens, so that nothing but the push's own deadline tells of it."""
    cluster, attempts = Cluster(), []

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        attempts.append([engine.url for engine in engines])
        if len(engines) == 2:
            raise RunError("pause: no answer within 9 s (--weight-update-timeout) from http://e1")
        return {}

    def hang() -> Exception:
        error = failure(EngineError("engine 1 at http://e1 hangs: GET /server_info: no answer within 1 s"))
        cluster.actors[1].die(error)
        return error

    cluster.actors[1].answers["examine"] = hang
    assert cluster.engines.push(4, publish) == {}
    assert attempts == [["http://e0", "http://e1"], ["http://e0"]]
    for actor in cluster.actors:
        because = "push of version 4: pause: no answer within 9 s (--weight-update-timeout) from http://e1"
        assert actor.calls[-1] == ("examine", because)
    lost, skipped = capsys.readouterr().err.splitlines()
    assert "engine 1 at http://e1 hangs: GET /server_info: no answer within 1 s; going on with 1 of 2" in lost
    assert "push of version 4: skipped engine 1, which was lost at" in skipped


def test_a_push_that_fails_by_itself_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, attempts = Cluster(), []

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        attempts.append([engine.url for engine in engines])
        raise RunError("digests differ")

    with pytest.raises(RunError, match="digests differ"):
        cluster.engines.push(4, publish)
    assert attempts == [["http://e0", "http://e1"]]


def test_without_any_engine_the_run_ends_with_every_cause(killed: list[Actor]) -> None:
    cluster = Cluster()
    for actor in cluster.actors[::-1]:
        actor.die()
    with pytest.raises(RunError) as raised:
        cluster.rollout()
    first, *rest = str(raised.value).split("\n", 1)
    assert first == "rollout 3: no engine is left, engine 1 and engine 0 were lost"
    for rank in (0, 1):
        assert (
            f"engine {rank} at http://e{rank} ended with status 137 (signal 9)\nlast lines of its log:\nmany" in rest[0]
        )
    assert rest[0].count("many") == 2 * 14
    assert rest[0].count("bang") == 2
    with pytest.raises(RunError, match="no engine is left"):
        cluster.engines.push(4, lambda engines: cluster.rollout()[0])


def kill_before_it_serves(cluster: Cluster) -> None:
    cluster.actors[0].die()


def kill_the_trainer(cluster: Cluster) -> None:
    cluster.trainer.die(RayActorError())


def kill_the_manager(cluster: Cluster) -> None:
    cluster.manager.die(failure(EngineError("router at http://r ended with status 1")))


@pytest.mark.parametrize(
    ("kill", "serving", "cause"),
    [
        (kill_before_it_serves, False, r"engine 0 failed .*engine 0 at http://e0 ended with status 137"),
        (kill_the_trainer, True, r"the process of trainer 0 died"),
        (kill_the_manager, True, r"the rollout manager failed .*router at http://r ended with status 1"),
    ],
)
def test_other_deaths_end_the_run(kill: Callable[[Cluster], None], serving: bool, cause: str) -> None:
    cluster = Cluster(serving)
    kill(cluster)
    with pytest.raises(RunError, match=f"rollout 3: {cause}"):
        cluster.supervisor.wait({"the rollout manager": Ref()}, "rollout 3", _LIMIT)  # type: ignore[dict-item]


def test_the_data_side_forgets_an_engine() -> None:
    manager, removed = object.__new__(RolloutManager), []
    manager._args = Namespace(num_engines=2, sglang_server_concurrency=8)
    manager._engines, manager._removing = {"http://e0", "http://e1"}, threading.Lock()
    others = Namespace(remove=lambda url: pytest.fail("the reward model's engines are others"))

    def remove(url: str) -> None:
        removed.append(url)
        if len(removed) == 1:
            raise EngineError("router: no answer")

    manager._routers = {ACTOR: Namespace(remove=remove), REWARD: others}  # type: ignore[dict-item]
    abort.register_engines(["http://e0", "http://e1"], None)
    try:
        with pytest.raises(EngineError, match="no answer"):
            manager.remove_engine("http://e1")
        for _ in range(2):  # by who finds out that it hangs, and by the driver
            manager.remove_engine("http://e1")
        assert list(abort._engines) == ["http://e0"]
    finally:
        abort.register_engines([], None)
    assert removed == 2 * ["http://e1"], "until it was"
    assert concurrency(manager._args) == 8

    async def capacity() -> int:
        return _gates[asyncio.get_running_loop()]._capacity

    assert background_loop().run(capacity(), timeout=60, what="the bound on requests") == 8


def test_the_death_of_the_only_engine_is_told_as_it_is() -> None:
    cluster = Cluster(count=1)
    cluster.actors[0].die()
    with pytest.raises(RunError, match=r"^rollout 3: engine 0 failed .*status 137"):
        cluster.rollout()
