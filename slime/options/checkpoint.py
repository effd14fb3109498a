"""What is loaded and saved."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.options.flags.schema import option
from slime.options.rules import Rule


@dataclass
class CheckpointOptions:
    """Checkpoints."""

    load: str | None = option(None, "Directory of checkpoints to resume from; it may be empty if it is also --save.")
    ckpt_step: int | None = option(
        None, "Resume from the checkpoint in --load after this rollout; default the latest.", at_least=0
    )
    save: str | None = option(None, "Directory for checkpoints.")
    save_interval: int | None = option(
        None, "Save every so many rollouts; with --save, --save-hf or --save-lora also after the last.", at_least=1
    )
    save_hf: str | None = option(
        None, "Directory for a Hugging Face export, written when a checkpoint is; {rollout_id} in it is filled in."
    )
    ref_load: str | None = option(
        None,
        "Reference model, a Hugging Face or torch_dist directory; training also starts from it without --load.",
        aliases=("--initial-megatron-checkpoint",),
    )
    ref_ckpt_step: int | None = option(None, "Which of the checkpoints in --ref-load; default the latest.", at_least=0)
    run_dir: str | None = option(
        None, "Directory for config.yaml, metrics.jsonl and logs; default --save, else outputs/<time>."
    )


RULES = (
    Rule("save_interval", "needs", "save save_hf save_lora"),
    Rule("@ckpt_step", "needs", "load"),
    Rule("@ref_ckpt_step", "needs", "ref_load"),
    Rule(
        "use_kl_loss kl_coef",
        "needs",
        "ref_load lora_rank",
        ": weights to stay close to",
        when="needs_reference placement!=rollout_only",
    ),
)


def where_loaded(args: Namespace) -> str:
    """How messages name the checkpoint that a run goes on from: all alike, so that one reason is told once."""
    return f"--load {args.load}:" if args.ckpt_step is None else f"--ckpt-step {args.ckpt_step}: --load"
