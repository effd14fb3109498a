"""How far a student is from its teacher on held-out prompts: an evaluation's ``custom_rm_path``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

from slime.data import Sample
from slime.data.columns import TEACHER_LOG_PROBS
from slime.rollout import on_policy_distillation


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The mean, over the tokens of a response, of the student's log-prob less the teacher's, in nats.

    In the mean over responses it is KL(student || teacher) of the next token. Both log-probs are SGLang's, at
    temperature 1. With ``--opd-top-k`` the training measures another one, over fewer outcomes; this one is the same.
    """
    await on_policy_distillation.reward_func(Namespace(**vars(args) | {"opd_top_k": 0, "rm_type": None}), sample)
    teacher = sample.columns.pop(TEACHER_LOG_PROBS)
    return float(np.mean(np.array(sample.rollout_log_probs) - teacher))
