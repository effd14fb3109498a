"""On-policy distillation: a teacher's log-probs of the tokens that the student has sampled join the advantages."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.files.checkpoints import chosen_checkpoint
from slime.options.errors import OptionError, naming
from slime.options.flags.schema import option
from slime.options.rules import Rule
from slime.options.serving.sglang_config import CONFIG, ServedModel, generating

TEACHER_FLAG = "--opd-teacher-load"
MOST_SERVED = 64
"""Of ``--opd-top-k`` with a server: its answer then is some 3 kB a token."""
REWARD_PATH = "slime.rollout.on_policy_distillation.reward_func"
"""The ``--custom-rm-path`` that asks a server, and needs no ``--rm-type``."""
TASK_REWARD_PATH = "slime.rollout.on_policy_distillation.task_reward"
"""The same without the server, of evaluations."""
TEACHER = "teacher"
"""A model of ``--sglang-config`` of this name is asked where nobody says another."""
REMOTE_NAMES = ("remote_rm", "boxed_remote_rm")
"""Of ``--rm-type``, the ones that take ``--rm-url`` for themselves."""


@dataclass
class DistillationOptions:
    """On-policy distillation: the student learns from a teacher's log-probs of its own samples."""

    use_opd: bool = option(
        False,
        "Subtract --opd-kl-coef times the student's log-prob minus the teacher's from the advantage of each token, "
        "before these are whitened.",
    )
    opd_type: Literal["sglang", "megatron"] | None = option(
        None,
        "Who is the teacher: megatron, weights that take turns with the trained ones in the trainers; sglang, a "
        "server: that of --rm-model-path, of a model 'teacher' in --sglang-config, or at --rm-url.",
    )
    opd_kl_coef: float = option(1.0, "Weight of the distillation beside the rewards; 0 only measures it.", at_least=0)
    opd_top_k: int = option(
        0,
        "Add the KL divergence to the teacher to the loss, over its N likeliest ids of each token and all others as "
        "one; 0: that of the sampled token, in the advantages.",
        at_least=0,
    )
    opd_teacher_load: str | None = option(
        None,
        "The teacher of --opd-type megatron, a Hugging Face or torch_dist directory of the same architecture as the "
        "student.",
    )
    opd_teacher_ckpt_step: int | None = option(
        None, "Which of the checkpoints in --opd-teacher-load; default the latest.", at_least=0
    )


RULES = (
    Rule("use_opd", "needs", "opd_type"),
    Rule(
        "@opd_top_k @opd_type @opd_kl_coef @opd_teacher_load @opd_teacher_ckpt_step", "has no effect without", "use_opd"
    ),
    Rule("opd_type=megatron", "needs", "opd_teacher_load", when="placement!=rollout_only"),
    Rule("@opd_teacher_ckpt_step", "needs", "opd_teacher_load"),
    Rule("opd_teacher_load", "has no effect with", "opd_type=sglang", ", which asks a server"),
    Rule(
        "opd_type=sglang",
        "needs",
        "rm_model_path rm_url sglang_config",
        ", whom to ask",
        when="placement!=train_only custom_rm_path=" + REWARD_PATH,
    ),
    Rule(
        f"rm_type={'|'.join(REMOTE_NAMES)}",
        "needs",
        "rm_model_path sglang_config",
        ", for --rm-url is the judge's then, and not the teacher's",
        when="opd_type=sglang placement!=train_only custom_rm_path=" + REWARD_PATH,
    ),
    Rule(
        "opd_type=sglang",
        "has log-probs at temperature 1 alone, as SGLang scores prompts, and",
        "rollout_temperature!=1.0",
        " would compare them with others: take 1, or --opd-type megatron",
    ),
    Rule(
        "use_opd",
        "has no effect with",
        "loss_type=sft_loss disable_compute_advantages_and_returns",
        ", which leaves no advantages: drop it",
    ),
    Rule(
        f"opd_top_k>{MOST_SERVED}",
        "does not go with",
        "opd_type=sglang",
        f", whose replies have so many ids for each token, as text: take {MOST_SERVED} at most, or --opd-type megatron",
    ),
    Rule("opd_top_k", "is in the policy loss, and not in", "loss_type=custom_loss"),
    Rule(
        "opd_type=megatron",
        "and",
        "lora_rank",
        " do not go together: beside adapters, the weights of the trainers are those of --hf-checkpoint for all",
    ),
)


