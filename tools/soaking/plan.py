"""Which faults a soak injects, drawn from its seed: kind, whom it strikes, in which phase of a step, how deep in it."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST = 5
"""Faults of each kind that a plan has at least."""
GENERATE, TRAIN, SAVE, PUSH = "generate", "train", "save", "push"
PHASES = (GENERATE, TRAIN, SAVE, PUSH)
"""Of a step, in their order."""
ANY = ""
"""A subject of which the run's name is not known before: that of whichever sample is struck."""
_ENGINES, _TRAINERS = ("engine 0", "engine 1"), ("trainer 0", "trainer 1")
_LOST = ("engine_died", "engine_hangs")


@dataclass(frozen=True)
class Kind:
    """One way to hurt a run.

    Attributes:
        subjects: whom it may strike, as the run's events call them.
        phases: of a step in which it is done.
        told: kinds of events by which the run tells that it has noticed.
        back: the kind of event by which it tells that all is well again, for one that has a line of its own for that;
            a kind of ``told`` whose line is written when it is; "step": the next step that is complete; or "join": it
            was started again by who owns it, was added to the run, and serves.
        within: seconds from the strike in which the run has to notice it; one that is not told of has not bitten.
        cause: a regular expression for the event's cause, where the same kind of event has other causes too.
        phase: one for its phase, where the fault is about that.
        named: what events call the subject, where it is something else.
    """

    subjects: tuple[str, ...]
    phases: tuple[str, ...]
    told: tuple[str, ...]
    back: str
    within: float = 60.0
    cause: str = ""
    phase: str = ""
    named: str = ""


KINDS: Mapping[str, Kind] = {
    "engine_killed": Kind(_ENGINES, (GENERATE, TRAIN, SAVE), _LOST, "engine_back"),
    "engine_stopped": Kind(_ENGINES, (GENERATE, TRAIN, SAVE), ("engine_hangs",), "engine_back", 90),
    "scheduler_killed": Kind(_ENGINES, (GENERATE, TRAIN), _LOST, "engine_back", 90),
    "scheduler_stopped": Kind(_ENGINES, (GENERATE, TRAIN), _LOST, "engine_back", 90),
    "engine_killed_in_push": Kind(_ENGINES, (PUSH,), _LOST, "engine_back", phase="push"),
    "engine_killed_as_it_starts": Kind(_ENGINES, (GENERATE,), ("engine_died",), "engine_back", 120, phase="start"),
    "router_killed": Kind(("router",), (GENERATE, TRAIN, SAVE, PUSH), ("router_died",), "router_back"),
    "router_stopped": Kind(("router",), (GENERATE, TRAIN), ("router_died",), "router_back", 90),
    "router_port_taken": Kind(("router",), (GENERATE, TRAIN), ("router_died",), "router_back", 90, cause="status 1$"),
    "trainer_killed": Kind(_TRAINERS, PHASES, ("trainer_died",), "trainer_died", 180),
    "trainer_stopped": Kind(_TRAINERS, (GENERATE, TRAIN), ("trainer_died",), "trainer_died", 240),
    "manager_killed": Kind(("the rollout manager",), PHASES, ("manager_died",), "manager_died", 180),
    "driver_killed": Kind(("the driver",), PHASES, ("driver_died",), "step", 60),
    "reward_raises": Kind((ANY,), (GENERATE,), ("reward_failed",), "step", cause="the judge is out of order"),
    "reward_slow": Kind((ANY,), (GENERATE,), ("reward_failed",), "step", cause="took longer"),
    "reward_hangs": Kind((ANY,), (GENERATE,), ("reward_failed",), "step", cause="took longer"),
    "request_fails": Kind((ANY,), (GENERATE,), ("request_failed",), "step", cause="the request was lost"),
    "disk_full": Kind(_TRAINERS[:1], (TRAIN,), ("save_failed",), "step", named="the trainers"),
    "external_killed": Kind(("the external engine",), (GENERATE, TRAIN, SAVE), _LOST, "join", 120),
}
"""By name. A kind whose run lacks what it strikes is not drawn (`kinds_of`)."""
BESIDE = frozenset(
    {"router_killed", "router_stopped", "router_port_taken", "trainer_killed", "manager_killed"}
    | {"reward_raises", "reward_slow", "reward_hangs", "request_fails"}
)
"""Kinds that are done also while an engine is on its way back: nothing of the run says then that it is the engine's."""
EXTERNAL = "external_killed"
EXTERNAL_OPTION = "rollout_external_engine_addrs"


@dataclass(frozen=True)
class Fault:
    """One that is to be injected.

    Attributes:
        number: its place in the plan, from 0.
        attempt: how many drawn for this place before it have not bitten.
        depth: how far into the phase it is done, as a share of what that took last.
    """

    number: int
    kind: str
    attempt: int
    subject: str
    phase: str
    depth: float

    def as_dict(self) -> dict[str, Any]:
        """As a line of the injector's log has it."""
        return asdict(self)


def kinds_of(options: Collection[str]) -> list[str]:
    """The kinds that can be injected into runs of a slime with these options."""
    return [name for name in KINDS if name != EXTERNAL or EXTERNAL_OPTION in options]


def draw_kinds(seed: int, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """The kind of each fault of a plan: `LEAST` of each kind, the others at random, in an order at random.

    A plan of fewer faults than that has as many kinds as it can, none twice before each is there.
    """
    rng = random.Random(f"{seed} kinds")
    drawn: list[str] = []
    for _ in range(LEAST):
        drawn += rng.sample(kinds, len(kinds))
    drawn = drawn[:count] + rng.choices(kinds, k=max(0, count - len(drawn)))
    rng.shuffle(drawn)
    return drawn


def draw(seed: int, number: int, kind: str, attempt: int = 0) -> Fault:
    """The fault of a place in the plan, again where those drawn for it before have not bitten."""
    rng, its = random.Random(f"{seed} {number} {kind} {attempt}"), KINDS[kind]
    return Fault(number, kind, attempt, rng.choice(its.subjects), rng.choice(its.phases), round(rng.random(), 3))
