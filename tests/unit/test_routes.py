"""Routes: what an engine says of them, what a sample has, and what becomes a column."""

from __future__ import annotations

import base64
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.agent.trajectory import Trajectory, TurnRecord
from slime.data import Ragged, Sample, TrainBatch
from slime.data.routes import RouteError, RouteShape, asked_for, joined
from slime.options.errors import OptionError
from slime.options.learning.routing import check_routing
from slime.rollout.batches.train_data import to_columns, to_train_batches
from slime.utils.errors import BadInputError
from slime.utils.http_client import carried
from tests.unit.test_train_data import make_args

NUM_GPUS = 0
SHAPE = RouteShape(layers=3, moe_layers=(0, 2), topk=2, experts=8)
MODEL = {"num_layers": 3, "num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": [1, 0, 1]}
ARGS = Namespace(use_rollout_routing_replay=True, **MODEL)


def routes(rows: int, first: int = 0) -> np.ndarray:
    """Of tokens from ``first`` on, int32 as of an engine: two experts of each layer that has any."""
    one = np.arange(first, first + rows)[:, None] + np.arange(3)
    pairs = np.stack([one % 8, (one + 3) % 8], axis=-1).astype(np.int32)
    pairs[:, 1] = 0
    return pairs


def told(rows: np.ndarray, start: int | None = None) -> dict[str, Any]:
    text = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return {"routed_experts": text} | ({} if start is None else {"routed_experts_start_len": start})


@pytest.mark.parametrize(
    ("layers", "every", "moe_layers"),
    [(4, 1, (0, 1, 2, 3)), (4, 2, (0, 2)), (4, [0, 1, 1, 0], (1, 2))],
)
def test_layers_with_experts_are_megatrons(layers: int, every: Any, moe_layers: tuple[int, ...]) -> None:
    args = Namespace(num_layers=layers, moe_layer_freq=every, moe_router_topk=2, num_experts=8)
    assert RouteShape.of(args) == RouteShape(layers, moe_layers, 2, 8)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.int16), (512, np.int16)])
def test_the_smallest_integer_holds_every_expert_and_none(experts: int, dtype: Any) -> None:
    shape = RouteShape(1, (0,), 1, experts)
    assert shape.dtype == dtype
    assert shape.read(np.array([[[experts - 1]], [[shape.absent]], [[-1]]]))[:, 0, 0].tolist() == [
        experts - 1,
        experts,
        experts,
    ]


def test_an_engines_text_is_read() -> None:
    read = SHAPE.read(told(routes(5))["routed_experts"])
    assert (read.dtype, read.tolist()) == (np.uint8, routes(5).tolist())
    assert SHAPE.read(torch.tensor(routes(5))).tolist() == routes(5).tolist()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("not base64!", "are not of 3 layers by 2 experts"),
        (base64.b64encode(b"\0" * 20).decode(), "are not of 3 layers by 2 experts"),
        (np.full((4, 3, 2), 9), "name expert 9, and there are 8"),
        (np.full((4, 3, 2), -2), "name expert -2, and there are 8"),
        (np.zeros((4, 2, 2), int), "an array of int64, shape (4, 2, 2)"),
        (np.zeros((4, 3, 2)), "an array of float64"),
        ([[1], [1, 2]], "are not of 3 layers"),
    ],
)
def test_what_is_no_route_is_refused(given: Any, why: str) -> None:
    with pytest.raises(RouteError, match=why.replace("(", r"\(").replace(")", r"\)")):
        SHAPE.read(given)


def test_what_is_trained_has_layers_with_experts_alone_and_none_of_the_last_token() -> None:
    trained = SHAPE.trained(routes(5), tokens=6)
    assert trained.tolist() == [*routes(5)[:, [0, 2]].tolist(), [[8, 8], [8, 8]]]
    assert (SHAPE.trained(None, tokens=4) == 8).all()
    partly = routes(5)
    partly[2, 0, 1] = -1
    assert SHAPE.trained(partly, 6)[2].tolist() == [[8, 8], routes(5)[2, 2].tolist()]


