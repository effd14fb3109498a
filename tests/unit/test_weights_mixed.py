"""One publication to engines beside trainers and to engines apart: each gets every bucket in its own way, all of them
pause before the first and go on after the last."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime.backends.sglang.client import EngineError
from slime.files.hf_writer import NamedTensors
from slime.weights import EngineAddress, distributed, make_publisher
from slime.weights.mixed import MixedPublisher
from slime.weights.tensor import can_push_local_experts
from tests.fake_control import Dying, addresses_of

NUM_GPUS = 0

BUCKETS: list[NamedTensors] = [[(name, torch.ones(2))] for name in ("a", "b", "c")]
_BEFORE, _AFTER = ["pause", "flush_cache", "begin_weight_update"], ["end_weight_update", "set_weight_version"]


class Group:
    """The collective group of rank 0 and the engines apart, as torch would have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        """Of each group that was made."""
        self.sent, self.left = 0, 0

        def join(host: str, port: int, world_size: int, *_: Any) -> Namespace:
            self.sizes.append(world_size)
            return Namespace(abort=lambda: None)

        monkeypatch.setattr(distributed, "join_as_sender", join)
        monkeypatch.setattr(distributed.dist, "broadcast", self._broadcast)
        monkeypatch.setattr(distributed.dist, "destroy_process_group", self._leave)

    def _broadcast(self, *_: Any, **__: Any) -> Namespace:
        self.sent += 1
        return Namespace(wait=lambda timeout: None)

    def _leave(self, group: Any) -> None:
        self.left += 1


def publisher() -> MixedPublisher:
    args = Namespace(
        weight_update_timeout=60.0, drafts_apart=False, check_weight_update_equal=False, allow_untested_versions=False
    )
    vars(args).update(asynchronous=False, update_weight_transport="tensor", lora_sync="merged")
    made = make_publisher(args, 0)
    assert isinstance(made, MixedPublisher)
    return made


def places(*controls: Dying, apart: tuple[int, ...]) -> list[EngineAddress]:
    """The first on the slot of the one trainer; those apart are numbered."""
    return [replace(each, apart=index in apart) for index, each in enumerate(addresses_of(controls))]


def pushes_of(control: Dying) -> list[str]:
    assert control.calls[:1] != ["continue_"]
    return [call for call in control.calls if call.startswith("update_weights_from")]


def test_each_gets_every_bucket_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    group, made = Group(monkeypatch), publisher()
    beside, first, second = Dying("http://e0"), Dying("http://e1"), Dying("http://e2")
    engines = places(beside, first, second, apart=(1, 2))
    for version in (1, 2):
        figures = made.publish(version, BUCKETS, engines)
        assert figures["bytes"] == 24
    assert pushes_of(beside) == ["update_weights_from_tensor"] * 6
    assert pushes_of(first) == pushes_of(second) == ["update_weights_from_distributed"] * 6
    assert (group.sizes, group.sent) == ([3], 6), "one group for both pushes"
    assert beside.calls[:4] == [*_BEFORE, "update_weights_from_tensor"]
    assert first.calls[:5] == ["init_weights_update_group", *_BEFORE, "update_weights_from_distributed"]
    for control in (beside, first, second):
        assert control.version == "2"
        assert control.calls[-3:] == [*_AFTER, "continue_"]
    made.publish(3, BUCKETS, engines[:2])
    assert group.sizes == [3, 2], "one that left may be dead: the others meet anew"
    made.publish(4, BUCKETS, engines[:1])
    assert (pushes_of(beside)[9:], group.sent) == (["update_weights_from_tensor"] * 3, 9), "nobody is left apart"
    made.close()
    assert group.left == 2


def test_one_that_joins_again_at_its_address_is_met_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An external engine may have been started again meanwhile, and have none of the group or of the weights."""
    group, made = Group(monkeypatch), publisher()
    beside, apart = places(Dying("http://e0"), Dying("http://e1"), apart=(1,))
    made.publish(1, BUCKETS, [beside, apart])
    again = replace(apart, name="engine 3")
    made.publish(1, BUCKETS, [again])
    assert group.sizes == [2, 2]
    with pytest.raises(ValueError, match="does not grow"):
        made.publish(1, BUCKETS, [again])


@pytest.mark.parametrize("dies", [0, 1])
def test_the_death_of_either_kind_leaves_all_paused_for_the_next_try(
    dies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch)
    made = publisher()
    call = ("update_weights_from_tensor", "update_weights_from_distributed")[dies]
    controls = [Dying(f"http://e{i}", dies_in=call if i == dies else "") for i in range(2)]
    engines = places(*controls, apart=(1,))
    with pytest.raises(EngineError, match=rf"version 1 \(MixedPublisher\): push: engine http://e{dies}: connection re"):
        made.publish(1, BUCKETS, engines)
    left = controls[1 - dies]
    assert "continue_" not in left.calls
    made.publish(1, BUCKETS, [engines[1 - dies]])
    assert (left.version, left.calls[-1], len(pushes_of(left)[-3:])) == ("1", "continue_", 3)


def test_experts_are_gathered_for_engines_apart() -> None:
    args = Namespace(expert_model_parallel_size=2, expert_tensor_parallel_size=1, update_weight_transport="tensor")
    vars(args).update(lora_sync="merged", sglang_ep_size=2)
    beside = EngineAddress("http://e0", 2)
    assert can_push_local_experts(args, [beside])
    assert not can_push_local_experts(args, [beside, EngineAddress("http://e1", 2, first_slot=2, apart=True)])
