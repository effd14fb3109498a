"""A sampler for SGLang's registry that draws by a function of our own what draws from a whole distribution.

Of [requests, vocabulary] SGLang makes probabilities, draws from them and takes their logarithms in ten passes, where
one will do (`sampling_kernel`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

Sample = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""As `sampling_kernel.sample`."""


def register(sample: Sample) -> None:
    """Have servers of this process take this sampler in the place of SGLang's own, to which it leaves all else."""
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")

    class OnePassSampler(sampler.Sampler):
        def __init__(self) -> None:
            super().__init__()
            # Ranks have one seed, and those that attend for requests of their own are to draw for them by themselves.
            self._stream: int = sampler.get_parallel().attn_dp_rank if sampler.is_dp_attention_enabled() else 0

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int] | None],
            positions: Tensor,
        ) -> Tensor:
            asks_for_others = return_logprob and (
                any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs)
            )
            if asks_for_others or not is_plain(sampling_info) or sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
                of_sglang: Tensor = super().forward(
                    logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
                )
                return of_sglang
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            token, log_prob = sample(logits, sampling_info.temperatures, self._stream)
            if return_logprob:
                logits_output.next_token_logprobs = log_prob
            self._sync_token_ids_across_tp(token, sampling_info)
            return token

    for backend in ("flashinfer", "pytorch"):
        sampler.register_sampler_backend(backend, OnePassSampler)


def is_plain(sampling_info: Any) -> bool:
    """Whether requests draw from all of their distribution, with no seed of their own."""
    cut = sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling or sampling_info.need_min_p_sampling
    masked = any(sampling_info.return_sampling_masks or [])
    return not (sampling_info.is_all_greedy or cut or masked or sampling_info.sampling_seed is not None)