def _changed(row: int, layer: int, values: list[int]) -> np.ndarray:
    other = routes(5)
    other[row, layer] = values
    return other


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (routes(6), "of 6 tokens, and 5 that they can be of"),
        (_changed(3, 2, [4, 4]), "token 3 has expert 4 twice in layer 2"),
        (_changed(3, 1, [1, 0]), "of a layer without experts are not 0"),
    ],
)
def test_routes_that_cannot_have_been_are_refused(given: np.ndarray, why: str) -> None:
    with pytest.raises(RouteError, match=why):
        SHAPE.trained(given, tokens=6)


def test_replies_are_joined_where_they_begin() -> None:
    held = joined(None, told(routes(4)), SHAPE, tokens=5)
    assert joined(held, {}, SHAPE, tokens=9) is held
    more = joined(held, told(routes(4, first=4), start=4), SHAPE, tokens=9)
    assert more.tolist() == routes(8).tolist()
    # Some builds give all rows whatever was asked for.
    assert joined(held, told(routes(8), start=4), SHAPE, tokens=9).tolist() == routes(8).tolist()
    # A shorter beginning is shared: what is behind it counts no more.
    other = joined(held, told(routes(6, first=20), start=2), SHAPE, tokens=9)
    assert other.tolist() == [*routes(2).tolist(), *routes(6, first=20).tolist()]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (told(routes(3), start=4), "have 3 rows from token 4 on, of 9 tokens"),
        (told(routes(7)), "have 7 rows from token 0 on, of 9 tokens"),
        (told(routes(2), start=6), "begin at token 6, and those of 4 are known"),
    ],
)
def test_replies_that_do_not_fit_are_refused(reply: dict[str, Any], why: str) -> None:
    with pytest.raises(RouteError, match=why):
        joined(routes(4).astype(np.uint8), reply, SHAPE, tokens=9)


def test_a_request_asks_for_what_is_not_known() -> None:
    assert asked_for(Namespace(use_rollout_routing_replay=False), routes(4), 9) == {}
    assert asked_for(ARGS, None, 9) == {"return_routed_experts": True, "routed_experts_start_len": 0}
    assert asked_for(ARGS, routes(4), 9)["routed_experts_start_len"] == 4
    assert asked_for(ARGS, routes(4), 3)["routed_experts_start_len"] == 3


def test_a_router_passes_on_what_is_within_a_field_that_it_knows() -> None:
    payload = {"rid": "x", "return_routed_experts": True, "routed_experts_start_len": 3}
    sent = carried(payload | {"session_params": {"id": "s"}})
    inside = {"return_routed_experts": True, "routed_experts_start_len": 3}
    assert sent == {"rid": "x", "session_params": {"id": "s"} | inside}
    assert carried({"rid": "x"}) == {"rid": "x"}


def test_a_sample_gathers_routes_over_turns() -> None:
    sample = Sample(index=3, tokens=[1, 2])
    ours = {"log_probs": [-1.0] * 2, "tokens": [5, 6]}
    sample.append_response_tokens(ARGS, meta_info=told(routes(3)), **ours)
    sample.append_response_tokens(ARGS, tokens=[7], trainable=False)
    sample.append_response_tokens(ARGS, meta_info=told(routes(3, first=3), start=3), **ours)
    assert sample.rollout_routed_experts.tolist() == routes(6).tolist()
    assert Sample.from_dict(sample.to_dict()).rollout_routed_experts.tolist() == routes(6).tolist()
    with pytest.raises(ValueError, match="sample 3: routed_experts have 1 rows from token 6 on, of 9 tokens"):
        sample.append_response_tokens(ARGS, meta_info=told(routes(1), start=6), **ours)
    assert len(sample.tokens) == 7  # as it was
    sample.reset_response()
    assert sample.rollout_routed_experts is None
    # Nobody replays them: they are not even read.
    sample.append_response_tokens(Namespace(), meta_info={"routed_experts": "?"}, **ours)
    assert sample.rollout_routed_experts is None


