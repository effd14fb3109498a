"""What follows from the options, and what cannot be: each function fills in derived values or raises `OptionError`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from slime.files.checkpoints import SavedModel
from slime.options import asynchronous, cluster, data, debug, lora, mtp, rollout
from slime.options import checkpoint as checkpoints
from slime.options.asynchronous import check_staleness
from slime.options.checks.agents import check_agents
from slime.options.checks.checkpoint_rules import derive_checkpoints, load_release
from slime.options.checks.determinism import seed_requests
from slime.options.checks.export_rules import check_exports
from slime.options.checks.reward_rules import check_rewards, comes_before_reward, has_own_source, rows_may_name_rewards
from slime.options.debug import check_profile, check_trackers, derive_subsample, derive_templates
from slime.options.errors import OptionError, Reasons
from slime.options.eval_datasets import CONFIG, PAIRS, data_file, eval_datasets
from slime.options.eval_datasets import RULES as EVAL_RULES
from slime.options.flags.schema import flag_named
from slime.options.learning import distillation
from slime.options.learning.algorithm import derive_algorithm
from slime.options.learning.routing import contain_replay
from slime.options.rollout import DEFAULT_ROLLOUT, SFT_ROLLOUT, generates_itself
from slime.options.rules import Rule, check
from slime.options.serving.external import settle_external_engines
from slime.options.serving.reward_model import derive_reward_model
from slime.options.serving.sglang_config import generating, settle_models

ENGINE_KEEPS = 6
"""Tokens of a context that sglang 0.5.17 takes no prompt into: its scheduler aborts a prompt of context - 6 or more."""

RULES = (
    Rule("fp8 fp4", "is not available yet in this version"),
    *(debug.RULES + cluster.RULES + rollout.RULES + asynchronous.RULES + data.RULES + EVAL_RULES),
    *(lora.RULES + mtp.RULES + checkpoints.RULES + distillation.RULES),
)
"""What is known without the model's config."""


def derive_all(args: Namespace, warnings: list[str], reasons: Reasons) -> SavedModel | None:
    """Everything that needs neither the model's config nor a user's code; warnings and reasons against it are gathered.

    Returns what `derive_checkpoints` does.
    """
    args.params_dtype = args.precision
    args.bf16 = args.precision == "bfloat16"
    args.fp16 = args.precision == "float16"
    # Megatron-LM's rule too: a sum of many bfloat16 gradients in bfloat16 loses the small ones.
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    args.debug_train_only |= bool(args.load_debug_rollout_data)
    sides = {"rollout_only": args.debug_rollout_only, "train_only": args.debug_train_only, "colocate": args.colocate}
    args.placement = next((name for name, is_on in sides.items() if is_on), "disaggregate")
    load_release(args, warnings)
    distillation.ask_the_teacher(args)
    contain_replay(args)
    seed_requests(args)
    if missing := list(_missing(args)):
        raise OptionError("; ".join(missing))
    reasons.of(derive_algorithm, args)
    reasons.of(check, args, RULES)
    reasons.of(_placement, args, warnings)
    reasons.of(_batches, args, warnings)
    reasons.of(_data, args)
    reasons.of(_evaluation, args, warnings)
    reasons.of(_warn_of_sampling, args, warnings)
    reasons.of(_warn_of_reward, args, warnings)
    reasons.of(check_rewards, args)
    reasons.of(derive_reward_model, args, warnings)
    resumed: SavedModel | None = reasons.of(derive_checkpoints, args)
    derivations = (distillation.derive_distillation, derive_templates, check_exports, check_profile, check_trackers)
    for rule in (*derivations, _weight_update, check_agents):
        reasons.of(rule, args)
    reasons.of(check_staleness, args, warnings)
    return resumed


def limit_prompts(args: Namespace) -> None:
    """Lower contexts to what an engine takes, and prompts to what leaves room for one response token; or OptionError.

    Needs the model's config. Supervised prompts are conversations, which only flags limit.
    """
    usable = usable_context(args)
    if usable < 2 and args.num_engines:
        raise OptionError(
            f"an engine's context of {usable + ENGINE_KEEPS} tokens (--sglang-context-length, config.json) leaves no "
            f"room: sglang keeps {ENGINE_KEEPS} of them"
        )
    given = args.rollout_max_prompt_len
    args.eval_max_context_len = _smallest(args.eval_max_context_len or args.rollout_max_context_len, usable)
    if args.loss_type != "sft_loss":
        args.rollout_max_context_len = _smallest(args.rollout_max_context_len, usable)
    args.eval_max_prompt_len = _smallest(args.eval_max_prompt_len or given, args.eval_max_context_len - 1)
    context = args.rollout_max_context_len
    args.rollout_max_prompt_len = _smallest(given, None if context is None else context - 1)


