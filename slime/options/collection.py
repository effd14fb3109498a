"""What the flags of over-sampling, partial rollouts and data sources say together."""

from __future__ import annotations

from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.rollout import FULLY_ASYNC_ROLLOUT, generates_itself
from slime.options.schema import flag_named

_MASKS = "mask_offpolicy_in_partial_rollout"
_WITHOUT_BUFFER = tuple(
    f"slime.{module}.RolloutDataSource" for module in ("rollout.data_source", "data.source.data_source", "data")
)


def check_collection(args: Namespace, given: set[str]) -> None:
    """Raise OptionError where the flags contradict each other, naming them."""
    batch, over = args.rollout_batch_size, args.over_sampling_batch_size
    if over is not None and over < batch:
        raise OptionError(f"--over-sampling-batch-size {over} is less than --rollout-batch-size {batch}")
    if args.mask_offpolicy_in_partial_rollout and not (args.partial_rollout or over is not None or args.asynchronous):
        raise OptionError(
            "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout or --over-sampling-batch-size "
            "in train.py: all tokens are of the newest weights"
        )
    source = args.data_source_path.replace(":", ".")
    for flag in ("partial_rollout", "buffer_filter_path"):
        if getattr(args, flag) and source in _WITHOUT_BUFFER:
            name = flag_named(flag)
            raise OptionError(f"{name} needs a buffer, and --data-source-path {args.data_source_path} has none")
    own = generates_itself(args.rollout_function_path)
    ours = {"over_sampling_batch_size", "dynamic_sampling_filter_path", "partial_rollout", _MASKS}
    for name in sorted(given & ours):
        if not own:
            raise OptionError(
                f"{flag_named(name)} is for slime's own rollouts: --rollout-function-path "
                f"{args.rollout_function_path} would not heed it"
            )
    if args.disable_rollout_global_dataset:
        _check_no_dataset(args)
    if args.rollout_function_path.replace(":", ".") == FULLY_ASYNC_ROLLOUT:
        _check_fully_async(args)


def _check_fully_async(args: Namespace) -> None:
    name = f"--rollout-function-path {args.rollout_function_path}"
    if not args.asynchronous:
        raise OptionError(f"{name} generates while the trainer trains: use train_async.py")
    if args.max_weight_staleness < 1:
        raise OptionError(f"{name} generates ahead: give --max-weight-staleness 1 or more")
    if args.over_sampling_batch_size is not None:
        raise OptionError(
            f"{name} always has as many groups under way as --max-weight-staleness allows, and would not heed "
            "--over-sampling-batch-size: drop it"
        )


def _check_no_dataset(args: Namespace) -> None:
    if args.prompt_data is not None:
        raise OptionError("--disable-rollout-global-dataset and --prompt-data contradict each other: drop one")
    if args.num_epoch is not None and args.num_rollout is None:
        raise OptionError("--num-epoch counts the prompts of --prompt-data: give --num-rollout instead")
