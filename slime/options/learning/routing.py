"""Routing replay: in which passes tokens go to the experts that another pass, or an engine, has sent them to."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.options.errors import OptionError
from slime.options.flags.schema import option
from slime.options.rules import Rule, check
from slime.options.serving.overrides import check_engines
from slime.options.serving.sglang_config import generating


@dataclass
class RoutingOptions:
    """Routing replay: training passes of a mixture of experts send tokens where they went before."""

    use_routing_replay: bool = option(
        False,
        "Send each token, in the training passes, to the experts that the pass of the old log-probs chose, whatever "
        "the steps before have made of the routers.",
    )
    use_rollout_routing_replay: bool = option(
        False,
        "Send each token to the experts that the engine chose when it generated, in the pass of the old log-probs and "
        "in the training passes; contains --use-routing-replay.",
    )


RULES = (
    Rule("use_routing_replay", "needs", "num_experts", ": the model has no experts"),
    Rule(
        "use_routing_replay",
        "and",
        "moe_router_fusion",
        " do not go together: the fused router of Transformer Engine chooses by itself",
    ),
    Rule(
        "use_routing_replay",
        "cannot say what becomes of tokens with",
        "moe_expert_capacity_factor moe_router_load_balancing_type=sinkhorn moe_router_force_load_balancing "
        "moe_input_jitter_eps",
        ", which choose anew in each pass: drop one",
    ),
    Rule("use_routing_replay", "has no effect with", "loss_type=sft_loss", ", which has one pass alone: drop it"),
    Rule(
        "use_routing_replay",
        "and",
        "keep_old_actor",
        " do not go together: several passes make the old log-probs; the engine's routes are one a token",
        when="!use_rollout_routing_replay",
    ),
)
"""What is known with the model's config."""
ENGINE_RULES = (
    Rule(
        "use_rollout_routing_replay",
        "and",
        "sglang_speculative_algorithm",
        " do not go together: engines that draft do not keep the routes of all that they verify",
    ),
    Rule(
        "use_rollout_routing_replay",
        "and",
        "sglang_enable_hierarchical_cache sglang_enable_lmcache sglang_enable_flexkv sglang_radix_cache_backend",
        " do not go together: routes are kept by the place of a token in the device's cache, and what comes back from "
        "another memory gets a new place, with the routes of others: drop one",
    ),
    Rule(
        "use_rollout_routing_replay",
        "and",
        "sglang_enable_two_batch_overlap",
        " do not go together: each half of a batch writes its routes over those of the other half; drop one",
    ),
    Rule(
        "use_rollout_routing_replay",
        "and",
        "sglang_moe_a2a_backend!=none|deepep",
        " do not go together: each rank would keep the routes of its own part of a batch; take deepep or none",
    ),
    Rule(
        "use_rollout_routing_replay",
        "and",
        "sglang_moe_runner_backend=triton_kernel|flashinfer_trtllm|experimental_sgl_trtllm|flashinfer_mxfp4",
        " do not go together: its kernel chooses experts by itself, and keeps no routes; take another, such as triton",
    ),
)
"""Of each engine that generates. sglang 0.5.17 keeps routes in ``srt/state_capturer``."""


def contain_replay(args: Namespace) -> None:
    """Have the engines' routes replayed by all that replays the trainers' own."""
    args.use_routing_replay |= args.use_rollout_routing_replay


def check_routing(args: Namespace) -> None:
    """OptionError for what replay would silently miss."""
    check(args, RULES)
    if args.sglang_models:
        groups = generating(args.sglang_models).groups
        check_engines(args, ENGINE_RULES, ((group.where, group.sglang_cli) for group in groups))
    else:
        check(args, ENGINE_RULES)
    apart = [model.where for model in args.sglang_models if model.update_weights and model.prefills_apart]
    if args.use_rollout_routing_replay and apart:
        raise OptionError(
            f"{apart[0]}: prefill and decode apart and --use-rollout-routing-replay do not go together: an engine that "
            "goes on from another one's prompt has no routes of it"
        )
