"""The training backends, by ``--train-backend``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from slime.training.protocol import Trainer


def _megatron(args: Namespace) -> Trainer:
    from slime.backends.megatron.trainer import MegatronTrainer

    return MegatronTrainer(args)


TRAINERS: dict[str, Callable[[Namespace], Trainer]] = {"megatron": _megatron}
"""Each imports its backend when it is called: not every process may, nor has every host the packages."""


def trainer_of(args: Namespace) -> Trainer:
    """This rank's trainer, with the other ranks'; as `Trainer`, collective over all of them."""
    return TRAINERS[args.train_backend](args)
