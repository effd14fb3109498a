"""How responses are generated and rewarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.options.data import DEFAULT_SOURCE
from slime.options.flags.schema import LARGEST_SEED, function_path, option
from slime.options.rules import Rule
from slime.utils.calls import Call

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
_WITHOUT_BUFFER = (
    *("slime.rollout.data_source.RolloutDataSource", "slime.data.source.data_source.RolloutDataSource"),
    "slime.data.RolloutDataSource",
)
REWARD_NAMES = ("reward_func", "custom_rm")
"""What a bare file of --custom-rm-path is searched for."""
GROUP_REWARD_NAMES = ("batched_custom_rm", "reward_func")
"""The same with --group-rm."""
REWARD_CALLS = (
    Call("args, sample, **kwargs", "float | dict", "sample", is_async=True),
    Call("args, samples, **kwargs", "list[float | dict]", "samples", is_async=True),
)
GENERATE_CALLS = (
    Call("args, sample, sampling_params, *, evaluation=False", "Sample | list[Sample]", is_async=True),
    Call("args, samples, *, sampling_params=None, evaluation=False", "list[Sample]", "samples", is_async=True),
)


def generates_itself(path: str | None) -> bool:
    """Whether a rollout or evaluation function is slime's, which generates and rewards as the options say."""
    return path is None or path.replace(":", ".") in (DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)


def written(*paths: str) -> str:
    """A term's values for functions, whose paths may have a colon before the name."""
    return "|".join(f"{path}|{':'.join(path.rsplit('.', 1))}" for path in paths)


@dataclass
class RolloutOptions:
    """Rollout: the model and how it is sampled."""

    hf_checkpoint: str | None = option(
        None, "Hugging Face directory or hub id: tokenizer, config.json, initial weights. Required."
    )
    rollout_function_path: str = function_path(
        "(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput",
        " that makes one rollout.",
        ("generate_rollout",),
        DEFAULT_ROLLOUT,
    )
    custom_generate_function_path: str | None = option(
        None,
        "Your own generation, for tools and several turns: an async function (args, sample, sampling_params) that "
        "generates one sample.",
        hook=("generate", "custom_generate"),
        call=GENERATE_CALLS,
    )
    over_sampling_batch_size: int | None = option(
        None,
        "Prompts to begin at a time; at least --rollout-batch-size. Surplus groups go back to the buffer.",
        at_least=1,
    )
    dynamic_sampling_filter_path: str | None = function_path(
        "(args, samples, **kwargs) -> DynamicFilterOutput | bool",
        ": whether a finished group is trained.",
        ("dynamic_sampling_filter", "check_reward_nonzero_std"),
        may_be_async=True,
    )
    partial_rollout: bool = option(
        False, "Continue unfinished responses in a later rollout, instead of starting them again."
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False,
        "Leave tokens of older weights out of the loss: those of all segments before the newest push, in "
        "partial, surplus and asynchronous responses alike.",
    )
    rollout_prefix_warmup: bool = option(
        False,
        "Send a group's prompt once before its responses, which then find its keys and values in the engine's cache. "
        "For long prompts. A custom generate function that sends another prompt has no use of it.",
    )
    on_sample_error: Literal["retry", "drop", "stop"] = option(
        "retry",
        "When a user's function, a reward or one request fails: try the sample up to three times and then drop its "
        "group, drop it at once, or stop the run.",
    )
    rollout_sample_hook_path: list[list[str]] | None = function_path(
        "(args, sample, *, rollout_id=None, evaluation=False) -> Sample | None",
        ", called with every sample between its generation and its reward; the flag may be repeated.",
        ("sample_hook", "rollout_sample_hook"),
        may_be_async=True,
    )
    rollout_sample_filter_path: str | None = function_path(
        "(args, groups) -> None",
        " that sets remove_sample of samples to be left out of the loss.",
        ("rollout_sample_filter", "sample_filter"),
        may_be_async=True,
    )
    rollout_all_samples_process_path: str | None = function_path(
        "(args, all_groups, data_source) -> None",
        ", called after each rollout with every finished group, filtered ones included.",
        ("process_all_samples", "all_samples_process"),
        may_be_async=True,
    )
    max_turns: int | None = option(None, "For custom generate functions: turns of one sample at most.", at_least=1)
    rollout_temperature: float = option(1.0, "Sampling temperature; the trainer's log-probs use it too.", above=0)
    rollout_top_p: float = option(1.0, "Nucleus sampling; log-probs of the trainer assume 1.", above=0, at_most=1)
    rollout_top_k: int = option(-1, "Sample from the k most likely tokens; -1 is all.", at_least=-1)
    rollout_max_context_len: int | None = option(
        None, "Prompt and response tokens together; at most what the engine's context leaves to requests.", at_least=1
    )
    rollout_max_prompt_len: int | None = option(
        None, "Longer prompts are left out; at most one less than the context.", at_least=1
    )
    rollout_max_response_len: int | None = option(None, "Tokens of one response at most.", at_least=1)
    rollout_skip_special_tokens: bool = option(False, "Leave special tokens out of the response text.")
    rollout_stop: list[str] | None = option(None, "Strings that end a response.")
    rollout_stop_token_ids: list[int] | None = option(None, "Token ids that end a response.", at_least=0)
    rollout_shuffle: bool = option(False, "Shuffle the prompts anew in every epoch.")
    rollout_seed: int = option(
        42, "Seed of the shuffle and of per-request sampling seeds.", at_least=0, at_most=LARGEST_SEED
    )
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = option(
        "qwen",
        "Supervised data: distill_qwen trains only the assistant's last turn; the others all mean the same "
        "and train every assistant turn. The tokenizer's chat template says where a turn is.",
    )


