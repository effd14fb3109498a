"""Which deaths of engines a run survives, with stand-ins for Ray and the actors."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.backends.sglang.client import EngineError, HangError
from slime.driver import rollout_manager
from slime.fleet import actors as fleet_actors
from slime.fleet import placement
from slime.fleet import routers as fleet_routers
from slime.fleet.engines import Engines
from slime.fleet.joining import RefusedError
from slime.fleet.membership import Member, Membership
from slime.fleet.placement import Placement, Slot
from slime.fleet.routers import Routers
from slime.fleet.spec import Fleet
from slime.ray.engine_actor import EnginePlan
from slime.ray.supervision import Deadline, RunError, Supervisor
from slime.rollout.engine.loop import background_loop
from slime.rollout.runtime import RolloutRuntime
from slime.weights import EngineAddress
from tests.small_fleet import ACTOR, REWARD, entry

NUM_GPUS = 0

_LIMIT = Deadline(5.0)


def urls_of(engines: list[EngineAddress]) -> list[str]:
    return [engine.url for engine in engines]


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
            if isinstance(answer, Ref):
                return answer
            return Ref().give(answer() if callable(answer) else answer)

        return Namespace(remote=(lambda: self.watching) if name == "watch" else remote)


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    """Ray's calls on `Ref`; the actors that were killed."""
    killed: list[Actor] = []

    def wait(refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
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


@dataclass
class ActorClass:
    """In the place of Ray's class of engines."""

    remote: Callable[[EnginePlan], Actor]

    def options(self, **options: Any) -> ActorClass:
        return self


class Cluster:
    """Engines that serve, of the trained model and of a reward model, a manager and a trainer."""

    def __init__(
        self,
        serving: bool = True,
        count: int = 2,
        rewarders: int = 0,
        beside: bool = True,
        restarts: int | None = None,
        min_engines: int = 1,
    ) -> None:
        self.supervisor = Supervisor()
        limits = {"rollout_health_check_timeout": 1.0, "engine_start_timeout": 5.0, "placement_timeout": 5.0}
        recovery = {"use_fault_tolerance": restarts is not None, "engine_restart_limit": restarts or 0}
        recovery["min_engines"] = min_engines
        options = {"run_dir": "run", "offload_rollout": None, "use_rollout_routing_replay": False}
        self.engines = Engines(Namespace(**options, **limits, **recovery), self.supervisor)
        self.actors: list[Actor] = []
        self.manager, self.trainer = Actor(8), Actor(9)
        entries = {entry(count=count, beside=beside): count, entry(REWARD, count=rewarders): rewarders}
        slots = [[Slot(10 * i + rank, "here", None) for rank in range(n)] for i, n in enumerate(entries.values())]
        self.placement = Placement([*slots[0], *slots[1]], [], slots)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet_actors, "as_actor", lambda cls, **threads: ActorClass(self.create))
            self.engines.create(Fleet(1, tuple(entries)), self.placement)
        self.engines.started(self.supervisor.wait(self.engines.begin("start"), "start", _LIMIT))
        if serving:
            self.engines.serve(self.manager, None)
        self.supervisor.watch("the rollout manager", self.manager)
        self.supervisor.watch("trainer 0", self.trainer)

    def create(self, plan: EnginePlan) -> Actor:
        name = plan.name.replace("reward engine", "r").replace("engine", "e")
        self.actors.append(Actor(plan.rank, start=f"http://{name}{plan.rank}", sleep=plan.rank))
        return self.actors[-1]

    def add(self, model: str = "actor", start: Any = None) -> str:
        """One more, whose start gives ``start`` if given, when it has joined; RefusedError where it does not."""
        return self.joined(*self.begin_to_add(model, start))

    def begin_to_add(self, model: str = "actor", start: Any = None) -> tuple[str, list[tuple[str, str]]]:
        """Its name, and what is told of it."""
        told: list[tuple[str, str]] = []

        def create(plan: EnginePlan) -> Actor:
            actor = self.create(plan)
            actor.answers["start"] = start or actor.answers["start"]
            return actor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet_actors, "as_actor", lambda cls, **threads: ActorClass(create))
            return self.engines.add(model, told=lambda *what: told.append(what)), told

    def joined(self, name: str, told: list[tuple[str, str]]) -> str:
        """The name of one that was begun to be added, when ``told`` has what has become of it."""
        for _ in range(9):
            if told:
                break
            self.rollout()
        assert [who for who, _ in told] == [name]
        if told[0][1]:
            raise RefusedError(told[0][1])
        return name

    def serving(self) -> list[list[str]]:
        """What the manager was told of the trained model's, call by call."""
        return [list(call[1].serving("actor")) for call in self.manager.calls if call[0] == "serve"]

    def rollout(self) -> list[Any]:
        """A wait of the driver's, for somebody else."""
        return self.supervisor.wait({"the rollout manager": Ref().give("samples")}, "rollout 3", _LIMIT)


