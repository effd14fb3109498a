"""A hook of the trainer's: routers choose other experts than the engine for many tokens, with the same scores."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.transformer.moe import router
from torch import Tensor

NOISE = 0.2
"""In standard deviations of a token's scores."""


class _Perturbed:
    """What a router asks: ``replay``, or nobody, whose own choice is by scores with noise."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        def choose(scores: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
            generator = torch.Generator(scores.device).manual_seed(0)
            noise = torch.randn(scores.shape, generator=generator, dtype=scores.dtype, device=scores.device)
            _, experts = default_compute_topk(scores + NOISE * scores.std() * noise, topk, **groups)
            return scores.gather(1, experts), experts

        if self._replay is None:
            return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen: tuple[Tensor, Tensor] = self._replay.get_replay_topk(scores, topk, num_groups, group_topk, choose)
        return chosen


def perturb(args: Namespace) -> None:
    """``--custom-megatron-init-path``."""
    whole: Any = router.topk_routing_with_score_function

    def perturbed(*given: Any, router_replay: Any = None, **options: Any) -> Any:
        return whole(*given, router_replay=_Perturbed(router_replay), **options)

    setattr(router, "topk_routing_with_score_function", perturbed)  # noqa: B010
