"""Flags of the upstream system that this version does not have: using one is an error that says what to do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import zip_longest

_WEIGHTS_ALONE = "drop it: --ref-load starts from a checkpoint's weights alone, --load goes on with its run"

REPLACED: dict[str, str] = {
    "--critic-num-gpus-per-node": "the critic is on the actor's slots; drop it",
    "--critic-num-nodes": "the critic is on the actor's slots; drop it",
    "--distributed-backend": "the device decides: nccl on GPUs, gloo without",
    "--eval": "use --eval-interval; with --num-rollout 0 the run only evaluates",
    "--finetune": _WEIGHTS_ALONE,
    "--http-proxy": "set the http_proxy environment variable",
    "--megatron-to-hf-mode": (
        "slime/models has a table a model family, which maps weights both ways, and there is no bridge; drop it, "
        "--ref-load takes Hugging Face directories as they are"
    ),
    "--no-load-optim": _WEIGHTS_ALONE,
    "--no-load-rng": _WEIGHTS_ALONE,
    "--offload": "use --offload-train --offload-rollout, which with --colocate on GPUs are the default",
    "--qkv-format": (
        "sequences are always packed (thd), which gives the loss and gradients of padded ones (bshd) without their "
        "padding; drop it, --use-dynamic-batch-size and --max-tokens-per-gpu say how much is computed at a time"
    ),
    "--sglang-disaggregation-bootstrap-port": "ports are reserved when an engine starts",
    "--sglang-disaggregation-mode": "use --prefill-num-servers, or worker_type in --sglang-config",
    "--sglang-enable-ep-moe": "use --sglang-ep-size N",
    "--sglang-encoder-only": "use --sglang-config, whose engines have a worker_type",
    "--sglang-encoder-urls": "use --sglang-config, whose engines have a worker_type",
    "--sglang-host": "engines listen on the address of the node that they run on",
    "--sglang-language-only": "use --sglang-config, whose engines have a worker_type",
    "--sglang-model-path": "engines serve --hf-checkpoint",
    "--sglang-port": "ports are reserved when an engine starts",
    "--sglang-random-seed": "use --rollout-seed",
    "--sglang-router-policy": "use --router-policy",
    "--sglang-router-request-timeout-secs": "use --request-timeout",
    "--sglang-tensor-parallel-size": "use --rollout-num-gpus-per-engine",
    "--sglang-tp-size": "use --rollout-num-gpus-per-engine",
    "--train-iters": "it follows from --num-rollout and --num-steps-per-rollout",
    "--use-critic": "--advantage-estimator ppo has a critic; drop it",
    "--use-custom-fsdp": "the distributed optimizer shards optimizer state; there is no FSDP backend",
    "--use-megatron-fsdp": "the distributed optimizer shards optimizer state; there is no FSDP backend",
    "--use-pytorch-profiler": "use --profile-target",
    "--use-slime-router": "the router is sglang-router; see --help router",
}
"""Flags that will not come, with what replaces them."""

REPLACED_PREFIXES: dict[str, str] = {
    "--ci-metric-checker-": "metrics.jsonl has every metric",
    "--slime-router-": "the router is sglang-router; see --help router",
}
"""The same for whole families of flags."""

_NOTHING = "nothing replaces it"
NOT_YET: dict[str, str] = {
    _NOTHING: """
        --load-forge-rollout-data --megatron-config-path --multimodal-keys
        --release-train --reset-optimizer-states
        --rollout-task-type --update-weight-delta-checksum --update-weight-delta-encoding
        --use-stateless-adam""",
    "a --rollout-function-path of your own may ask a server": "--fetch-trajectory-retry-times --rollout-buffer-url",
    "drop it: --update-weight-disk-dir is where weights go by files": "--update-weight-local-checkpoint-dir",
    "drop it: config.json says what layers the model has": "--softmax-type --window-attn-skip-freq --window-size",
    "drop it: there is no model that needs it": """
        --freeze-indexer --megatron-deepgemm-forward-layers --megatron-deepgemm-forward-modules
        --megatron-deepgemm-moe-forward-layers --megatron-deepgemm-moe-forward-modules --qwen-gdn-backend""",
    "use --global-batch-size or --num-steps-per-rollout": "--use-dynamic-global-batch-size",
    "drop it: a checkpoint has the optimizer's state; --save-hf writes weights alone": "--no-save-optim",
    "drop it: metrics.jsonl has train/grad_norm": "--ci-load-grad-norm --ci-save-grad-norm",
}
"""Flags that later versions will have, by what to do until then: when one comes, its name goes."""

UNAVAILABLE_VALUES: dict[tuple[str, str], str] = {
    ("--log-probs-chunk-size", "-1"): ": logits of all tokens never exist at once; drop it",
    ("--train-backend", "fsdp"): ": Megatron trains, and its distributed optimizer shards optimizer state; drop it",
    ("--transformer-impl", "inference_optimized"): " yet in this version",
    ("--update-weight-mode", "delta"): " yet in this version",
}
"""Values of available flags that will not come, with what to do, or that later versions will have."""


WITHOUT_EFFECT: dict[str, str] = {
    "--async-save": "a checkpoint is written before the run goes on",
    "--data-pad-size-multiplier": "packed sequences are not padded to a multiple of it",
    "--ddp-average-in-collective": (
        "gradients are a mean over the whole step, by which the loss is divided before ranks are summed"
    ),
    "--disable-weights-backuper": "reference and actor weights are always kept on the CPU",
    "--get-mismatch-metrics": "train/train_rollout_* and train/ois are always logged",
    "--log-probs-max-tokens-per-gpu": "log-prob passes use the micro-batches of --max-tokens-per-gpu",
    "--min-batch-collection-ratio": "a rollout is trained on when it is whole",
    "--model-name": "config.json of --hf-checkpoint says which model it is",
    "--override-opt_param-scheduler": "on resume the schedule is that of the flags anyway",
    "--recompute-loss-function": "logits are always computed anew, --log-probs-chunk-size tokens at a time",
    "--rollout-data-transport": "rollouts go to trainers through Ray's object store",
    "--rollout-health-check-first-wait": "an engine is asked from its first answer on",
    "--spec": "config.json of --hf-checkpoint says which layers the model has",
    "--te-rng-tracker": "random state is torch's",
    "--train-memory-margin-bytes": "torch's allocator decides",
    "--use-distributed-post": "one process sends the requests",
    "--use-rollout-entropy": "train/entropy_loss is always logged",
    "--use-te-rng-tracker": "random state is torch's",
}
"""Flags of upstream's that change no result here, speed or memory at most: they are taken, with a warning."""