def test_a_run_goes_on_without_an_engine_and_says_so_once(
    killed: list[Actor], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster()
    assert cluster.engines.metrics()["rollout/engines_alive"] == 2
    cluster.actors[1].die()
    assert cluster.rollout() == cluster.rollout() == ["samples"]
    assert cluster.engines.metrics()["rollout/engines_alive"] == 1
    assert killed == [cluster.actors[1]]
    assert cluster.serving() == [["http://e0", "http://e1"], ["http://e0"]]
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: rollout 3: engine 1 failed (weight version none yet): engine 1 at http://e1 ended with" in line
    assert "status 137 (signal 9); going on with 1 of 2 engines, which get its requests (log: run/logs/" in line
    assert cluster.engines.call("sleep", "sleep", _LIMIT) == [0]
    assert [member.actor for member in cluster.engines.membership.engines] == cluster.actors[:1]


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (failure(HangError("engine 1 at http://e1 has not answered for 60 s")), "engine_hangs"),
        (failure(EngineError("engine 1 at http://e1 ended, which hangs: so says its log")), "engine_died"),
        (RayActorError(error_msg="engine 1 at http://e1 hangs: its host says"), "engine_died"),
    ],
    ids=["hangs", "ended", "actor died"],
)
def test_an_engine_that_hangs_is_told_from_one_that_died_by_whoever_found_out(
    end: Exception, kind: str, told: Callable[[], list[dict[str, Any]]]
) -> None:
    """Not by the words, which may be those of its log."""
    cluster = Cluster()
    cluster.actors[1].die(end)
    cluster.rollout()
    assert [(event["kind"], event["subject"]) for event in told()] == [(kind, "engine 1")]


def test_a_call_to_an_engine_that_dies_of_it_is_no_failure() -> None:
    cluster = Cluster()

    def die() -> Exception:
        cluster.actors[1].die(RayActorError())
        return failure(EngineError("connection refused"))

    cluster.actors[1].answers["sleep"] = die
    assert cluster.engines.call("sleep", "sleep", _LIMIT) == [0]
    assert len(cluster.engines.membership.engines) == 1


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
        attempts.append(urls_of(engines))
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
        attempts.append(urls_of(engines))
        if len(engines) == 2:
            raise RunError("pause: no answer within 9 s (--weight-update-timeout) from http://e1")
        return {}

    def hang() -> Exception:
        error = failure(HangError("engine 1 at http://e1 hangs: GET /server_info: no answer within 1 s"))
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
        attempts.append(urls_of(engines))
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


