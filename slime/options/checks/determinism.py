"""Deterministic runs: two runs of one command are equal bit for bit, and so is one that is killed and goes on.

What else belongs to them: `slime.utils.environment.deterministic_variables` and `device.compute_deterministically` of
trainers, flags and variables of engines (`slime.backends.sglang.engine`), seeds of requests (`slime.rollout.sampling`).
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from slime.options.errors import OptionError
from slime.options.rules import Rule, check
from slime.options.serving.overrides import check_engines
from slime.utils.environment import DETERMINISTIC, as_environment

FLAG = "--deterministic-mode"
ATTENTION = ("ascend", "fa3", "fa4", "flashinfer", "triton", "torch_native")
"""Attention of which sglang 0.5.17 says that a request's bits do not depend on others, and the last for hosts without
GPUs, where slime's stand-ins let it."""
_BACKENDS = ("attention", "prefill-attention", "decode-attention")

RULES = (
    Rule(
        "deterministic_mode",
        "and",
        "asynchronous",
        " do not go together: how far engines are when weights are pushed is a matter of time; use train.py",
    ),
    Rule(
        "deterministic_mode",
        "and",
        "over_sampling_batch_size partial_rollout",
        " do not go together: what is done first, and so is trained, is a matter of time; drop it "
        "(--dynamic-sampling-filter-path by itself draws one prompt for each that it drops, in a fixed order)",
    ),
)
"""What is known with the model's config."""
ENGINE_RULES = (
    Rule(
        "deterministic_mode",
        "and",
        "sglang_speculative_algorithm",
        " do not go together: SGLang draws some drafts without a seed; drop one",
    ),
    Rule(
        "deterministic_mode",
        "and",
        "sglang_enable_hierarchical_cache",
        " do not go together: what a cache has of a prompt is a matter of time, and engines keep none; drop one",
    ),
    Rule(
        "deterministic_mode",
        "and",
        "sglang_enable_eplb",
        " do not go together: experts move by how long and how often they were asked; drop one",
    ),
)
"""Of each engine of any model."""


def engines_are_deterministic(args: Namespace) -> bool:
    """Whether a mode of the run asks it of all engines; a user may, of those that generate, by SGLang's flag."""
    return bool(args.deterministic_mode or args.true_on_policy_mode)


def seed_requests(args: Namespace) -> None:
    """Have requests seeded where engines are deterministic."""
    if engines_are_deterministic(args):
        args.sglang_enable_deterministic_inference = True


def check_determinism(args: Namespace) -> None:
    """OptionError for what is not the same in every run, and for variables that say otherwise."""
    check(args, RULES)
    if not args.deterministic_mode:
        return
    engines = list(_engines(args))
    check_engines(args, ENGINE_RULES, engines)
    if wrong := [*_variables(args), *_backends(engines)]:
        raise OptionError("; ".join(wrong))


def _engines(args: Namespace) -> Iterator[tuple[str, Sequence[str]]]:
    """The command line of each kind of the run's engines, after where it is from."""
    if not args.sglang_models:
        yield "the engines' command line", args.sglang_cli
    for model in args.sglang_models:
        yield from ((group.where, group.sglang_cli) for group in model.groups)
    yield "--rm-sglang-args", args.rm_sglang_cli


def _variables(args: Namespace) -> Iterator[str]:
    given = {**os.environ, **as_environment(args.train_env_vars)}
    for name, values in DETERMINISTIC.items():
        if (value := given.get(name, values[0])) not in values:
            yield f"{FLAG}: {name}={value} must be one of {', '.join(values)}: unset it"


def _backends(engines: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    for where, words in engines:
        given = dict(pairwise(words))
        for flag in (f"--{kind}-backend" for kind in _BACKENDS):
            if given.get(flag, ATTENTION[0]) not in ATTENTION:
                yield (
                    f"{FLAG}: {where}: with {flag} {given[flag]} responses depend on what else is generated: drop it, "
                    f"or choose {' or '.join(ATTENTION)}"
                )
