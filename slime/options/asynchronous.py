"""How far generation runs ahead of training in train_async.py."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.options.errors import OptionError
from slime.options.flags.schema import option
from slime.options.rules import Rule


@dataclass
class AsyncOptions:
    """Asynchronous training: options of train_async.py, which generates the next rollouts while it trains."""

    update_weights_interval: int = option(
        1, "Push weights to the engines after every so many rollouts, and before an evaluation.", at_least=1
    )
    async_buffer_size: int = option(
        1, "Complete rollouts that may wait for the trainer while another one is generated.", at_least=0
    )
    max_weight_staleness: int = option(
        1,
        "How many versions (rollouts trained) old the weights that generated a sample may be when it is "
        "trained on; at least --update-weights-interval - 1.",
        at_least=0,
    )
    keep_old_actor: bool = option(
        False,
        "Use as behaviour policy the trainer's own weights of the version that generated each token. Versions "
        "within the staleness limit stay in host memory; each version that a rollout needs takes one log-prob "
        "pass.",
    )


RULES = (
    Rule(
        "@update_weights_interval @async_buffer_size @max_weight_staleness @keep_old_actor",
        "only works with train_async.py: train.py pushes weights after every rollout, and then generates the next one, "
        "so that nothing is ever stale",
        when="!asynchronous",
    ),
    Rule(
        "placement=colocate",
        ": train_async.py generates while it trains, so engines need slots of their own: drop it and give "
        "--rollout-num-gpus, or use train.py",
        when="asynchronous",
    ),
    Rule(
        "placement=rollout_only",
        ": without training there is nothing to overlap with; use train.py",
        when="asynchronous",
    ),
    Rule("keep_old_actor", "has no effect with", "use_rollout_logprobs loss_type!=policy_loss", ": drop one of them"),
)


def check_staleness(args: Namespace, warnings: list[str]) -> None:
    """Warn of samples that no loss corrects for; OptionError where all would be too old."""
    if not args.asynchronous:
        return
    interval, staleness = args.update_weights_interval, args.max_weight_staleness
    if staleness < interval - 1:
        raise OptionError(
            f"--max-weight-staleness {staleness} is too small for --update-weights-interval {interval}: before a push "
            f"the trainer's weights are {interval - 1} versions ahead of the engines'; give at least {interval - 1}"
        )
    corrects = args.use_tis or args.use_rs or args.use_rollout_logprobs or args.keep_old_actor
    if staleness and args.loss_type == "policy_loss" and args.placement == "disaggregate" and not corrects:
        warnings.append(
            f"samples may come from weights up to {staleness} versions old, and the loss takes the trainer's present "
            "log-probs for those of the policy that made them: --use-tis corrects for it (or --use-rollout-logprobs)"
        )
