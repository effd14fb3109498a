"""Which engines take from each training rank its own experts only, and what the check of a push then compares."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.files.hf_writer import NamedTensors
from slime.weights import EngineAddress
from slime.weights.tensor import TensorPublisher, can_push_local_experts
from tests.fake_control import Dying, FakeControl, addresses_of

NUM_GPUS = 0
OPTIONS: dict[str, Any] = {
    **{"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "update_weight_transport": "tensor"},
    **{"lora_sync": "merged", "sglang_ep_size": 4, "sglang_moe_dp_size": 1},
    **{"sglang_ep_num_redundant_experts": 0, "sglang_enable_eplb": False, "sglang_init_expert_location": "trivial"},
}
PAIRS = {"expert_model_parallel_size": 2, "sglang_ep_size": 2}


@pytest.mark.parametrize(
    ("engines", "changes", "expected"),
    [
        ([4], {}, True),
        ([4, 4], {}, True),
        ([8], {}, False),  # SGLang's ranks 0 and 1 share the experts that Megatron's 0 and 4 have
        ([8], {"expert_tensor_parallel_size": 2}, True),
        ([8, 8], {"expert_tensor_parallel_size": 2}, True),
        ([4], {"expert_tensor_parallel_size": 2}, False),
        ([2, 2, 2], PAIRS, True),
        ([4], PAIRS, False),
        ([1, 1], PAIRS, False),
        ([4], {"sglang_ep_size": 1}, False),
        ([4], {"expert_model_parallel_size": 1, "sglang_ep_size": 1}, False),
        ([4], {"update_weight_transport": "distributed"}, False),
        ([4], {"lora_sync": "adapter"}, False),
        ([4], {"sglang_moe_dp_size": 2}, False),
        ([4], {"sglang_ep_num_redundant_experts": 4}, False),
        ([4], {"sglang_enable_eplb": True}, False),
        ([4], {"sglang_init_expert_location": "placement.json"}, False),
        ([4], {"sglang_max_ep_size": 8}, False),
        ([4], {"sglang_dwdp_size": 4}, False),
    ],
)
def test_engines_that_place_experts_as_trainers_do(engines: list[int], changes: dict[str, Any], expected: bool) -> None:
    addresses = addresses_of([FakeControl(f"http://e{i}") for i in range(len(engines))], engines)
    assert can_push_local_experts(Namespace(**OPTIONS | changes), addresses) is expected


def test_an_engine_keeps_its_slots_when_others_leave() -> None:
    """Its first rank computes with what the training rank beside it has, whatever engines there are besides."""
    args = Namespace(**OPTIONS | PAIRS)
    assert can_push_local_experts(args, [EngineAddress("http://e1", 2, first_slot=2)])
    assert not can_push_local_experts(args, [EngineAddress("http://e1", 2, first_slot=1)])


class Check:
    """Notes what it is to compare."""

    def __init__(self, *_: Any) -> None:
        self.names: list[str] = []
        self.ran = False
        made.append(self)

    def add(self, bucket: NamedTensors) -> None:
        self.names += [name for name, _ in bucket]

    def run(self, each_engine: Any) -> None:
        self.ran = True

    def discard(self) -> None:
        pass


made: list[Check] = []


@pytest.mark.parametrize("whole", [None, [[("a", torch.ones(2))], [("b", torch.ones(2))]]])
def test_the_check_has_the_experts_of_all_ranks(
    whole: list[NamedTensors] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.weights.publisher.EqualityCheck", Check)
    made.clear()
    args = Namespace(
        check_weight_update_equal=True,
        asynchronous=False,
        weight_update_timeout=100.0,
        drafts_apart=False,
        allow_untested_versions=False,
    )
    engines = addresses_of([Dying("http://e")])
    figures = TensorPublisher(args, 0).publish(1, [[("a", torch.ones(2))]], engines, whole)
    assert [(check.names, check.ran) for check in made] == [(["a"] if whole is None else ["a", "b"], True)]
    assert figures["bytes"] == 8


def test_what_the_check_needs_is_gathered_after_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait in its collectives."""
    monkeypatch.setattr("slime.weights.publisher.EqualityCheck", Check)
    args = Namespace(
        check_weight_update_equal=True,
        asynchronous=False,
        weight_update_timeout=100.0,
        drafts_apart=False,
        allow_untested_versions=False,
    )
    engines = addresses_of([Dying("http://e", dies_in="update_weights_from_tensor")])
    whole = iter([[("a", torch.ones(2))]] * 3)
    with pytest.raises(Exception, match="connection reset"):
        TensorPublisher(args, 0).publish(1, [[("a", torch.ones(2))]], engines, whole)
    assert next(whole, None) is None
