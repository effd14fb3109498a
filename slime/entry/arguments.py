"""The command line: assemble the option groups, derive, validate; nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from slime.entry.job_flags import given_words
from slime.files.checkpoints import SavedModel
from slime.files.model_directory import model_directory
from slime.options.asynchronous import AsyncOptions
from slime.options.checkpoint import CheckpointOptions
from slime.options.checks.attention import check_attention
from slime.options.checks.checkpoint_rules import check_saved_adapters
from slime.options.checks.determinism import check_determinism
from slime.options.checks.hook_paths import check_evaluation_hook, load_evaluation_hooks, load_hooks
from slime.options.checks.layout import check_layout
from slime.options.checks.model_shape import check_parameter_lists, take_shape
from slime.options.checks.quantization import check_quantization
from slime.options.checks.reward_rules import reward_of_dataset
from slime.options.checks.unheeded import unheeded
from slime.options.checks.validate import derive_all, limit_prompts
from slime.options.cluster import ClusterOptions, DeadlineOptions, RecoveryOptions, WeightUpdateOptions
from slime.options.data import BatchOptions, DataOptions
from slime.options.debug import DebugOptions, TrackingOptions
from slime.options.errors import OptionError, Reasons, naming
from slime.options.eval_datasets import EvalOptions
from slime.options.flags import megatron, sglang
from slime.options.flags.describe import describe_changed, describe_groups
from slime.options.flags.help import MOST_USED, HelpAction
from slime.options.flags.installed import PendingFlags
from slime.options.flags.parser import HOOK_GROUP, StrictParser, flag_values, flag_words
from slime.options.flags.schema import add_options, flag_named, flag_of, hook_fields
from slime.options.flags.unavailable import add_upstream_attributes, explain_flag, split_without_effect, without_effect
from slime.options.flags.values import read_yaml
from slime.options.hooks import HookOptions
from slime.options.learning.algorithm import AlgorithmOptions, CorrectionOptions, CriticOptions
from slime.options.learning.distillation import DistillationOptions, check_teachers
from slime.options.learning.routing import RoutingOptions, check_routing
from slime.options.learning.same_kernels import SameKernelsOptions, check_same_kernels
from slime.options.lora import LoraOptions, settle_lora_sync
from slime.options.mtp import check_heads_training
from slime.options.rollout import EngineOptions, RewardOptions, RolloutOptions
from slime.options.serving.agents import AgentOptions
from slime.options.serving.overrides import engine_flags
from slime.options.serving.reward_model import REWARD_ARGS, find_reward_model
from slime.options.serving.sglang_config import find_models, read_models
from slime.options.training import check_training
from slime.utils.errors import BadInputError
from slime.utils.misc import attribute_of, load_module, refusing, split_function_path
from slime.utils.patching import ALLOW_FLAG, allow_untested_versions
from slime.utils.redaction import redacted

GROUPS: tuple[type, ...] = (
    ClusterOptions,
    DeadlineOptions,
    RecoveryOptions,
    WeightUpdateOptions,
    RolloutOptions,
    RewardOptions,
    AgentOptions,
    EngineOptions,
    AsyncOptions,
    DataOptions,
    BatchOptions,
    EvalOptions,
    AlgorithmOptions,
    CorrectionOptions,
    CriticOptions,
    DistillationOptions,
    RoutingOptions,
    SameKernelsOptions,
    LoraOptions,
    HookOptions,
    CheckpointOptions,
    TrackingOptions,
    DebugOptions,
)
"""slime's own options, in the order of ``--help``."""

HELP_SECTIONS = {"megatron": "Megatron", "sglang": "SGLang", "router": "Router"}

_ENGINE_READER = """import sys
from slime.backends.sglang import patches
patches.install()  # without it SGLang does not import on a host without GPUs
from slime.options.flags.sglang import write_engine_flags
write_engine_flags(sys.argv[1])"""
"""What a process of its own runs, to read the server's flags."""
_CONFIG = "--custom-config-path"
_UNTESTED = "allow_untested_versions"
_MISSPELT = 0.88
"""How similar a YAML key is to a flag that it was probably meant for; names of users' own are often at 0.8."""