def ask_the_teacher(args: Namespace) -> None:
    """Let `REWARD_PATH` ask the server of ``--opd-type sglang``, unless a function of the user's own does, and reward
    where nothing else does: with 0."""
    if args.use_opd and args.custom_rm_path is None and (args.opd_type == "sglang" or args.rm_type is None):
        args.custom_rm_path = REWARD_PATH


def derive_distillation(args: Namespace) -> None:
    """The teacher's directory, absolute, of the chosen checkpoint; OptionError where there is none."""
    if not args.use_opd or args.opd_teacher_load is None or args.placement == "rollout_only":
        return
    directory = os.path.abspath(os.path.expanduser(args.opd_teacher_load))
    if not os.path.isdir(directory):
        raise OptionError(f"{TEACHER_FLAG} {directory}: there is no such directory")
    if args.opd_teacher_ckpt_step is not None:
        with naming(f"--opd-teacher-ckpt-step {args.opd_teacher_ckpt_step}: {TEACHER_FLAG}", FileNotFoundError):
            directory = str(chosen_checkpoint(directory, args.opd_teacher_ckpt_step))
    args.opd_teacher_load = directory


def check_teachers(args: Namespace) -> None:
    """OptionError for a served teacher that is none or has prefill and decode engines, and for a teacher in whose
    tokens the student's ids are others; of one whose files are not here nothing is known. `find_reward_model` and
    `find_models` come before."""
    if not args.use_opd:
        return
    if args.opd_type == "sglang" and args.placement != "train_only":
        _check_served(args)
    if args.placement == "rollout_only":
        return
    student = _token_ids(Path(args.hf_checkpoint))
    for flag, directory in _directories(args):
        teacher = _token_ids(Path(directory))
        if student and teacher and (differing := sorted(student.items() ^ teacher.items())):
            raise OptionError(
                f"{flag} {directory}: its tokenizer is not that of --hf-checkpoint {args.hf_checkpoint} "
                f"({differing[0][0]!r} and {len(differing) - 1} more): a teacher scores the student's token ids"
            )


def _check_served(args: Namespace) -> None:
    teachers = _of_config(args)
    is_alone = args.sglang_config and not teachers and not _has_another(args)
    if is_alone and args.custom_rm_path == REWARD_PATH:
        raise OptionError(
            f"--opd-type sglang: no model in {CONFIG} {args.sglang_config} is a teacher: add one that does not get the "
            f"trained weights, named {TEACHER!r} or as metadata['opd_teacher'] of rows says, or give --rm-model-path "
            "or --rm-url"
        )
    if apart := [model.where for model in teachers if model.prefills_apart]:
        raise OptionError(
            f"{apart[0]}: prefill and decode apart and --opd-type sglang do not go together: a teacher only computes "
            "prompts, of which a router of both tells nothing; let regular engines serve it"
        )


def _has_another(args: Namespace) -> bool:
    """Whether a teacher is served that is not in ``--sglang-config``."""
    return bool(args.rm_num_gpus or (args.rm_url and args.rm_type not in REMOTE_NAMES))


def _of_config(args: Namespace) -> list[ServedModel]:
    """The teachers in ``--sglang-config``: the one of that name, or where there is no other teacher either all whom
    rows may name; beside one these may have other tasks."""
    others = [model for model in args.sglang_models if model is not generating(args.sglang_models)]
    named = [model for model in others if model.name == TEACHER]
    return named or ([] if _has_another(args) else others)


def _directories(args: Namespace) -> Iterator[tuple[str, str]]:
    if args.opd_type == "megatron":
        yield TEACHER_FLAG, args.opd_teacher_load
        return
    teachers = _of_config(args)
    if args.rm_num_gpus and not teachers:
        yield "--rm-model-path", args.rm_model_path
    yield from ((f"{model.where}: model_path", model.model_path) for model in teachers if model.model_path)


def _token_ids(directory: Path) -> dict[str, int]:
    """Of a ``tokenizer.json``; empty where there is none, or one without ids."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        vocabulary: Any = tokenizer["model"]["vocab"]
        added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if isinstance(vocabulary, list):  # unigram: pairs of token and score
        vocabulary = {token: number for number, (token, *_) in enumerate(vocabulary)}
    return {**vocabulary, **added}