WITHOUT_EFFECT_VALUES: dict[tuple[str, str], str] = {
    ("--megatron-to-hf-mode", "raw"): "the tables in slime/models always map weights",
    ("--qkv-format", "thd"): "sequences are always packed",
}
"""Values of flags in `REPLACED` that ask for what is done anyway: they are taken, with a warning too."""


def without_effect(flag: str, value: str) -> str | None:
    """Why a flag of upstream's with this value changes nothing here; None where it does, or is not there."""
    return WITHOUT_EFFECT.get(flag) or WITHOUT_EFFECT_VALUES.get((flag, value))


def split_without_effect(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """An argument list without the flags that have no effect and their words, and a warning for each of them."""
    kept: list[str] = []
    left_out: dict[str, str] = {}
    is_kept = True
    for token, following in zip_longest(argv, argv[1:], fillvalue=""):
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            reason = without_effect(flag, value if equals else following)
            is_kept = reason is None
            if not is_kept:
                left_out[flag] = f"{flag} is ignored: {reason}"
        if is_kept:
            kept.append(token)
    return kept, list(left_out.values())


_INVERTED = {
    "rollout_global_dataset": "disable_rollout_global_dataset",
    "grpo_std_normalization": "disable_grpo_std_normalization",
    "rewards_normalization": "disable_rewards_normalization",
    "compute_advantages_and_returns": "disable_compute_advantages_and_returns",
    "wandb_random_suffix": "disable_wandb_random_suffix",
}
"""Attributes that upstream's ``--disable-`` switches set, and ours of the opposite meaning."""
_SWITCHES = ("use_", "no_", "enable_", "record_", "release_", "reset_", "freeze_indexer", "async_save")


def add_upstream_attributes(args: Namespace) -> None:
    """Set what upstream's functions read of ``args`` and is no option here: switches of the opposite meaning, and of
    features that are absent None, or False where it is a switch."""
    for name, opposite in _INVERTED.items():
        setattr(args, name, not getattr(args, opposite))
    later = " ".join(NOT_YET.values()).split()
    for flag in (*later, *REPLACED, *WITHOUT_EFFECT):
        name = flag[2:].replace("-", "_")
        if not hasattr(args, name):
            setattr(args, name, False if name.startswith(_SWITCHES) else None)


def explain_flag(flag: str, value: str = "") -> str | None:
    """Why a flag is not available, or None for any other flag, and for one whose value asks for what is done anyway."""
    if (flag, value) in WITHOUT_EFFECT_VALUES:
        return None
    if flag in REPLACED:
        return f"{flag} is not available: {REPLACED[flag]}"
    family = next((prefix for prefix in REPLACED_PREFIXES if flag.startswith(prefix)), None)
    if family is not None:
        return f"{flag} is not available: {REPLACED_PREFIXES[family]}"
    advice = next((advice for advice, names in NOT_YET.items() if flag in names.split()), None)
    return None if advice is None else f"{flag} is not available yet in this version: {advice}"


def explain_value(flag: str, value: str) -> str | None:
    """Why a value of an available flag is not available, or None for any other value."""
    why = UNAVAILABLE_VALUES.get((flag, value))
    return None if why is None else f"{flag} {value} is not available{why}"