def parse_args(argv: Sequence[str] | None = None, *, asynchronous: bool = False) -> argparse.Namespace:
    """The command line (``argv``, or that of this process; if ``asynchronous``, of train_async.py) as one flat
    namespace with every option, Megatron and SGLang value under its upstream name. A bad input prints one line that
    names the flag and exits with status 2, before any device is taken."""
    if os.getcwd() not in sys.path:  # hooks beside the user's script, as in the workers
        sys.path.insert(0, os.getcwd())
    parser = StrictParser(description="Reinforcement learning of language models: Megatron trains, SGLang generates.")
    try:
        words = given_words() if argv is None else list(argv)
        defaults, given, warnings = _parse(parser, words)
        parser.check_required(given)
        args = argparse.Namespace(**(defaults | given))
        args.rm_sglang_cli = engine_flags(parser, args.rm_sglang_args, REWARD_ARGS)
        args.sglang_models = read_models(parser, args)
        args.given_options = sorted(given)
        args.option_warnings = [*warnings, *_resolve(args, given, asynchronous)]
        add_upstream_attributes(args)
        if parser.unavailable:
            parser.error("")
    except BadInputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130)
    for warning in args.option_warnings:
        print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
    return args


def check_flags(argv: Sequence[str]) -> None:
    """Exit with status 2 and train.py's line unless it knows these flags and takes their values one by one; whether
    they fit each other is not looked at."""
    parser = StrictParser(prog="train.py")
    try:
        _parse(parser, argv)
        if parser.unavailable:
            parser.error("")
    except BadInputError as error:
        parser.error(str(error))


def describe(args: argparse.Namespace, *, changed: bool = False) -> str:
    """The resolved configuration as YAML, grouped, without secrets; or only what is not the default of it."""
    shown = argparse.Namespace(**redacted(vars(args)))
    return describe_changed(shown, GROUPS) if changed else describe_groups(shown, GROUPS)