class FakeRouter:
    """Takes notes of what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = False

    def add(self, url: str) -> None:
        self.calls.append(f"add {url}")

    def wait_registered(self, urls: list[str], timeout: float) -> None:
        self.calls += [f"wait {url}" for url in urls]

    def remove(self, url: str) -> None:
        if self.refuses:
            raise EngineError("router: no answer")
        self.calls.append(f"remove {url}")


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch, runtime: RolloutRuntime) -> Any:
    """Those of both models, with a `FakeRouter` each."""
    values = {"num_engines": 1, "sglang_server_concurrency": 8, "engine_start_timeout": 5.0}
    made = Routers(Namespace(**values), None, runtime)
    made._routers = {"actor": FakeRouter(), "reward": FakeRouter()}  # type: ignore[dict-item]
    made._engines = {"actor": {}, "reward": {}}
    monkeypatch.setattr(fleet_routers, "bypass_proxies", lambda hosts: None)
    return made


def members(*names: str, serves: bool = True) -> list[Member]:
    models = {"e": ACTOR, "r": REWARD}
    return [Member(name, entry(models[name[0]]), f"http://{name}", name, (), serves) for name in names]


def bound_on_requests(runtime: RolloutRuntime) -> int:
    async def capacity() -> int:
        return runtime.here().gate._capacity

    return background_loop().run(capacity(), timeout=60, what="the bound on requests")


def test_the_data_side_follows_the_membership(routers: Any, runtime: RolloutRuntime) -> None:
    first = Membership().having(*members("e0", "e1", "r0"))
    routers.serve(first)
    assert routers._routers["actor"].calls == ["add http://e0", "add http://e1", "wait http://e0", "wait http://e1"]
    assert routers._routers["reward"].calls == ["add http://r0", "wait http://r0"]
    assert (runtime.engines.urls, bound_on_requests(runtime)) == (("http://e0", "http://e1"), 16)
    joining = first.having(*members("e2", serves=False))
    routers.serve(joining)
    assert len(routers._routers["actor"].calls) == 4, "one that has no weights yet gets no request"
    grown = joining.having(*members("e2")).without("e0")
    assert [m.version for m in (first, joining, grown)] == [1, 2, 4]
    routers.serve(grown)
    assert routers._routers["actor"].calls[4:] == ["remove http://e0", "add http://e2", "wait http://e2"]
    assert (runtime.engines.urls, bound_on_requests(runtime)) == (("http://e1", "http://e2"), 16)


def test_an_engine_that_hangs_is_left_out_by_whoever_finds_it_first(routers: Any, runtime: RolloutRuntime) -> None:
    first = Membership().having(*members("e0", "e1"))
    routers.serve(first)
    router = routers._routers["actor"]
    router.refuses = True
    with pytest.raises(EngineError, match="no answer"):
        routers.leave_out("actor", "http://e1")
    assert runtime.engines.urls == ("http://e0", "http://e1"), "until it is"
    router.refuses = False
    for _ in range(2):
        routers.leave_out("actor", "http://e1")
    routers.serve(first.having(*members("e2")))  # by a driver that does not know yet
    assert router.calls[4:] == ["remove http://e1", "add http://e2", "wait http://e2"]
    assert (runtime.engines.urls, bound_on_requests(runtime)) == (("http://e0", "http://e2"), 16)
    routers.serve(first.having(*members("e2")).without("e1"))
    assert len(router.calls) == 7


def test_an_engine_joins_with_the_next_push_and_leaves(killed: list[Actor], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, pushed = Cluster(rewarders=1, beside=False), []

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        assert "http://e2" not in cluster.serving()[-1], "no request before it has the weights"
        pushed.append(urls_of(engines))
        return {"seconds": 1.0}

    monkeypatch.setattr(placement, "_reserve", lambda count, resource, timeout: [Slot(99, "here", None)] * count)
    assert cluster.add() == "engine 2"
    assert cluster.engines.metrics()["rollout/engines_alive"] == 3
    assert cluster.engines.push(4, publish) == {"seconds": 1.0}
    cluster.engines.admit()
    assert pushed == [["http://e0", "http://e1", "http://e2"]]
    assert cluster.serving()[-1] == ["http://e0", "http://e1", "http://e2"]
    cluster.engines.remove("engine 2")
    assert cluster.serving()[-1] == ["http://e0", "http://e1"]
    joined = cluster.actors[-1]
    assert [call[0] for call in joined.calls] == ["start", "leave"]
    assert killed == [joined]
    joined.die()
    assert cluster.rollout() == ["samples"], "its end is not a death"
    with pytest.raises(RunError, match="no model 'teacher' is served, there are: actor, reward"):
        cluster.add("teacher")
    with pytest.raises(RunError, match=r"remove engine 2: there is no such engine, there are: engine 0, engine 1, rew"):
        cluster.engines.remove("engine 2")
    with pytest.raises(RunError, match=r"remove reward engine 0: no other engine serves the model 'reward'"):
        cluster.engines.remove("reward engine 0")


def test_an_engine_of_another_model_serves_at_once() -> None:
    cluster = Cluster(rewarders=1, beside=False)
    cluster.actors[1].die()
    cluster.rollout()
    assert cluster.add("reward") == "reward engine 1", "on the slot of the one that died"
    assert list(cluster.manager.calls[-1][1].serving("reward")) == ["http://r0", "http://r1"]
    cluster.actors[2].die()
    with pytest.raises(RunError, match="rollout 3: reward engine 0 failed"):
        cluster.rollout()


def test_an_engine_that_does_not_start_leaves_the_run_as_it_was(killed: list[Actor]) -> None:
    cluster = Cluster(count=3, beside=False)
    cluster.actors[2].die()
    cluster.rollout()

    def fail() -> Exception:
        cluster.actors[-1].die(failure(EngineError("engine 3 ended with status 1")))
        return failure(EngineError("engine 3 ended with status 1"))

    with pytest.raises(RunError, match=r"start engine 3: .*engine 3 ended with status 1"):
        cluster.add(start=fail)
    assert cluster.rollout() == ["samples"]
    assert cluster.engines.metrics()["rollout/engines_alive"] == 2
    assert killed == cluster.actors[2:]
    assert cluster.add() == "engine 4", "the slot is free again"


def test_an_engine_that_does_not_answer_in_time_leaves_the_run_as_it_was(killed: list[Actor]) -> None:
    cluster = Cluster(rewarders=1, beside=False)
    cluster.actors[1].die()
    cluster.rollout()
    for model in ("actor", "reward"):
        with pytest.raises(RunError, match=r"start (engine 2|reward engine 1): "):
            cluster.add(model, start=lambda: failure(EngineError("no answer")))
        assert [member.name for member in cluster.engines.membership.engines] == ["engine 0", "reward engine 0"]
    assert killed == cluster.actors[1:2] + cluster.actors[3:]
    for actor in cluster.actors[3:]:
        actor.die()
    assert cluster.rollout() == ["samples"], "nobody watches those"


def test_a_reward_engine_that_dies_before_it_serves_is_no_loss() -> None:
    cluster = Cluster(rewarders=1, beside=False)
    cluster.actors[1].die()
    cluster.rollout()

    def die() -> Exception:
        cluster.actors[-1].die()
        return failure(EngineError("refused"))

    with pytest.raises(RunError, match=r"start reward engine 1: refused"):
        cluster.add("reward", start=die)
    assert cluster.rollout() == ["samples"]
    assert cluster.add("reward") == "reward engine 2"


@pytest.mark.parametrize("restarts", [None, 3])
def test_nobody_waits_for_an_engine_that_joins(restarts: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, starting = Cluster(count=3, beside=False, restarts=restarts), Ref()
    cluster.engines.remove("engine 2")
    cluster.begin_to_add(start=starting)
    cluster.rollout()
    assert [row["state"] for row in cluster.engines.describe()] == ["serves", "serves", "starts"]
    assert cluster.engines.push(4, lambda engines: {"engines": len(engines)}) == {"engines": 2}
    starting.give("http://e3")
    cluster.rollout()
    assert [row["state"] for row in cluster.engines.describe()] == ["serves", "serves", "waits for weights"]
    assert cluster.engines.push(5, lambda engines: {"engines": len(engines)}) == {"engines": 3}
    cluster.engines.admit()
    assert cluster.serving()[-1] == ["http://e0", "http://e1", "http://e3"]
    assert cluster.engines.metrics()["rollout/engine_restarts"] == 0
    assert capsys.readouterr() == ("", "")


def test_one_that_was_added_may_be_removed_before_it_has_started(
    killed: list[Actor], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, told = Cluster(count=3, beside=False), list[tuple[str, str]]()
    cluster.engines.remove("engine 2")
    with pytest.MonkeyPatch.context() as patch:
        starting = ActorClass(lambda plan: Actor(plan.rank, start=Ref()))
        patch.setattr(fleet_actors, "as_actor", lambda cls, **threads: starting)
        for one in (lambda *what: told.append(what), None):
            given = {} if one is None else {"told": one}
            name = cluster.engines.add(**given)
            cluster.engines.remove(name)
    assert told == [("engine 3", "remove engine 3: it was removed before it had started")]
    assert "engine 4 does not join: remove engine 4: it was removed before" in capsys.readouterr().err
    assert [actor.rank for actor in killed] == [2, 3, 4]
    assert [row["name"] for row in cluster.engines.describe()] == ["engine 0", "engine 1"]
    assert cluster.add() == "engine 5", "on the same slot"


def test_a_run_that_has_only_one_that_joins_ends_when_that_does_not_start() -> None:
    cluster, starting = Cluster(beside=False, restarts=0), Ref()
    cluster.engines.remove("engine 1")
    cluster.begin_to_add(start=starting)
    cluster.rollout()
    cluster.actors[0].die()
    cluster.rollout()
    assert cluster.engines.expects_weights()
    starting.give(failure(EngineError("no such model")))
    with pytest.raises(RunError, match=r"^rollout 3: no engine is left, engine 0 were lost\nengine 0 was lost at 2"):
        cluster.rollout()


def test_one_serves_from_when_its_router_has_it_and_its_version_is_known_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, seen = Cluster(count=2, rewarders=1, beside=False), list[tuple[list[str], str]]()
    cluster.actors[1].die()
    cluster.rollout()

    def look() -> None:
        states = [row["state"] for row in cluster.engines.describe()]
        seen.append((states, cluster.supervisor.version))

    assert cluster.add() == "engine 2"
    cluster.engines.push(7, lambda engines: {})
    look()
    cluster.manager.answers["serve"] = look
    cluster.engines.admit()
    look()
    assert seen == [
        (["serves", "serves", "waits for weights"], "none yet"),
        (["serves", "serves", "is being registered"], "7"),
        (["serves", "serves", "serves"], "7"),
    ]
    registering = cluster.manager.answers["serve"] = Ref()
    monkeypatch.setattr(placement, "_reserve", lambda count, resource, timeout: [Slot(99, "here", None)] * count)
    assert cluster.add("reward") == "reward engine 1"
    cluster.rollout()
    assert cluster.engines.describe()[-1]["state"] == "is being registered", "it needs no weights, but a router"
    registering.give(None)
    cluster.rollout()
    assert cluster.engines.describe()[-1]["state"] == "serves"


def test_who_looks_while_the_engines_change_sees_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control server's threads do."""
    cluster = Cluster()
    after = cluster.engines.membership
    reads = [after.without("engine 1"), after]
    changing = property(lambda engines: reads.pop(0) if len(reads) > 1 else reads[0], lambda engines, given: None)
    monkeypatch.setattr(Engines, "membership", changing, raising=False)
    assert [row["name"] for row in cluster.engines.describe()] == ["engine 0", "engine 1"]


