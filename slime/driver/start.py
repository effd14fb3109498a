"""How a run starts: what is made, read, loaded and begun, in which order, until every part answers."""

from __future__ import annotations

import argparse
import functools
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.driver.control.engine_requests import EngineRequests
from slime.driver.control.server import Control
from slime.driver.control.version_files import VersionFiles
from slime.driver.data_side import DataSide
from slime.driver.meanwhile import Meanwhile
from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.preflight.places import room_warnings
from slime.driver.probe import Probe
from slime.driver.pushes import Pushes
from slime.driver.recovery import snapshot_directory
from slime.driver.schedule import check_remaining, missing_exports
from slime.entry.arguments import describe
from slime.files.storage import write_text
from slime.fleet.engines import Engines
from slime.fleet.external import Keys, given_keys, with_external_engines
from slime.fleet.placement import Placement, place
from slime.fleet.spec import Fleet, ModelSpec, fleet_of
from slime.fleet.train_group import Saver, TrainGroup
from slime.observability import logs
from slime.observability.progress import say, warn_of
from slime.observability.trace import span
from slime.options.checks.checkpoint_rules import starting_point
from slime.ray.cluster import running_address, serving_host
from slime.ray.supervision import MARGIN_S, Supervisor, limit_of


class Start:
    """The start of a run. What of it has to be ended is known as soon as it is there, however far the start comes.

    Attributes:
        args: the run's options; with the numbers that follow from data and checkpoint once it has started.
        placement: its slots, none before they are taken.
        control: its own server, in a run that has engines.
        snapshots: where they are kept, if any are taken.
        memory, pushes, meanwhile: what the loop's verbs need besides; they are there once it has started.
    """

    memory: MemoryScheduler
    pushes: Pushes
    meanwhile: Meanwhile

    def __init__(
        self,
        args: argparse.Namespace,
        supervisor: Supervisor,
        engines: Engines,
        trainers: TrainGroup,
        data: DataSide,
        saver: Saver,
    ) -> None:
        """Of parts that have begun nothing yet."""
        self.args = args
        self._supervisor, self._engines, self._trainers = supervisor, engines, trainers
        self._data, self._saver = data, saver
        self.placement = Placement([], [], [])
        self.control: Control | None = None
        self.snapshots: str | None = None

    def run(self) -> None:
        """Start data, engines, router and trainers, in parallel where they can. NothingLeftError if the run is over."""
        args, began = self.args, time.monotonic()
        say(f"run directory: {args.run_dir}; loading the data")
        if begins := starting_point(args):
            say(begins)
        given = given_keys(args)
        # Hexadecimal: a key may end up behind a flag, and must not look like one.
        keys = None if args.no_api_keys else given or (secrets.token_hex(24), secrets.token_hex(24))
        logs.hide(keys or ())
        fleet = with_external_engines(fleet_of(args), given)
        self._create(fleet, keys)
        args, placement = self.args, self.placement
        slots = sum(map(len, placement.engines))
        counted = {f"{fleet.trainers} training ranks": fleet.trainers, f"engines on {slots} slots": slots}
        begun = [what for what, count in counted.items() if count]
        say(f"{args.num_rollout} rollouts; starting {' and '.join(begun)} (logs in the run directory)")
        shared = placement.on_gpus and any(spec.beside_trainers for spec in fleet.engines)
        self._schedule_memory(shared)
        requests, versions = EngineRequests(self._engines), VersionFiles(args, self.pushes.confirmed)
        self.meanwhile = Meanwhile(self.pushes, requests, self._data)
        self._data.catches_up(self.meanwhile.is_due, self.meanwhile.do)
        self.snapshots = snapshot_directory(args, placement, ray.util.get_node_ip_address())
        with span("driver/start"):
            opened = self._data.open_routers()
            # Of a GPU that both share an engine takes a share of the memory that it finds free.
            starting = {} if shared else self._engines.begin("start")
            self._start_trainers()
            starting = starting or self._engines.begin("start")
            limit = limit_of(args, "engine_start_timeout", MARGIN_S)
            self._engines.started(self._supervisor.wait(starting, "start engines", limit))
            self._data.serve(opened)
        if fleet.engines:
            self.control = Control(args.run_dir, serving_host(keys), requests, self._view, versions)
        going_on = f", going on after rollout {self.args.start_rollout_id}" if self.args.start_rollout_id else ""
        say(f"started in {time.monotonic() - began:.0f} s{going_on}")

    def _create(self, fleet: Fleet, keys: Keys) -> None:
        """Make engines and trainers, which import from then on, and have the data read: meanwhile, or before them on a
        cluster, where nobody is to wait for slots that others have to be told of a bad row. No model is loaded before
        the data are known to be good."""
        models, own_ray = fleet.models if fleet.engines else (), running_address() is None
        if not own_ray:
            self._load_data(keys, models)
        with span("driver/place"):
            placement = self.placement = place(self.args, fleet)
        self._engines.create(fleet, placement, keys)
        for name, prepared in self._engines.begin("prepare").items():
            self._supervisor.expect(name, prepared, "prepare engines")
        if placement.train:
            self._trainers.create(placement)
        if own_ray:
            self._load_data(keys, models)

    def _load_data(self, keys: Keys, models: Sequence[ModelSpec]) -> None:
        with span("driver/load_data"):
            args, rollouts = self.args, self._data.start(keys, models)
        args = self.args = argparse.Namespace(**vars(args) | {"num_rollout": rollouts})
        if left := check_remaining(args):  # again: --num-epoch has become a number of rollouts
            say(left)
        warn_of(room_warnings(args))
        write_text("--run-dir", Path(args.run_dir, "config.yaml"), describe(args))

    def _schedule_memory(self, shared: bool) -> None:
        """Make those who know whose turn it is in memory that trainers and engines share, and who pushes within it."""
        args = self.args
        offloads = {
            name: shared if getattr(args, name) is None else getattr(args, name)
            for name in ("offload_train", "offload_rollout")
        }
        limit = limit_of(args, "weight_update_timeout", MARGIN_S)
        self.memory = MemoryScheduler(self._trainers, self._engines, limit, **offloads)
        make = functools.partial(self._data.ask, "make the probe", limit, "probe_tokens")
        probe = Probe(args, self._supervisor, self._trainers, make)
        self.pushes = Pushes(self._trainers, self._engines, self.memory, limit, probe)

    def _start_trainers(self) -> None:
        args, first = self.args, 0
        if self._trainers.actors:
            first = self._trainers.start(args.num_rollout)
        if args.start_rollout_id is None:
            args = self.args = argparse.Namespace(**vars(args) | {"start_rollout_id": first})
        if (state := self._trainers.take_state()) is not None:
            self._data.restore(first - 1, state)
        if state is not None and (missing := missing_exports(args, first)):
            self._saver.export(first - 1, missing, "export what is missing")
            places = " and ".join(missing.values())
            say(f"nothing is left to train; wrote {places}, missing after rollout {first}")
        self.memory.make_room()

    def _view(self) -> dict[str, Any]:
        """What `tools/engines.py` shows."""
        return {"engines": self._engines.describe(), "version": self._supervisor.version}
