"""``--dry-run``: what a run would be, without starting it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from slime.data.routes import RouteShape
from slime.data.rows.dataset import data_warnings, dataset_of
from slime.data.source.users_class import check_going_on, make_data_source, num_prompts, num_rollout
from slime.driver.preflight import host_memory
from slime.driver.preflight.patch_report import lines as patches_of
from slime.driver.preflight.places import place_warnings, room_warnings
from slime.driver.schedule import check_remaining
from slime.entry.arguments import describe
from slime.fleet.layout import describe_models
from slime.fleet.placement import describe_placement
from slime.options.checks.checkpoint_rules import starting_point
from slime.options.training import check_schedule
from slime.ray.cluster import check_places, running_address
from slime.ray.supervision import LOAD_DATA, InputError, RunError
from slime.rollout.batches.debug_data import check_recorded
from slime.rollout.evaluation import load_eval_prompts
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.misc import attribute_of

_WARNING = "warning: "


def dry_run(args: argparse.Namespace) -> None:
    """Check all that can be checked without starting anything, and print what would run; raises as a start does."""
    # First: below the lines of the configuration an error would not be found.
    args, found = _check(args)
    full = args.dry_run == "full"
    if not full:
        print("# Values that are not the defaults; --dry-run full prints all.")
    print(describe(args, changed=not full))
    print(*patches_of(args), sep="\n")
    placement = describe_placement(args)
    print(placement)
    print(describe_models(args), *_routes(args), sep="\n")
    memory = host_memory.lines(args)
    print(*memory, sep="\n")
    # Again: those lines have driven them from the screen.
    last = [*_as_warnings(args.option_warnings), *found]
    warnings = sum(line.startswith(_WARNING) for line in (*placement.splitlines(), *memory, *last))
    told = f", with {warnings} warning{'s' * (warnings > 1)} above" if warnings else ""
    print(*last, f"ok: the run can start{told}", sep="\n")


def _routes(args: argparse.Namespace) -> Iterator[str]:
    """What engines keep of the experts of each token, in host memory."""
    if args.use_rollout_routing_replay:
        size, ranks = RouteShape.of(args).kept_by_engine, args.rollout_num_gpus_per_engine
        yield (
            f"routes: {size} bytes of pinned host memory for each token of an engine's cache, in each of its ranks: "
            f"{ranks * size / 1000:.3g} GB an engine for a million tokens with {ranks} (--rollout-num-gpus-per-engine)"
        )


def _check(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """``args`` with the number of rollouts; what there is to say of checkpoints and data, in lines."""
    try:
        evaluations = load_eval_prompts(args)
        if args.load_debug_rollout_data:
            data = [check_remaining(args)]
            check_recorded(args)
        else:
            args, data = _check_prompts(args)
    except BadInputError as error:
        raise InputError(f"{LOAD_DATA}: {error}") from None
    except SlimeError as error:
        raise RunError(f"{LOAD_DATA}: {error}") from None
    host: list[str] = []
    if not running_address():
        check_places()
        host = place_warnings()
    sizes = [f"evaluation: {name}, {len(prompts)} prompts" for name, prompts in evaluations.items()]
    warnings = [warning for prompts in evaluations.values() for warning in prompts.warnings]
    found = [starting_point(args), *sizes, *_as_warnings(warnings), *data, *_as_warnings(host)]
    return args, [line for line in found if line]


def _as_warnings(lines: Iterable[str]) -> list[str]:
    return [f"{_WARNING}{line}" for line in lines]


def _check_prompts(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    source = make_data_source(args)
    args = argparse.Namespace(**vars(args) | {"num_rollout": num_rollout(args, source)})
    check_schedule(args)
    where = f"--data-source-path {args.data_source_path}"
    bad, too_long = (attribute_of(source, name, 0, where) for name in ("num_bad", "num_too_long"))
    prompts = num_prompts(args, source)
    counted = "prompts" if prompts is None else f"{prompts} prompts ({bad} bad, {too_long} too long left out)"
    data = f"data: {counted}, {args.num_rollout} rollouts"
    left = check_remaining(args)
    room = room_warnings(args)
    dataset = dataset_of(source)
    read = [] if dataset is None else dataset.warnings
    going_on = check_going_on(args, source)
    return args, [data, *_as_warnings([*read, *data_warnings(args, source), *going_on, *room]), left]