def test_an_engine_that_dies_while_it_leaves_frees_its_slots_once() -> None:
    cluster = Cluster(count=3, beside=False)
    told = cluster.manager.answers["serve"] = lambda: cluster.actors[1].die()
    cluster.engines.remove("engine 1")
    cluster.manager.answers.pop("serve")
    assert cluster.rollout() == ["samples"]
    assert told() is None
    assert cluster.add() == "engine 3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_reserve", lambda count, resource, timeout: [Slot(99, "here", None)] * count)
        cluster.add()
    slots = [slot for member in cluster.engines.membership.engines for slot in member.slots]
    assert len(set(slots)) == len(slots) == 4


def test_one_that_waits_for_weights_is_none_to_go_on_with_and_named() -> None:
    cluster = Cluster(beside=False)
    cluster.actors[0].die()
    cluster.rollout()
    assert cluster.add() == "engine 2"
    cluster.actors[1].die()
    expected = r"^rollout 3: no engine is left \(without weights yet: engine 2\), engine 0 and engine 1 were lost\n"
    with pytest.raises(RunError, match=expected):
        cluster.rollout()


def test_one_that_dies_while_it_is_registered_is_not_waited_for(
    routers: Any, runtime: RolloutRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Membership().having(*members("e0", "e1"))
    waited: list[list[str]] = []

    def wait_registered(urls: list[str], timeout: float) -> None:
        assert urls == ["http://e0", "http://e1"]
        routers.serve(joined.without("e1"))  # another thread's
        waited.append(urls)

    monkeypatch.setattr(routers._routers["actor"], "wait_registered", wait_registered)
    routers.serve(joined)
    assert waited == [["http://e0"]]
    assert routers._routers["actor"].calls == ["add http://e0", "add http://e1", "remove http://e1"]
    assert runtime.engines.urls == ("http://e0",)


def test_who_says_that_an_engine_is_gone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, int] = {}

    def as_actor(cls: type, **groups: int) -> Any:
        threads.update(groups)
        return Namespace(options=lambda **_: Namespace(remote=lambda *_: None))

    monkeypatch.setattr(rollout_manager, "as_actor", as_actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: Namespace(get_node_id=lambda: "00" * 28))
    rollout_manager.create_manager(Namespace(asynchronous=False), None, ())
    assert threads[rollout_manager.ROUTERS] == 2


def test_none_joins_engines_beside_trainers() -> None:
    with pytest.raises(RunError, match="add an engine: those of 'actor' are on the trainers' slots"):
        Cluster().add()


def test_what_the_manager_hears_late_changes_nothing(routers: Any) -> None:
    first = Membership().having(*members("e0"))
    later = first.having(*members("e1"))
    routers.serve(later)
    routers.serve(first)
    assert routers._routers["actor"].calls == ["add http://e0", "add http://e1", "wait http://e0", "wait http://e1"]


def test_the_death_of_the_only_engine_is_told_as_it_is() -> None:
    cluster = Cluster(count=1)
    cluster.actors[0].die()
    with pytest.raises(RunError, match=r"^rollout 3: engine 0 failed .*status 137"):
        cluster.rollout()