@dataclass
class RewardOptions:
    """Reward: how a response is judged."""

    rm_type: str | None = option(
        None,
        "Built-in reward: math, dapo, deepscaler, f1, gpqa, ifbench, random, remote_rm; boxed_<name> judges only "
        "what the last \\boxed{} holds.",
    )
    custom_rm_path: str | None = option(
        None,
        "Your own reward: an async function (args, sample, **kwargs) -> float or dict, or (args, samples, **kwargs) -> "
        "list of these.",
        hook=REWARD_NAMES,
        call=REWARD_CALLS,
    )
    group_rm: bool = option(
        False, "Compute rewards once for a whole group, when all its samples are there; a list function gets them all."
    )
    reward_key: str | None = option(None, "Entry of a dict reward that is trained on.")
    eval_reward_key: str | None = option(None, "Entry of a dict reward that evaluation reports; default --reward-key.")
    rm_url: str | None = option(None, "Where --rm-type remote_rm posts {prompt, response, label}.")
    rm_model_path: str | None = option(
        None,
        "Hugging Face directory or hub id of a reward model. It has its own SGLang engines, and its weights "
        "never change; the reward function finds it by get_model_url(args, 'reward').",
    )
    rm_num_gpus: int | None = option(None, "Slots for the reward model alone.", at_least=1, at_most=1_000_000)
    rm_num_gpus_per_engine: int = option(1, "Slots of one engine of the reward model.", at_least=1)
    rm_sglang_args: dict[str, Any] | None = option(
        None, 'SGLang flags of the reward model\'s engines, as JSON: {"context_length": 2048}.'
    )


