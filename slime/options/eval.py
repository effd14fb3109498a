"""Evaluation during training."""

from __future__ import annotations

from dataclasses import dataclass

from slime.options.checks.rules import Rule
from slime.options.flags.calls import Call
from slime.options.flags.schema import option


@dataclass
class EvalOptions:
    """Eval: what is not set here is as for training."""

    eval_interval: int | None = option(None, "Evaluate every so many rollouts, and before the first.", at_least=1)
    skip_eval_before_train: bool = option(False, "No evaluation before the first rollout.")
    eval_prompt_data: list[list[str]] | None = option(
        None,
        "Datasets as pairs NAME PATH, several in one flag or the flag repeated; a PATH alone is named by its file.",
    )
    eval_config: str | None = option(
        None,
        "YAML file of datasets with settings of their own: defaults, and datasets by name; after --eval-prompt-data.",
    )
    eval_function_path: str | None = option(
        None,
        "Function that evaluates; default --rollout-function-path.",
        hook=("eval_rollout", "generate_rollout"),
        call=(Call("args, rollout_id, data_source, *, evaluation", "RolloutFnEvalOutput"),),
    )
    eval_input_key: str | None = option(None, "Column of the prompt.")
    eval_label_key: str | None = option(None, "Column of the expected answer.")
    eval_tool_key: str | None = option(None, "Column of tool definitions.")
    n_samples_per_eval_prompt: int = option(1, "Responses for each prompt.", at_least=1)
    eval_temperature: float | None = option(None, "Sampling temperature; 0 is greedy.", at_least=0)
    eval_top_p: float | None = option(None, "Nucleus sampling.", above=0, at_most=1)
    eval_top_k: int | None = option(None, "Sample from the k most likely tokens.", at_least=-1)
    eval_max_response_len: int | None = option(None, "Tokens of one response at most.", at_least=1)
    eval_max_prompt_len: int | None = option(
        None, "Longer prompts are left out; at most one less than the context.", at_least=1
    )
    eval_max_context_len: int | None = option(
        None, "Prompt and response tokens together; at most what the engine's context leaves to requests.", at_least=1
    )
    eval_min_new_tokens: int | None = option(None, "Tokens of one response at least.", at_least=0)
    custom_eval_rollout_log_function_path: str | None = option(
        None,
        "Function (rollout_id, args, data, extra_metrics) -> bool that logs an evaluation; True: slime logs only times "
        "besides.",
        hook=("log_eval_rollout_data",),
        call=(Call("rollout_id, args, data, extra_metrics", "bool", may_be_async=True),),
    )


RULES = (
    Rule("eval_interval", "needs", "eval_prompt_data eval_config eval_function_path"),
    Rule("eval_interval", "needs engines, and", "placement=train_only", " starts none", "!load_debug_rollout_data"),
)