def usable_context(args: Namespace) -> int:
    """Tokens that prompt and response may have together in an engine."""
    given, own = getattr(args, "sglang_context_length", None), int(args.model_context)
    return (own if given is None else min(given, own)) - ENGINE_KEEPS


def _smallest(*lengths: int | None) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


def _missing(args: Namespace) -> Iterator[str]:
    """All that the run cannot do without, so that one error names it."""
    supervised, replays = args.loss_type == "sft_loss", args.load_debug_rollout_data is not None
    train_only = args.placement == "train_only"
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is missing"
    no_slots = args.rollout_num_gpus == 0 or (args.rollout_num_gpus is None and args.placement == "disaggregate")
    elsewhere = args.sglang_config is not None or args.rollout_external_engine_addrs
    if no_slots and not elsewhere and args.placement in ("disaggregate", "rollout_only"):
        shares = args.placement == "disaggregate" and not args.asynchronous
        yield "--rollout-num-gpus is missing: give engines slots of their own" + (
            ", or share them by --colocate" if shares else ""
        )
    has_none = args.disable_rollout_global_dataset or replays
    if args.prompt_data is None and not has_own_source(args) and not has_none:
        yield "--prompt-data is missing"
    if args.num_rollout is None and args.num_epoch is None:
        yield "--num-rollout or --num-epoch is missing"
    if args.rollout_batch_size is None:
        yield "--rollout-batch-size is missing"
    if supervised or train_only:
        return
    if args.rollout_max_response_len is None and args.rollout_max_context_len is None:
        yield "--rollout-max-response-len is missing"
    named = args.rm_type or args.custom_rm_path or rows_may_name_rewards(args.prompt_data, args.metadata_key)
    if not named and not comes_before_reward(args):
        yield "--rm-type or --custom-rm-path is missing: responses need a reward"


def _placement(args: Namespace, warnings: list[str]) -> None:
    args.actor_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.world_size = args.actor_num_gpus
    if args.placement == "train_only":
        args.rollout_num_gpus = 0
    elif args.sglang_config is not None:
        pass  # it says how many
    elif args.placement == "colocate":
        if args.rollout_num_gpus not in (None, args.actor_num_gpus):
            warnings.append(
                f"--rollout-num-gpus {args.rollout_num_gpus} is ignored with --colocate: "
                f"generation uses the {args.actor_num_gpus} training slots"
            )
        args.rollout_num_gpus = args.actor_num_gpus
    elif args.rollout_num_gpus is None:
        args.rollout_num_gpus = 0 if args.rollout_external_engine_addrs else args.actor_num_gpus
    settle_external_engines(args)
    settle_models(args)
    if args.sglang_config is None:
        _check_engines(args)
    if args.sglang_models:
        args.num_engines = sum(group.num_engines for group in generating(args.sglang_models).groups)
    else:
        args.num_engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine + len(args.external_engine_urls)
    if 0 < args.num_engines < args.min_engines:
        raise OptionError(
            f"--min-engines {args.min_engines} is more than the engines that the run has: {args.num_engines}"
        )


def _check_engines(args: Namespace) -> None:
    per_engine, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if per_engine > per_node and per_engine % per_node:
        raise OptionError(
            f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node {per_node} and not a "
            "multiple of it: an engine over several nodes has as many slots on each"
        )
    if args.rollout_num_gpus % per_engine:
        raise OptionError(
            f"{args.rollout_num_gpus} rollout slots are not a multiple of --rollout-num-gpus-per-engine {per_engine}"
        )


