"""Low-rank adapters in place of all weights."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.options.errors import OptionError
from slime.options.schema import option


@dataclass
class LoraOptions:
    """Low-rank adapters (LoRA)."""

    lora_rank: int | None = option(
        None, "Train adapters of this rank and freeze the model, which then is the reference model too.", at_least=1
    )
    lora_alpha: float | None = option(
        None, "What adapters add is scaled by alpha / rank; default twice --lora-rank.", above=0
    )
    lora_target_modules: list[str] | None = option(
        None, "Layers with adapters, by the last parts of their Hugging Face names; default all-linear."
    )
    save_lora: str | None = option(
        None, "Directory for the adapters in PEFT's format, written when a checkpoint is; {rollout_id} is filled in."
    )


def derive_lora(args: Namespace) -> None:
    """Fill in what was not given.

    Raises:
        OptionError: flags of adapters without ``--lora-rank``.
    """
    if args.lora_rank is None:
        for name in ("lora_alpha", "lora_target_modules", "save_lora"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} needs --lora-rank")
        return
    args.lora_alpha = args.lora_alpha or 2.0 * args.lora_rank
    args.lora_target_modules = args.lora_target_modules or ["all-linear"]
