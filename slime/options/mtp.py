"""Multi-token prediction (MTP) heads: whether they can be trained, and whether engines use them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.files.checkpoints import same_place
from slime.options.errors import OptionError
from slime.options.rules import Rule, check

FLAG = "--enable-mtp-training"
_DRAFTS_BY_HEADS = ("EAGLE", "NEXTN")
"""SGLang's names of speculative decoding by a model's own heads."""
_DRAFTS_BY_NO_MODEL = ("", "NGRAM")

RULES = (
    Rule("@mtp_loss_scaling_factor", "needs", "enable_mtp_training", ": no other loss has it"),
    Rule(
        "enable_mtp_training",
        "cannot be used with",
        "lora_rank",
        ", which freezes the model and its heads: drop one",
        when="placement!=rollout_only",
    ),
    Rule(
        "enable_mtp_training",
        "with --pipeline-model-parallel-size above 1 cannot be used with",
        "overlap_param_gather",
        ": heads would read an embedding that is not gathered yet: drop it",
        when="placement!=rollout_only pipeline_model_parallel_size>1",
    ),
)

DRAFT = (
    *(
        Rule(
            "sglang_speculative_draft_model_path sglang_speculative_algorithm",
            ": with",
            way,
            f" SGLang would load the trained weights into the draft model too: {instead}",
        )
        for way, instead in (
            ("update_weight_transport=disk", "use tensor or distributed"),
            ("check_weight_update_equal", "the check has it read a directory; drop one of them"),
        )
    ),
)
"""Of engines that draft by a model of their own."""


def check_heads(args: Namespace, count: int, model_type: str, trainable: list[str]) -> None:
    """Refuse, by an OptionError, heads other than the ``count`` of config.json, or of a type that is not trainable."""
    if not args.enable_mtp_training:
        return
    if not count:
        raise OptionError(
            f"{FLAG}: {args.hf_checkpoint} has no MTP heads (num_nextn_predict_layers of config.json): drop it"
        )
    if model_type not in trainable:
        raise OptionError(
            f"{FLAG}: the heads of {model_type} cannot be trained; those of {', '.join(trainable)} can: drop it"
        )
    if args.mtp_num_layers != count:  # by --allow-config-mismatch
        raise OptionError(f"{FLAG} trains all {count} heads of config.json, not --mtp-num-layers {args.mtp_num_layers}")


def check_saved_heads(directory: str | Path, saved: bool, own: bool) -> None:
    """OptionError where only one of a checkpoint to go on from and of the run trains heads."""
    if saved != own:
        how = "with" if saved else "without"
        raise OptionError(f"{directory} was saved {how} {FLAG}, and its optimizer state can only be loaded {how} it")


def check_heads_training(args: Namespace, warnings: list[str]) -> None:
    """Refuse, by an OptionError, what a run that trains heads, or whose engines draft, cannot do beside it.

    Sets ``args.pushes_heads``, and ``args.drafts_apart``: whether engines draft by a model of their own, not by heads
    of the one that is trained.
    """
    args.pushes_heads, args.drafts_apart = False, False
    draft = getattr(args, "sglang_speculative_draft_model_path", None)
    algorithm = (getattr(args, "sglang_speculative_algorithm", None) or "").upper()
    by_heads = algorithm in _DRAFTS_BY_HEADS
    drafts = args.num_engines > 0 and algorithm not in _DRAFTS_BY_NO_MODEL
    if drafts and not (by_heads and (draft is None or same_place(draft, args.hf_checkpoint))):
        args.drafts_apart = True
        check(args, DRAFT)
    if not args.enable_mtp_training or args.placement == "rollout_only" or not args.num_engines or not by_heads:
        return
    if args.drafts_apart:
        warnings.append(
            f"--sglang-speculative-draft-model-path {draft} is not --hf-checkpoint {args.hf_checkpoint}: engines are "
            f"not given the heads that {FLAG} trains"
        )
        return
    if args.update_weight_transport == "distributed" or (
        args.update_weight_transport == "tensor" and args.engines_apart
    ):
        raise OptionError(
            f"--sglang-speculative-algorithm {algorithm} with {FLAG}: SGLang takes heads by --update-weight-transport "
            "tensor or disk, and drops them of distributed: use disk, or tensor with --colocate and no engines apart"
        )
    args.pushes_heads = True
