"""The Ray actors of one engine: each owns the SGLang server tree of one node, and the first tells when any dies. An
external engine's owns none."""

from __future__ import annotations

import argparse
import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from slime.backends.sglang.client import NoAnswerError
from slime.backends.sglang.engine import Engine, EngineError, ExitInfo, OtherNodes
from slime.backends.sglang.external import ExternalEngine
from slime.observability import logs
from slime.observability.trace import span
from slime.ray.cluster import as_actor, enter_actor, serving_host

_POLL_S = 0.1
"""Fine enough to tell which server of an engine ended first: the others follow within a second."""
_ANSWER_S = 20.0
EXAMINATION = "examination"
"""Ray's concurrency group, a thread of its own: another call may be waiting for an engine that hangs."""


@dataclass(frozen=True)
class EngineNode:
    """What an engine has on one node."""

    options: dict[str, Any]
    """Ray's, of the actor there."""
    gpus: list[str] | None


@dataclass(frozen=True)
class EnginePlan:
    """One engine of a run, and where it runs."""

    args: argparse.Namespace = field(repr=False)
    rank: int
    api_keys: tuple[str, str] | None = field(repr=False)
    nodes: list[EngineNode]
    name: str = "engine"

    def enter(self, node: int, others: OtherNodes | None = None) -> Engine:
        """First call in each of its actors, on that node of the engine: the part of it there."""
        role = f"{self.name} {self.rank}".replace(" ", "_") + (f"_node_{node}" if node else "")
        enter_actor(self.args, f"{role}_actor")
        logs.hide(self.api_keys or ())
        return Engine(
            self.args,
            rank=self.rank,
            host=serving_host(self.api_keys),
            api_keys=self.api_keys,
            log_path=f"{self.args.run_dir}/logs/{role}.log",
            cuda_devices=self.nodes[node].gpus,
            name=self.name,
            node=node,
            num_nodes=len(self.nodes),
            others=others,
        )


@dataclass(frozen=True)
class ExternalPlan:
    """One engine that runs already."""

    args: argparse.Namespace = field(repr=False)
    rank: int
    url: str
    api_keys: tuple[str, str] | None = field(repr=False)
    """Where it asks for keys."""
    name: str = "engine"

    def enter(self) -> ExternalEngine:
        """First call in its actor."""
        name = f"{self.name} {self.rank}"
        enter_actor(self.args, f"{name.replace(' ', '_')}_actor")
        logs.hide(self.api_keys or ())
        return ExternalEngine(self.args, self.url, name, self.api_keys)


class EngineActor:
    """One engine; ``start`` returns its address when it answers."""

    def __init__(self, plan: EnginePlan | ExternalPlan) -> None:
        self._args = plan.args
        self._engine: Engine | ExternalEngine
        if isinstance(plan, ExternalPlan):
            self._engine = plan.enter()
        else:
            self._engine = plan.enter(0, _OtherActors(plan) if len(plan.nodes) > 1 else None)
        self._started: Future[None] = Future()

    def prepare(self) -> None:
        """Start the server as far as it takes no GPU memory, if the engine is on one node; returns at once."""
        self._engine.prepare()

    def start(self) -> str:
        """Start the server, on every node of the engine; its URL once it is ready."""
        try:
            with span("engine/start"):
                self._engine.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        return self._engine.url

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return, by raising EngineError with the log's last lines, when the server does not start, dies or hangs."""
        self._started.result()
        self._engine.listen()
        while True:
            self._engine.check()
            time.sleep(_POLL_S)

    @ray.method(concurrency_group=EXAMINATION)
    def examine(self, because: str, *, paused: bool) -> None:
        """Raise EngineError, ``because`` of what, if it does not answer; one that is ``paused`` need not generate."""
        self._engine.examine_all(because, paused=paused)

    def release_memory(self) -> None:
        """Give the GPU memory back, when no request runs."""
        control = self._engine.control(self._args.weight_update_timeout)
        control.flush_cache()
        control.release_memory()

    def resume_memory(self, tags: list[str]) -> None:
        """Take the memory of ``tags`` again."""
        self._engine.control(self._args.weight_update_timeout).resume_memory(tags)

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probs of all of some tokens but the first one."""
        args = self._args
        with span("engine/probe"):
            return self._engine.control(args.weight_update_timeout).score(tokens, adapter=args.lora_sync == "adapter")

    def leave_groups(self, names: list[str]) -> None:
        """Leave collective groups, those of these in which it is, as long as it answers."""
        control = self._engine.control(_ANSWER_S)
        for name in names:
            try:
                control.destroy_weights_update_group(name)
            except NoAnswerError:
                return  # it hangs, which is found out otherwise
            except EngineError:
                continue  # it is in none of this name

    def leave(self) -> None:
        """Answer what runs with what it has so far, which others go on with, and `stop`."""
        try:
            with contextlib.suppress(EngineError):
                self._engine.control(_ANSWER_S).abort_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the server tree, on every node."""
        self._engine.stop()


class NodeActor:
    """A further node of an engine: the server there. `EngineActor` owns it, and Ray ends it with its owner."""

    def __init__(self, plan: EnginePlan, node: int) -> None:
        self._engine = plan.enter(node)

    @ray.method(concurrency_group="watch")
    def serve(self, meeting: str) -> ExitInfo:
        """Start the server, to meet the first node's at ``meeting``; its end, or that it hangs, whenever that comes."""
        self._engine.join(meeting)
        while (end := self._engine.end() or self._engine.hang()) is None:
            time.sleep(_POLL_S)
        return end

    def look(self) -> None:
        """Look from now on whether the processes here go on."""
        self._engine.look()

    def stop(self) -> None:
        """End the server tree."""
        self._engine.stop()


class _OtherActors:
    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._actors: list[Any] = []
        self._serving: dict[ray.ObjectRef, int] = {}
        self._ended: list[ExitInfo] = []

    def start(self, meeting: str) -> None:
        for node, place in enumerate(self._plan.nodes[1:], 1):
            actor = as_actor(NodeActor).options(**place.options).remote(self._plan, node)
            self._actors.append(actor)
            self._serving[actor.serve.remote(meeting)] = node

    def look(self) -> None:
        for actor in self._actors:
            actor.look.remote()

    def ends(self) -> list[ExitInfo]:
        calls = list(self._serving)
        done = ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []
        for call in done:
            node = self._serving.pop(call)
            try:
                self._ended.append(ray.get(call, timeout=_ANSWER_S))
            except RayError as error:
                name = f"{self._plan.name} {self._plan.rank} node {node}"
                self._ended.append(ExitInfo(time.time(), f"{name}: its actor failed: {error}"))
        return self._ended

    def stop(self) -> None:
        calls = [actor.stop.remote() for actor in self._actors]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._serving, self._ended = [], {}, []