@dataclass
class EngineOptions:
    """Engines: SGLang's own flags are under --help sglang and --help router."""

    sglang_server_concurrency: int = option(512, "Requests in flight per engine.", at_least=1)
    sglang_config: str | None = option(
        None,
        "YAML file of the models to serve and the groups of their engines, with sizes and SGLang flags of their own.",
    )
    prefill_num_servers: int | None = option(
        None, "So many engines compute prompts only, and all others go on from there.", at_least=1
    )
    rollout_external_engine_addrs: list[str] | None = option(
        None,
        "HOST:PORT of SGLang servers that run already and serve --hf-checkpoint: they get requests and weights, and "
        "are neither started nor ended. The run has engines of its own beside them only where --rollout-num-gpus or "
        "--colocate says so.",
    )
    sglang_router_ip: str | None = option(
        None, "Host of a router that runs already: engines are registered there, and it is neither started nor ended."
    )
    sglang_router_port: int | None = option(None, "Its port.", at_least=1, at_most=65535)


RANKS = (
    # SGLang 0.5.17 gives all copies the one --nccl-port that it is started with, too.
    Rule(
        "sglang_dp_size>1",
        "needs",
        "sglang_enable_dp_attention",
        "; copies of the whole model are engines of their own, with as many slots each",
    ),
    Rule(
        "sglang_pp_size>1",
        "cannot be used: an engine's slots (--rollout-num-gpus-per-engine, a reward model's --rm-num-gpus-per-engine) "
        "are all tensor-parallel ranks; drop it",
    ),
)
"""An engine's slots are the tensor-parallel ranks of one model, and it has no other ranks."""

RULES = (
    *RANKS,
    Rule("over_sampling_batch_size", "is less than", "rollout_batch_size"),
    Rule(
        "mask_offpolicy_in_partial_rollout",
        "has no effect without",
        "partial_rollout over_sampling_batch_size!=None",
        " in train.py: all tokens are of the newest weights",
        when="!asynchronous",
    ),
    Rule(
        "partial_rollout buffer_filter_path",
        "needs a buffer, which is not in",
        f"data_source_path={written(*_WITHOUT_BUFFER)}",
    ),
    Rule(
        "@over_sampling_batch_size @dynamic_sampling_filter_path @partial_rollout @mask_offpolicy_in_partial_rollout "
        "@rollout_prefix_warmup",
        "is for slime's own rollouts:",
        f"rollout_function_path!={written(DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)}",
        " would not heed it",
    ),
    Rule(
        f"rollout_function_path={written(FULLY_ASYNC_ROLLOUT)}",
        "generates while the trainer trains: use train_async.py",
        when="!asynchronous",
    ),
    Rule(
        f"rollout_function_path={written(FULLY_ASYNC_ROLLOUT)}",
        "generates ahead: give --max-weight-staleness 1 or more",
        when="asynchronous max_weight_staleness=0",
    ),
    Rule(
        f"rollout_function_path={written(FULLY_ASYNC_ROLLOUT)}",
        "always has as many groups under way as --max-weight-staleness allows, and would not heed",
        "over_sampling_batch_size",
        ": drop it",
    ),
    Rule(
        "rollout_prefix_warmup",
        "and",
        "deterministic_mode sglang_disable_radix_cache",
        " do not go together: engines then keep nothing of a prompt; drop one",
    ),
    Rule(
        "rollout_prefix_warmup",
        "has no effect without",
        "n_samples_per_prompt>1 n_samples_per_eval_prompt>1",
        ": a prompt is computed once anyway",
        when=f"!eval_config !buffer_filter_path data_source_path={written(DEFAULT_SOURCE, *_WITHOUT_BUFFER)}",
    ),
    Rule(
        "rollout_prefix_warmup",
        "needs",
        "router_policy=cache_aware",
        ": others do not send a prompt's responses to the engine that has computed it",
    ),
    Rule("rollout_top_k=0 eval_top_k=0", "must be -1 (all) or at least 1"),
    Rule("rm_num_gpus rm_sglang_args!=None", "needs", "rm_model_path"),
    Rule("sglang_config", "and", "prefill_num_servers", " exclude each other"),
    Rule("rollout_external_engine_addrs", "and", "sglang_config prefill_num_servers", " exclude each other"),
    Rule("sglang_router_ip", "needs", "sglang_router_port"),
    Rule("sglang_router_port", "needs", "sglang_router_ip"),
)