def _batches(args: Namespace, warnings: list[str]) -> None:
    """rollout-batch-size x n-samples-per-prompt = global-batch-size x num-steps-per-rollout, exactly."""
    if None not in (args.num_rollout, args.num_epoch):
        warnings.append(
            f"--num-epoch {args.num_epoch} is ignored: --num-rollout {args.num_rollout} says how long the run is"
        )
        args.num_epoch = None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    prompts, responses = args.rollout_batch_size, args.n_samples_per_prompt
    produced = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {responses} = {samples}"
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if batch is None:
        steps = steps or 1
        if samples % steps:
            raise OptionError(f"{produced} is not a multiple of --num-steps-per-rollout {steps}")
    elif steps is None and samples % batch:
        raise OptionError(f"{produced} is not a multiple of --global-batch-size {batch}")
    elif steps is not None and samples != batch * steps:
        raise OptionError(
            f"{produced}, but --global-batch-size {batch} x --num-steps-per-rollout {steps} = {batch * steps}"
        )
    args.num_steps_per_rollout = steps or samples // batch
    args.global_batch_size = samples // args.num_steps_per_rollout
    derive_subsample(args)
    args.train_iters = None if args.num_rollout is None else args.num_rollout * args.num_steps_per_rollout


def _data(args: Namespace) -> None:
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    if args.prompt_data is not None:
        args.prompt_data = data_file("--prompt-data", args.prompt_data)
    recorded = args.load_debug_rollout_data is not None
    if args.placement == "train_only" and not recorded and generates_itself(args.rollout_function_path):
        raise OptionError("--debug-train-only starts no engine to generate with: give --load-debug-rollout-data")


def _greedy(args: Namespace) -> Iterator[str]:
    """Of evaluations whose responses to a prompt are one and the same."""
    for dataset in args.eval_datasets:
        own = dataset.custom_generate_function_path or args.custom_generate_function_path
        if (n := dataset.n_samples_per_eval_prompt) > 1 and dataset.temperature == 0 and own is None:
            yield (
                f"{dataset}: at temperature 0 its {n} responses to a prompt (n_samples_per_eval_prompt) are the same, "
                "and avg@n and pass@k say no more than one of them does"
            )


def _evaluation(args: Namespace, warnings: list[str]) -> None:
    """``eval_datasets``, and ``eval_prompt_data`` as a flat list NAME PATH NAME PATH."""
    args.eval_datasets = eval_datasets(args)
    by_flag = [dataset for dataset in args.eval_datasets if dataset.source == PAIRS]
    args.eval_prompt_data = [word for dataset in by_flag for word in (dataset.name, dataset.path)]
    if args.eval_interval is not None and args.load_debug_rollout_data is not None:
        warnings.append(f"--eval-interval {args.eval_interval}: --load-debug-rollout-data starts no engine to evaluate")
        args.eval_interval = None
    if args.eval_interval is None and args.eval_datasets:
        flag = PAIRS if by_flag else CONFIG
        if args.num_rollout == 0:
            raise OptionError(f"--num-rollout 0 with {flag} evaluates nothing: add --eval-interval 1")
        warnings.append(f"{flag} has no effect without --eval-interval")
    if args.eval_function_path is None:
        is_sft = args.rollout_function_path == SFT_ROLLOUT
        args.eval_function_path = DEFAULT_ROLLOUT if is_sft else args.rollout_function_path
    if args.eval_interval is not None and generates_itself(args.eval_function_path):
        warnings += _greedy(args)


def _warn_of_sampling(args: Namespace, warnings: list[str]) -> None:
    if args.placement in ("train_only", "rollout_only") or args.loss_type == "sft_loss":
        return
    for name, of_all in (("rollout_top_p", 1.0), ("rollout_top_k", -1)):
        if (value := getattr(args, name)) != of_all:
            warnings.append(
                f"{flag_named(name)} {value}: responses are sampled from the likeliest tokens only, and log-probs are "
                f"of all tokens, so training is off policy by that; {of_all} samples from all"
            )


def _warn_of_reward(args: Namespace, warnings: list[str]) -> None:
    takes_both = (distillation.REWARD_PATH, distillation.TASK_REWARD_PATH)
    if args.rm_type is not None and args.custom_rm_path not in (None, *takes_both):
        warnings.append(f"--rm-type {args.rm_type} is ignored: rewards are those of --custom-rm-path")


def _weight_update(args: Namespace) -> None:
    transport = {"nccl": "distributed"}.get(args.update_weight_transport, args.update_weight_transport)
    args.update_weight_transport = transport or ("tensor" if args.placement == "colocate" else "distributed")
    if args.update_weight_transport == "disk":
        directory = args.update_weight_disk_dir or os.path.join(args.run_dir, "weights")
        args.update_weight_disk_dir = os.path.abspath(os.path.expanduser(directory))
