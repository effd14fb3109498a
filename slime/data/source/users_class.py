"""The run's data source, of slime's own class or a user's: made, counted, and kept with checkpoints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from slime.data.source.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.files.checkpoints import ROLLOUT_STATE, find_checkpoint
from slime.utils.calls import parameters_of
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.misc import attribute_of, load_function
from slime.utils.user_functions import naming

_STATE, _CLASS = "data_source", "data_source_class"


def make_data_source(args: argparse.Namespace) -> Any:
    """The run's data source, of the user's class where ``--data-source-path`` names one; one with a parameter
    ``dataset`` is given that of ``--prompt-data``. BadInputError for a file or row that cannot be read, or where what
    was made is not a data source; HookError where the user's class raised something else."""
    flag, path = "--data-source-path", args.data_source_path
    function = load_function(path, flag=flag)
    dataset = [RolloutDataSource(args).dataset] if "dataset" in parameters_of(function) else []
    with naming(f"{flag} {path}", passes=SlimeError):
        source = function(*dataset, args)
    if not callable(attribute_of(source, "get_samples", None, f"{flag} {path}")):
        raise BadInputError(
            f"{flag} {path}: it must make an object with get_samples and add_samples, not {type(source).__name__}"
        )
    return source


def state_by_value(source: Any) -> dict[str, Any] | None:
    """All of the state of a data source; None of one of which a user's class keeps some by itself."""
    if source is None:
        return {}
    if not isinstance(source, RolloutDataSource) or _has_own(source, "save"):
        return None
    return {_CLASS: _class_name(source), _STATE: source.state_dict()}


def source_state(source: Any, rollout_id: int) -> dict[str, Any]:
    """The state of a data source (None: there is none), and its class; a ``save`` of its own is called as well."""
    if source is None:
        return {}
    state: dict[str, Any] = {_CLASS: _class_name(source)}
    if isinstance(source, RolloutDataSource):
        state[_STATE] = source.state_dict()
    if _has_own(source, "save"):
        with naming(f"{type(source).__name__}.save (--data-source-path)", passes=SlimeError):
            source.save(rollout_id)
    return state


def restore_source(source: Any, rollout_id: int, state: dict[str, Any]) -> None:
    """The inverse of `source_state`; BadInputError if the state is that of a class of another kind."""
    if source is None:
        return
    _check_kind(source, state)
    if _STATE in state:
        source.load_state_dict(state[_STATE])
    if _has_own(source, "load"):
        with naming(f"{type(source).__name__}.load (--data-source-path)", passes=SlimeError):
            source.load(rollout_id)


def _check_kind(source: Any, state: dict[str, Any]) -> None:
    if isinstance(source, RolloutDataSource) != (_STATE in state):
        made_with = state.get(_CLASS, "no data source (--load-debug-rollout-data)")
        raise BadInputError(
            f"--load: the checkpoint was made with {made_with}, and --data-source-path is now {_class_name(source)}, "
            f"which cannot go on from there: resume with the former"
        )


def saved_state(directory: str | Path) -> dict[str, Any]:
    """The data side's state of a run's checkpoint; BadInputError where there is none."""
    path = Path(directory, ROLLOUT_STATE)
    if not path.is_file():
        raise BadInputError(f"--load: {path} is missing: without it the data could only start anew")
    # Samples hold what rows and users' code have put there, such as dates. Nor would a plain format make a stranger's
    # checkpoint safe: the .metadata beside this file, which trainers read, is a pickle.
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return state


def check_going_on(args: argparse.Namespace, source: Any) -> list[str]:
    """What a resume would warn of the data, where this host has the checkpoint; BadInputError where the source cannot
    go on from it. Nothing of a source is changed, nor are its own `load` and `load_state_dict` called."""
    if args.placement == "rollout_only":  # nobody resumes
        return []
    found = find_checkpoint(args.load, args.ckpt_step) if args.load else None
    if source is None or found is None or found[1] < 0 or not Path(found[0], ROLLOUT_STATE).is_file():
        return []
    state = saved_state(found[0])
    _check_kind(source, state)
    ours = (RolloutDataSource.load_state_dict, RolloutDataSourceWithBuffer.load_state_dict)
    if getattr(type(source), "load_state_dict", None) not in ours:
        return []
    _, lines = source.going_on(state[_STATE])
    return list(lines)


def _has_own(source: Any, method: str) -> bool:
    return getattr(type(source), method, None) not in (None, getattr(DataSource, method))


def _class_name(source: Any) -> str:
    return f"{type(source).__module__}.{type(source).__qualname__}"


def num_rollout(args: argparse.Namespace, data_source: Any) -> int:
    """``--num-rollout``, or what ``--num-epoch`` makes of the prompts, with a last, partial batch; or BadInputError."""
    if args.num_rollout is not None:
        return args.num_rollout
    prompts = num_prompts(args, data_source)
    if prompts is None:
        raise BadInputError(
            f"--num-epoch {args.num_epoch}: --data-source-path {args.data_source_path} has no __len__: give "
            "--num-rollout"
        )
    return math.ceil(args.num_epoch * prompts / args.rollout_batch_size)


def num_prompts(args: argparse.Namespace, data_source: Any) -> int | None:
    """Prompts of an epoch; None of a user's source that does not know."""
    if not hasattr(type(data_source), "__len__"):
        return None
    with naming(f"--data-source-path {args.data_source_path}", passes=SlimeError):
        return len(data_source)
