#!/usr/bin/env python3
"""Run a tiny model for hours while its parts are killed, stopped and starved, and check that nothing came of it.

    python3 tools/soak.py --seed 1 --faults 100 --out outputs/soak

A run on this host's CPU, with two trainers and two engines, gets faults of every kind that tools/soaking/plan.py has,
at phases drawn from the seed. One that the run's own events.jsonl does not tell of has not bitten, and is drawn again.
A shard ends after --shard-minutes; the same command goes on from there. When all have bitten, the run is brought to its
end, another one that nobody strikes is made to compare it with, and a table is printed, and written to DIR/soak.md.

Exit status: 0 when all is done and adds up, 1 where it does not, 2 for bad arguments, 3 when another shard is to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.entry.arguments import GROUPS  # noqa: E402
from slime.files.checkpoints import rollouts_done  # noqa: E402
from slime.files.storage import reported, write_text  # noqa: E402
from slime.processes.signals import signals_as_exceptions  # noqa: E402
from tools.soaking import ledger  # noqa: E402
from tools.soaking.external import External, free_port  # noqa: E402
from tools.soaking.injector import Injector, Outcome  # noqa: E402
from tools.soaking.plan import EXTERNAL, kinds_of  # noqa: E402
from tools.soaking.processes import OverError, Run  # noqa: E402
from tools.soaking.running import Running, TimeUpError  # noqa: E402
from tools.soaking.watching import Watcher  # noqa: E402
from tools.soaking.workspace import Workspace  # noqa: E402

_GO_ON = 3
_END_S = 90.0
"""Of a shard, kept for the end of its run."""
_LATE_S = 120.0
"""Before a shard's end, when no engine would come back in time."""
_POLL_S = 0.2
_MORE = 2
"""Rollouts that follow the last fault."""


@signals_as_exceptions()
def main() -> int:
    """Command line."""
    options = parse()
    try:
        with reported("soak.py"):
            return soak(options)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"soak.py: error: {error}", file=sys.stderr)
        return 2
    except OverError as error:
        print(f"soak.py: failed: {error}", file=sys.stderr)
        return 1


def soak(options: argparse.Namespace) -> int:
    """One shard; the exit status."""
    began, place = time.monotonic(), Workspace(options.out.absolute(), options.seed)
    deadline = began + 60 * options.shard_minutes - _END_S
    place.make()
    kinds = place.plan(options.faults, options.kinds or kinds_of(_options()))
    status, failed = _GO_ON, ""
    try:
        if place.left(kinds):
            strike_all(place, kinds, deadline)
        num_rollout = finish(place, deadline)
        status = conclude(place, num_rollout)
    except TimeUpError:
        print(
            f"soak: {len(kinds) - len(place.left(kinds))} of {len(kinds)} faults have bitten; the same command goes on"
        )
    except OverError as error:
        status, failed = 1, str(error)
        raise
    finally:
        minutes = round((time.monotonic() - began) / 60, 2)
        place.add_shard(minutes=minutes, status=status, failed=failed, left=place.left_over)
    return status


def strike_all(place: Workspace, kinds: list[str], deadline: float) -> None:
    """Inject what is left of the plan; TimeUpError where the shard ends before."""
    watcher = Watcher(place.run_dir)
    with contextlib.ExitStack() as stack:
        external = None
        if EXTERNAL in kinds:
            log, port = place.directory / "external.log", free_port()
            external = stack.enter_context(External(place.directory / "model", log, place.run_dir, port))
            external.wait_until_it_answers()
        command = place.command(place.run_dir, external=None if external is None else external.address)
        running = stack.enter_context(running_in(place, command, external))
        run = Run(running.pid, place.run_dir, place.seed)
        injector = Injector(run, watcher, place.switches, lambda: running.check(deadline), external)
        try:
            while place.left(kinds):
                for mended in injector.settled():
                    note(place, mended, kinds)
                in_haste = time.monotonic() > deadline - _LATE_S
                if (fault := injector.choose(place.left(kinds), in_haste)) is None:
                    time.sleep(_POLL_S)
                elif (outcome := injector.inject(fault)) is not None:
                    note(place, outcome, kinds)
                place.prune(place.run_dir)
        finally:
            for outcome in injector.unfinished():
                place.note(outcome.as_line())


def note(place: Workspace, outcome: Outcome, kinds: list[str]) -> None:
    """A line of the injector's log, and one of progress."""
    place.note(outcome.as_line())
    what = f"{outcome.fault.kind} of {outcome.subject or 'nobody'}, {outcome.seen}"
    after = "did not bite, and is drawn again"
    if outcome.back is not None:
        told, back = outcome.told[0]["time"] - outcome.struck, outcome.back - outcome.struck
        after = f"told after {told:.1f} s, back after {back:.1f} s"
    done = len(kinds) - len(place.left(kinds))
    print(f"soak: {time.strftime('%H:%M:%S')} {done} of {len(kinds)}: {what}: {after}", flush=True)


def finish(place: Workspace, deadline: float) -> int:
    """Bring the run to an end of its own, and make its reference; how many rollouts both have."""
    num_rollout = place.num_rollout(rollouts_done(str(place.run_dir)) + _MORE)
    for run_dir in (place.run_dir, place.reference_dir):
        if rollouts_done(str(run_dir)) < num_rollout:
            with running_in(place, place.command(run_dir, num_rollout)) as running:
                status = running.wait(deadline, functools.partial(place.prune, run_dir))
            if status:
                raise OverError(f"the run in {run_dir} ended with status {status}: see {place.log}")
    return num_rollout


def conclude(place: Workspace, num_rollout: int) -> int:
    """Check, print and write what came of it; the exit status."""
    strikes = place.strikes()
    found = ledger.checks(place.run_dir, place.reference_dir, num_rollout, strikes)
    left = [*place.left_over, *(line for shard in place.shards() for line in shard["left"])]
    found.append(("no process left after any shard", not left, f"{len(place.shards()) + 1} shards, {len(left)} left"))
    failed = [shard["failed"] for shard in place.shards() if shard["failed"]]
    found.append(("no shard has failed", not failed, "; ".join(failed) or "none"))
    lines = [*ledger.table(strikes), "", "| check | | figures |", "|---|---|---|"]
    lines += [f"| {what} | {'yes' if good else 'NO'} | {figures} |" for what, good, figures in found]
    write_text("--out", place.directory / "soak.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if all(good for _, good, _ in found) else 1


@contextlib.contextmanager
def running_in(place: Workspace, command: list[str], external: External | None = None) -> Iterator[Running]:
    """Within, a run goes on; afterwards it is ended, and what was left of it all the same is noted, and killed."""
    running = Running(command, place.log, tuple if external is None else external.processes)
    try:
        with running:
            yield running
    finally:
        place.left_over += running.left


def _options() -> set[str]:
    """The names of slime's own options."""
    return {field.name for group in GROUPS for field in fields(group)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the plan, the model, the data and the run")
    parser.add_argument("--faults", type=int, default=100, help="that have to bite; default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="the soak's directory; an earlier shard's goes on")
    parser.add_argument(
        "--shard-minutes", type=float, default=25, help="after which it ends, to go on later; default: %(default)s"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=kinds_of(_options()), metavar="KIND", help="these alone; default: all"
    )
    options = parser.parse_args()
    if options.faults < 1 or options.seed < 0 or 60 * options.shard_minutes <= 2 * _END_S:
        parser.error(f"--faults must be above 0, --seed not negative, and a shard longer than {_END_S / 30:g} minutes")
    return options


if __name__ == "__main__":
    sys.exit(main())
