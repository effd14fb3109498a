"""What a run does when its trainers die, or make a step that is no good: it goes back, and on from there."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slime.driver.data_side import DataSide
from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.preflight.places import expected_checkpoint_bytes
from slime.driver.pushes import Pushes
from slime.driver.restarts import Restarts
from slime.driver.schedule import is_due, scores_start
from slime.files.storage import amount, writing
from slime.fleet.placement import Placement
from slime.fleet.train_group import Saver, TrainGroup
from slime.observability import events
from slime.observability.progress import say, warn
from slime.options.flags.schema import flag_named
from slime.ray import janitor
from slime.ray.supervision import InputError, LostError, Supervisor, limit_of
from slime.training.bad_steps import BAD_STEPS

_TRAINERS = "the trainers"
_INTERVAL = flag_named("trainer_snapshot_interval")


class Verbs(Protocol):
    """What of a run is done again when trainers are back."""

    scored: set[int]
    """The versions of which there are scores."""

    def save(self, rollout_id: int) -> None: ...

    def push_weights(self, version: int) -> None: ...

    def begin_evaluation(self, version: int) -> None: ...

    def finish_evaluation(self) -> None: ...


@dataclass
class Recovery:
    """Brings trainers back, with the data where it was then, from the newest checkpoint or snapshot of the run."""

    args: argparse.Namespace
    verbs: Verbs
    supervisor: Supervisor
    trainers: TrainGroup
    placement: Placement
    data: DataSide
    memory: MemoryScheduler
    pushes: Pushes
    saver: Saver
    restarts: Restarts

    def bring_back(self, lost: LostError) -> int:
        """Make all trainers anew, and finish the step that they go back behind; the rollout to go on with. The error
        itself where no others can be made for who was lost, or have been too often."""
        noticed = time.monotonic()
        while True:
            self._check(lost)
            cause = str(lost).splitlines()[0]
            warn(f"{cause}; all {len(self.placement.train)} training ranks are ended, and others made in their place")
            version = self.supervisor.version
            try:
                rollout_id, origin = self._make_anew()
                self._finish_step(rollout_id)
                break
            except LostError as again:
                self._tell(lost, version, "others failed in their turn", None)
                lost = again
        seconds = time.monotonic() - noticed
        self._tell(lost, version, f"made anew {origin}; going on with rollout {rollout_id}", seconds)
        self.restarts.seconds += seconds
        say(f"trainers are back after {seconds:.0f} s, {origin}: going on with rollout {rollout_id}, counted from 0")
        return rollout_id

    def _check(self, lost: LostError) -> None:
        ours = {f"trainer {rank}" for rank in range(len(self.placement.train))}
        if not self.args.use_fault_tolerance or not ours.issuperset(lost.names):
            raise lost
        self.restarts.allow(_TRAINERS, lost.phase, str(lost))

    def _tell(self, lost: LostError, version: str, action: str, seconds: float | None) -> None:
        subject = ", ".join(lost.names)
        told = {"phase": lost.phase, "version": version, "cause": str(lost), "action": action}
        events.add("trainer_died", subject, seconds=seconds, **told)

    def _make_anew(self) -> tuple[int, str]:
        args = self.args
        self.trainers.kill()
        for line in self.saver.clean_up():
            warn(line)
        self.data.cancel()
        self.pushes.go_back()
        self.memory.to_new_trainers()
        newest = self.saver.newest()
        self.trainers.create(self.placement, newest)
        first = self.trainers.start(args.num_rollout)
        self.data.rewind(first - 1, self.trainers.take_state())
        if newest is None:
            return args.start_rollout_id, "as the run began"
        return first, f"from {newest.save} after rollout {newest.rollout_id}"

    def _finish_step(self, rollout_id: int) -> None:
        """Do what may have been left to do after the rollout before: the checkpoint, the push and the scores."""
        args, before = self.args, rollout_id - 1
        begins = rollout_id == args.start_rollout_id
        saves = not begins and is_due(before, args.save_interval, last=args.num_rollout)
        if saves and not self.saver.has_written(before):
            self.verbs.save(before)
        self.verbs.push_weights(rollout_id)
        self.data.resume_generation(rollout_id)  # trainers may have died in a push for which it was paused
        scores = scores_start(args, rollout_id) if begins else is_due(before, args.eval_interval)
        if scores and rollout_id not in self.verbs.scored:
            self.verbs.begin_evaluation(rollout_id)
            if not args.asynchronous:
                self.verbs.finish_evaluation()

    # ---- steps that are no good

    def leave_out(self, rollout_id: int, steps: Sequence[dict[str, float]]) -> int | None:
        """Tell of a rollout's steps that were not taken, and go back where that is asked for: the rollout of the
        checkpoint or snapshot that the weights are of then."""
        noticed = time.monotonic()
        bad = [step for step in steps if any(name.endswith(BAD_STEPS) for name in step)]
        if not bad:
            return None
        wrong = [f"{name} {value:.4g}" for name, value in bad[0].items() if name.endswith(("loss", "grad_norm"))]
        cause, action = f"{len(bad)} bad steps: {', '.join(wrong)}", "left out"
        newest = self.saver.newest() if self.args.on_bad_step == "restore" else None
        if newest is not None:
            critic = newest.critic_save if self.args.use_critic else None
            values = newest.rollout_id, newest.save, critic
            self.trainers.call(
                "go back after a bad step", "go_back", limit_of(self.args, "checkpoint_timeout"), *values
            )
            action = (
                f"left out, with the rest of the rollout; weights are those after rollout {newest.rollout_id} again"
            )
        elif self.args.on_bad_step == "restore":
            action = "left out, with the rest of the rollout; there is nothing to go back to yet"
        phase, seconds = f"train on rollout {rollout_id}", time.monotonic() - noticed
        warn(f"{phase}: {cause}: {action} (--on-bad-step {self.args.on_bad_step})")
        events.add(
            "bad_step",
            _TRAINERS,
            phase=phase,
            version=self.supervisor.version,
            cause=cause,
            action=action,
            seconds=seconds,
        )
        return None if newest is None else newest.rollout_id


def snapshot_directory(args: argparse.Namespace, placement: Placement, own_host: str) -> str | None:
    """Where a run keeps its snapshots, in this host's memory; None where it takes none. InputError where trainers are
    on other hosts, or there is no room. The janitor removes it."""
    if args.trainer_snapshot_interval is None or not placement.train:
        return None
    hosts = sorted({slot.host for slot in placement.train})
    if hosts != [own_host]:
        raise InputError(
            f"{_INTERVAL}: snapshots are kept in the memory of the driver's host, {own_host}, and the trainers are on "
            f"{', '.join(hosts)}: drop it, and save more often (--save-interval)"
        )
    directory = janitor.memory_directory(os.environ[janitor.RUN_MARK])
    with writing(_INTERVAL, directory):
        Path(directory).mkdir(mode=0o700, exist_ok=True)
    size, free = expected_checkpoint_bytes(args), shutil.disk_usage(directory).free
    if size is not None and free < 2 * size:
        raise InputError(
            f"{_INTERVAL}: two snapshots of about {amount(size)} each have to fit into {janitor.MEMORY}, where "
            f"{amount(free)} are free: drop it, or enlarge that (--shm-size of a container)"
        )
    return directory