def _parse(parser: StrictParser, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The defaults, what the words and the YAML file that they name set, and warnings about that file."""
    words, without_effect = split_without_effect(words)
    yaml_values = _read_yaml(words)
    if yaml_values.get(_UNTESTED, ALLOW_FLAG in words):
        allow_untested_versions()  # now: SGLang's flags may be read by a process that patches it
    defaults = assemble(parser, words, yaml_values)
    given = parser.parse_set(words, put_off=True)
    where = _yaml_named(words)
    warnings = without_effect + _check_keys(parser, yaml_values, where)
    return defaults, _merged(given, _parse_yaml(parser, yaml_values, where)), warnings


def _merged(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The command line's values under the YAML file's: flag by flag of engines and router too."""
    merged = given | settings
    for words in ("sglang_words", "router_words"):
        kept = {name: passed for name, passed in given.get(words, {}).items() if name not in settings}
        merged[words] = kept | settings.get(words, {})
    return merged


def assemble(
    parser: StrictParser, words: Sequence[str] = (), yaml_values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Add every flag there is to the parser; returns the defaults."""
    sections = "|".join(HELP_SECTIONS)
    parser.add_argument(
        "-h", "--help", action=HelpAction, sections=HELP_SECTIONS, most_used=MOST_USED, metavar="WHAT",
        help=f"Show slime's own flags, a group's (rollout), one flag (--lr), others' ({sections}), or all.",
    )  # fmt: skip
    for group in GROUPS:
        add_options(parser, group)
    own = {action.dest for action in parser._actions}
    _add_hook_flags(parser, words, yaml_values)
    with (
        PendingFlags(megatron.PACKAGE, megatron.READER) as fields,
        PendingFlags(sglang.ENGINE_PACKAGE, _ENGINE_READER) as server,
        PendingFlags(sglang.ROUTER_PACKAGE, sglang.ROUTER_READER) as router,
    ):
        megatron.add_megatron_flags(parser, fields, own)
        sglang.add_flags(parser, "sglang", "SGLang: flags of the installed server", server)
        sglang.add_flags(parser, "router", "Router: flags of the installed sglang-router", router)
    return parser.split_defaults()


def _given_hooks(words: Sequence[str], yaml_values: Mapping[str, Any]) -> list[tuple[str, str]]:
    flags = {flag_of(field): field.name for field in hook_fields(GROUPS)}
    pairs = [(flag, path) for flag, paths in flag_words(words) if flag in flags for path in paths]
    return pairs + [(flag, path) for flag, name in flags.items() for path in _paths(yaml_values.get(name))]


def _paths(value: Any) -> list[str]:
    if isinstance(value, list):
        return [path for each in value for path in _paths(each)]
    return [str(value)] if value else []


def _add_hook_flags(parser: StrictParser, words: Sequence[str], yaml_values: Mapping[str, Any]) -> None:
    done: set[str] = set()
    for flag, path in _given_hooks(words, yaml_values):
        where = f"{flag} {path}"
        with naming(f"{where}:"):
            source = split_function_path(path)[0]
            module = load_module(source)
        # A file may be named in several ways, and modules of C have none.
        file = str(attribute_of(module, "__file__", None, where) or source)
        add_arguments = attribute_of(module, "add_arguments", None, where)
        if add_arguments is not None and file not in done:
            group = parser.add_argument_group(f"{HOOK_GROUP}{source}")
            with refusing(f"{where}: its add_arguments raised"):
                add_arguments(group)
            for action in group._group_actions:
                _mend_help(parser, action)
        done.add(file)


def _mend_help(parser: StrictParser, action: argparse.Action) -> None:
    """Take a text of a user's that argparse could not print, such as "100% sure", as it is written."""
    try:
        parser._get_formatter()._expand_help(action)
    except Exception:
        action.help = str(action.help).replace("%", "%%")


def _read_yaml(words: Sequence[str]) -> dict[str, Any]:
    path = dict(flag_values(words)).get(_CONFIG)
    if not path:
        return {}
    with naming(_yaml_named(words)):
        values = read_yaml(path) or {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OptionError(f"{_yaml_named(words)} not a mapping of names to values")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _yaml_named(words: Sequence[str]) -> str:
    """What messages about the YAML file begin with."""
    return f"{_CONFIG} {dict(flag_values(words)).get(_CONFIG)}:"


def _check_keys(parser: StrictParser, values: dict[str, Any], where: str) -> list[str]:
    """Refuse entries of engines or router that no flag has; warnings of the user's own that may be misspelt."""
    unknown = [key for key, v in values.items() if not parser.has(key) and not explain_flag(flag_named(key), str(v))]
    passed = [parser.explain_unknown(flag_named(key)) for key in unknown if key.startswith(("sglang_", "router_"))]
    if passed:
        raise OptionError(f"{where} {'; '.join(passed)}")
    kept = "is kept as an attribute of args"
    meant = {
        key: f"; otherwise it is ignored: {reason}"
        if (reason := without_effect(flag_named(key), str(values[key])))
        else parser.nearest(flag_named(key), _MISSPELT)
        for key in unknown
    }
    return [f"{where} {key} {kept}{more}" for key, more in meant.items() if more]


def _parse_yaml(parser: StrictParser, values: dict[str, Any], where: str) -> dict[str, Any]:
    """YAML entries through the same types and checks as flags; entries that no flag knows stay as they are."""
    settings = argparse.Namespace()
    for key, value in values.items():
        with naming(where):
            if reason := explain_flag(flag_named(key), str(value)):
                raise ValueError(reason)
            if value is not None or not parser.has(key):  # null is what the flag would have without it
                parser.set_entry(key, value, settings)
    return vars(settings)


def _resolve(args: argparse.Namespace, values: Mapping[str, Any], asynchronous: bool) -> list[str]:
    """Derive and validate, the quick checks first; ``values`` are what flags and YAML set. Returns warnings."""
    warnings: list[str] = []
    given = set(values)
    args.sglang_cli = sglang.command_line(vars(args).pop("sglang_words", {}))
    args.router_cli = sglang.command_line(vars(args).pop("router_words", {}))
    args.sglang_router_api_key, args.sglang_model_routers = None, {}  # known once routers run, as are their addresses
    load_hooks(args, given, GROUPS)
    if args.lora_rank is not None:
        args.lora_alpha = args.lora_alpha or 2.0 * args.lora_rank
        args.lora_target_modules = args.lora_target_modules or ["all-linear"]
    args.asynchronous = asynchronous
    reasons = Reasons()
    resumed = derive_all(args, warnings, reasons)
    reasons.of(load_evaluation_hooks, args)
    reasons.of(check_evaluation_hook, args, given)
    reasons.of(_check_reward_names, args)
    is_local = os.path.isdir(os.path.expanduser(args.hf_checkpoint))
    if not is_local:
        reasons.end()  # before anything is downloaded
    with_weights = not args.dry_run
    found = reasons.of(partial(model_directory, with_weights=with_weights), args.hf_checkpoint)
    if found is None:
        reasons.end()  # what follows looks into it
    args.hf_checkpoint = found or args.hf_checkpoint
    reasons.of(find_reward_model, args)
    reasons.of(find_models, args)
    reasons.of(check_teachers, args)
    reasons.of(take_shape, args, given, warnings)
    reasons.of(check_routing, args)
    reasons.of(check_same_kernels, args)
    reasons.of(check_determinism, args)
    reasons.of(check_heads_training, args, warnings)
    reasons.of(check_quantization, args)
    reasons.of(limit_prompts, args)
    if args.placement != "rollout_only":
        reasons.of(check_training, args)
        reasons.of(check_layout, args)
        reasons.of(check_attention, args)
        reasons.of(check_parameter_lists, args)
        warnings += reasons.of(unheeded, args, values) or []
        reasons.of(_check_lora, args, resumed)
    reasons.of(settle_lora_sync, args, warnings)
    reasons.end()
    from slime.convert.weight_check import check_weight_files  # which imports torch

    check_weight_files(args, resumed, downloaded=is_local or not args.dry_run)
    return warnings


def _check_lora(args: argparse.Namespace, resumed: SavedModel | None) -> None:
    """Refuse layers that the model does not have or the trainer has no adapters for, and other adapters than saved."""
    if args.lora_rank is None:
        check_saved_adapters(args, resumed, set)
        return
    from slime.models import adapters, family_of, hf_config, weight_shape

    config, targets = hf_config(args.hf_checkpoint), args.lora_target_modules
    family, shape = family_of(config), weight_shape(config)
    check_saved_adapters(args, resumed, partial(adapters.targeted_modules, family, shape))
    every = adapters.linear_rows(family, shape)
    for target in targets:
        if not any(any(adapters.targeted_sources(row, [target])) for row in every):
            known = ", ".join([*adapters.linear_modules(family, shape), adapters.ALL_LINEAR])
            raise OptionError(f"--lora-target-modules {target}: the model has no such layer; there are {known}")
    rows = [row for row in every if any(adapters.targeted_sources(row, targets))]
    on_experts = any(".experts." in row.megatron for row in rows)
    if args.num_experts and on_experts and args.expert_tensor_parallel_size > 1:
        raise OptionError(
            f"--lora-target-modules {' '.join(targets)}: experts with adapters must be whole; add "
            "--expert-tensor-parallel-size 1, or name layers of attention only"
        )
    args.lora_modules = adapters.last_names(adapters.module_names(family, shape, targets))


def _check_reward_names(args: argparse.Namespace) -> None:
    from slime.grading.graders import GRADERS

    for where, name in [("--rm-type", args.rm_type), *(reward_of_dataset(args, d) for d in args.eval_datasets)]:
        if name is not None and name.removeprefix("boxed_") not in GRADERS:
            raise OptionError(f"{where} {name}: there are {', '.join(sorted(GRADERS))}, each also as boxed_<name>")