def _batch(given: list[Any], **changes: Any) -> tuple[Namespace, list[Sample]]:
    args = make_args(use_rollout_routing_replay=True, disable_rewards_normalization=True, **MODEL, **changes)
    samples = [
        Sample(index=i, group_index=i, tokens=[1, 2, 3, 4], response_length=2, reward=1.0, rollout_log_probs=[-1.0] * 2)
        for i in range(len(given))
    ]
    for sample, own in zip(samples, given, strict=True):
        sample.rollout_routed_experts = own
    return args, samples


def test_routes_become_a_column() -> None:
    args, samples = _batch([routes(3), None, routes(2), routes(3)] * 2)
    column = to_columns(args, samples).columns["routed_experts"]
    assert isinstance(column, Ragged)
    assert (column.values.dtype, column.values.shape) == (np.uint8, (32, 2, 2))
    assert column[0].tolist() == [*routes(3)[:, [0, 2]].tolist(), [[8, 8], [8, 8]]]
    assert (column[1] == 8).all()
    batches, metrics = to_train_batches(args, samples, dp_size=1)
    assert metrics["rollout/routed_ratio"] == pytest.approx((3 + 0 + 2 + 3) / 12)
    taken: TrainBatch = batches[0]
    assert "routed_experts" in taken.columns


@pytest.mark.parametrize(("lacking", "passes"), [(0, True), (2, True), (3, False)])
def test_a_run_of_ci_ends_where_few_tokens_have_routes(lacking: int, passes: bool) -> None:
    """Of 24 tokens, 9 in 10."""
    args, samples = _batch([routes(2)] * lacking + [routes(3)] * (8 - lacking), ci_test=True)
    if passes:
        assert to_train_batches(args, samples, dp_size=1)[1]["rollout/routed_ratio"] >= 0.9
        return
    with pytest.raises(BadInputError, match=r"--ci-test: rollout/routed_ratio is 0\.875, not at least 0\.9"):
        to_train_batches(args, samples, dp_size=1)
    args.ci_test = False
    to_train_batches(args, samples, dp_size=1)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_users_function_may_set_them_by_itself(kind: Any) -> None:
    """As upstream's do, of the bytes that an engine tells."""
    own = kind(np.frombuffer(base64.b64decode(told(routes(3))["routed_experts"]), np.int32).reshape(3, 3, 2).copy())
    column = to_columns(*_batch([own] * 8)).columns["routed_experts"]
    assert column[0].tolist() == to_columns(*_batch([routes(3)] * 8)).columns["routed_experts"][0].tolist()


