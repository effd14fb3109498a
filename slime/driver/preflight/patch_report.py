"""The patches that a run needs, as this host tells: checked before anything starts, and listed by ``--dry-run``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from slime.backends.megatron import patches as megatron
from slime.backends.sglang import patches as sglang
from slime.fleet.spec import fleet_of
from slime.ray import patches as ray
from slime.ray.cluster import running_address
from slime.utils.patching import Patch, due
from slime.utils.stores import RENDEZVOUS

_SERVERS = (*sglang.CPU_STAND_INS, *sglang.EVERY_PROCESS, *sglang.SERVER_PROCESS)
_RANKS = (megatron.TORCHS_OPTIMIZERS, megatron.NO_WANDB, *megatron.CPU_SHIM, *megatron.FIXES, *megatron.EACH_SAVE)
_DRIVER = (ray.SESSIONS, *ray.PRINTING)
TABLES: dict[str, tuple[Patch[Any], ...]] = {
    "SGLang's servers": _SERVERS,
    "Routers": sglang.ROUTER,
    "Training ranks": _RANKS,
    "The driver": _DRIVER,
}
"""Every patch that there is, by the processes that it is in; what several kinds have stands with the first."""


def check(args: argparse.Namespace, warn: Callable[[str], None]) -> None:
    """Compare this host's packages with what the run's patches are for; UntestedVersionError where one is of a release
    that a patch is not for, or with ``--allow-untested-versions`` a line to ``warn`` for each patch left out. Packages
    that are not here may be on the hosts that need them: each process looks at its own again."""
    for table, facts in _uses(args):
        here = [patch for patch in table if patch.installed() is not None]
        for _ in due(here, facts, warn):
            pass


def lines(args: argparse.Namespace) -> list[str]:
    """The run's patches, one line for each release of a package and the processes that have them."""
    groups: dict[str, dict[str, None]] = {}
    for table, facts in _uses(args):
        for patch in table:
            if patch.wanted(facts) and not patch.is_gone():
                version = patch.installed()
                head = f"{patch.package} {version or '(not on this host)'}, {patch.where}"
                name = patch.name if version is None or patch.is_tested() else f"{patch.name} (left out)"
                groups.setdefault(head, {})[name] = None
    told = [f"  {head}: {', '.join(names)}" for head, names in groups.items()]
    return ["patches to released packages (docs/patches.md):", *told] if told else []


def _uses(args: argparse.Namespace) -> Iterator[tuple[Iterable[Patch[Any]], Any]]:
    yield _DRIVER, running_address() is None
    engines = fleet_of(args).engines
    for spec in engines:
        server = sglang.ServerFacts.of_run(spec.options(args))
        yield _SERVERS, server
        if spec.width > spec.per_node:
            yield _SERVERS, replace(server, further_node=True)
    if engines:
        yield sglang.ROUTER, None
    if args.placement != "rollout_only":
        yield (RENDEZVOUS,), None
        yield _RANKS, megatron.RankFacts.of_run(args)