def test_samples_without_routes_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    to_columns(*_batch([routes(3)] * 8))
    assert not caplog.messages
    for _ in range(2):
        to_columns(*_batch([routes(3), None, *[routes(3)] * 6]))
    (said,) = caplog.messages
    assert "1 of 8 samples have no routes, first sample 1 " in said
    assert "asks for return_routed_experts" in said


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([None] * 8, "none of 8 samples has routes"),
        ([routes(3)] * 7 + [routes(4)], "sample 7 .*: there are routes of 4 tokens, and 3 that they can be of"),
    ],
)
def test_a_rollout_without_its_routes_is_refused(given: list[Any], why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        to_columns(*_batch(given))


def test_a_session_keeps_each_tokens_route_once() -> None:
    """Turns have those of the whole conversation; a fork has its own from where it begins."""
    trajectory = Trajectory()
    one = trajectory.add(TurnRecord([1, 2, 3], [4, 5], "stop", [-1.0] * 2, routes=routes(4)), None)
    two = trajectory.add(TurnRecord([1, 2, 3, 4, 5, 6], [7], "stop", [-1.0], routes=routes(6)), one)
    assert [len(node.turn.routes) for node in (one, two) if node.turn.routes is not None] == [4, 2]
    trajectory.add(TurnRecord([9, 9], [8], "stop", [-1.0], routes=routes(2, first=50)), None)
    first, other = trajectory.samples(Sample(index=1), 1.0)
    assert (first.tokens, first.rollout_routed_experts.tolist()) == ([1, 2, 3, 4, 5, 6, 7], routes(6).tolist())
    assert other.rollout_routed_experts.tolist() == routes(2, first=50).tolist()
    trajectory.add(TurnRecord([1, 2, 3, 4, 5, 6, 7, 8], [9], "stop", [-1.0]), two)
    known = trajectory.samples(Sample(index=1), 1.0)[1]  # of the last turn nothing is known
    assert (len(known.tokens), known.rollout_routed_experts.tolist()) == (9, routes(6).tolist())


RUNNERS = ("triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4")
RULED = {
    "use_routing_replay": True,
    "use_rollout_routing_replay": True,
    "num_experts": 8,
    "moe_router_fusion": False,
    "moe_expert_capacity_factor": None,
    "moe_router_load_balancing_type": "none",
    "moe_router_force_load_balancing": False,
    "moe_input_jitter_eps": None,
    "loss_type": "policy_loss",
    "keep_old_actor": False,
    "sglang_speculative_algorithm": None,
    "sglang_models": [],
    "sglang_cli": [],
    "sglang_moe_a2a_backend": "none",
    "sglang_moe_runner_backend": "auto",
}


def served(*words: str, prefills_apart: bool = False) -> dict[str, Any]:
    """A model whose second group has these words beside those of the command line."""
    common = ["--mem-fraction-static", "0.5"]
    groups = [Namespace(where=f"m: group {i}", sglang_cli=[*common, *own]) for i, own in enumerate([(), words])]
    model = Namespace(update_weights=True, prefills_apart=prefills_apart, where="m", groups=groups)
    return {"sglang_models": [model], "sglang_cli": common}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_experts": None}, "needs"),
        ({"moe_router_fusion": True}, "the fused router"),
        ({"moe_expert_capacity_factor": 1.5}, "drop one"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "drop one"),
        ({"loss_type": "sft_loss"}, "one pass alone"),
        ({"keep_old_actor": True, "use_rollout_routing_replay": False}, "several passes"),
        ({"sglang_speculative_algorithm": "EAGLE"}, "engines that draft"),
        ({"sglang_enable_hierarchical_cache": True}, "-hierarchical-cache do not .* the routes of others"),
        ({"sglang_enable_lmcache": True}, "--sglang-enable-lmcache do not .* the routes of others"),
        ({"sglang_enable_flexkv": True}, "--sglang-enable-flexkv do not .* the routes of others"),
        ({"sglang_radix_cache_backend": "flexkv"}, "--sglang-radix-cache-backend flexkv do not"),
        ({"sglang_enable_two_batch_overlap": True}, "each half of a batch"),
        ({"sglang_moe_a2a_backend": "mooncake"}, "--sglang-moe-a2a-backend mooncake do not"),
        ({"sglang_moe_a2a_backend": "deepep"}, None),
        *(({"sglang_moe_runner_backend": name}, f"{name} do not .* chooses experts by itself") for name in RUNNERS),
        ({"sglang_moe_runner_backend": "triton"}, None),
        (served(prefills_apart=True), "m: prefill and decode"),
        (served("--enable-hierarchical-cache", "--page-size", "64"), "m: group 1: .*hierarchical-cache do not"),
        (served("--speculative-algorithm", "EAGLE"), "m: group 1: .*engines that draft"),
        (served("--moe-runner-backend", "triton_kernel"), "m: group 1: .* triton_kernel do not"),
        (served("--moe-a2a-backend", "mori"), "m: group 1: .*mori do not"),
        (served("--page-size", "64"), None),
        ({"keep_old_actor": True}, None),
        ({}, None),
    ],
)
def test_what_replay_would_miss_is_refused(changes: dict[str, Any], why: str | None) -> None:
    args = Namespace(**RULED | changes)
    if why is None:
        check_routing(args)
        return
    with pytest.raises(OptionError, match=why):
        check_routing(args)
