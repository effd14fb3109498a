"""slime.batching: packing, dealing and their costs by example; `test_schedule_properties` has what holds for all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slime.batching.flops import DecoderShape, LatentShape, forward_flops
from slime.batching.packing import pack_by_cost, pack_by_tokens
from slime.batching.schedule import ScheduledStep, build_schedule, deal_by_cost, train_batches
from slime.data import Ragged, TrainBatch
from tests.releases import PROVEN
from tools.bench_schedule import QWEN3_8B, skewed_lengths

NUM_GPUS = 0


def skewed(rows: int, sigma: float = 1.0) -> np.ndarray:
    """Log-normal lengths up to 16,384, as rollouts have them."""
    return skewed_lengths(rows, 2000, sigma, 16384, seed=int(np.random.default_rng().integers(2**31)))


def work_of_ranks(schedule: list[ScheduledStep], costs: np.ndarray) -> np.ndarray:
    """[ranks, micro-batches] of the first step."""
    return np.array([[costs[rows].sum() for rows in rank] for rank in schedule[0].micro_batches])


def test_static_micro_batches_are_consecutive_rows_dealt_in_turn() -> None:
    schedule = build_schedule(
        np.full(8, 5), np.arange(8), np.full(8, 3), dp_size=2, global_batch_size=8, micro_batch_size=2
    )
    assert [[m.tolist() for m in rank] for rank in schedule[0].micro_batches] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert schedule[0].num_tokens == 24
    assert schedule[0].num_trained_rollouts == 8


def test_the_largest_micro_batch_is_split_to_fill_the_ranks() -> None:
    lengths = np.array([1, 1, 9, 3, 6, 1])
    schedule = build_schedule(lengths, np.arange(6), lengths, dp_size=4, global_batch_size=6, micro_batch_size=2)
    assert [[m.tolist() for m in rank] for rank in schedule[0].micro_batches] == [[[0, 1]], [[2]], [[3]], [[4, 5]]]


def test_an_oversize_row_is_alone() -> None:
    packed = pack_by_tokens(np.array([100, 3, 7, 5, 5]), np.arange(5), 10)
    assert [bin_.tolist() for bin_ in packed] == [[0], [1, 2], [3, 4]]


def test_packing_is_within_its_bound_of_the_optimum() -> None:
    rng = np.random.default_rng()
    pieces: list[int] = []
    for _ in range(200):  # 200 full bins cut up: the optimum is known
        cuts = np.unique(rng.integers(1, 1000, size=rng.integers(0, 6)))
        pieces += np.diff(np.concatenate([[0], cuts, [1000]])).tolist()
    lengths = rng.permutation(np.array(pieces))
    assert len(pack_by_tokens(lengths, np.arange(len(lengths)), 1000)) <= 200 * 11 / 9 + 1


def test_balancing_evens_out_the_work_of_ranks() -> None:
    lengths = skewed(512)
    costs = forward_flops(lengths, QWEN3_8B)

    def imbalance(row_costs: np.ndarray | None) -> float:
        schedule = build_schedule(
            lengths, np.arange(512), lengths, dp_size=8, global_batch_size=512, max_tokens=16384, row_costs=row_costs
        )
        loads = work_of_ranks(schedule, costs).sum(axis=1)
        return float(loads.max() / loads.mean())

    assert imbalance(costs) < 1.005
    assert imbalance(costs) <= imbalance(None)


def test_the_work_of_a_rank_lies_costliest_first() -> None:
    costs = np.random.default_rng().random(48)
    assert (np.diff(costs[deal_by_cost(costs, 6)], axis=1) <= 0).all()


def test_exchanges_find_what_rounds_of_the_costliest_miss() -> None:
    costs = np.array([9.0, 5.0, 5.0, 4.0, 3.0, 2.0])  # in rounds of two: 9 + 4 + 2 and 5 + 5 + 3
    assert sorted(costs[deal_by_cost(costs, 2)].sum(axis=1)) == [14.0, 14.0]


def test_a_good_deal_in_turn_is_kept() -> None:
    costs = np.array([2.0, 8, 3, 1, 2, 3, 9, 2, 6])  # rounds of the costliest and exchanges would stay at 13
    assert costs[deal_by_cost(costs, 3)].sum(axis=1).tolist() == [12.0, 12.0, 12.0]


def test_rows_longer_than_the_cap_do_not_keep_the_others_from_balance() -> None:
    lengths = np.array([50, 6, 6, 40, 2, 2])
    packed = pack_by_cost(lengths, lengths.astype(np.float64) ** 2, np.arange(6), 10, 4, 1)
    assert packed is not None
    assert sorted(m.tolist() for m in packed) == [[0], [1, 4], [2, 5], [3]]


@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_balancing_micro_batches_evens_out_their_work(sigma: float) -> None:
    lengths = skewed(1024, sigma)
    costs = forward_flops(lengths, QWEN3_8B)

    def work(balance: bool) -> np.ndarray:
        schedule = build_schedule(
            lengths,
            np.arange(1024),
            lengths,
            dp_size=8,
            global_batch_size=1024,
            max_tokens=32768,
            row_costs=costs,
            balance_micro_batches=balance,
        )
        assert max(lengths[rows].sum() for rank in schedule[0].micro_batches for rows in rank) <= 32768
        return work_of_ranks(schedule, costs)

    plain, even = work(False), work(True)
    assert even.std() / even.mean() < 0.5 * plain.std() / plain.mean()
    assert even.max(axis=0).sum() < plain.max(axis=0).sum()  # what lockstep over ranks takes
    assert even.sum(axis=1).max() < 1.01 * even.sum(axis=1).mean()


@pytest.mark.parametrize(
    ("longer_than_the_cap", "dp_size", "expected"),
    [
        (0, 2, [[0], [1], [2], [3, 4]]),  # one more a rank
        (2, 4, [[0], [1], [2, 4], [3, 5, 6]]),  # 7 rows do not make 8: as without balancing
    ],
)
def test_where_balanced_rows_find_no_room_there_are_more_micro_batches(
    longer_than_the_cap: int, dp_size: int, expected: list[list[int]]
) -> None:
    # Into two of 10 go only 6 + 4 and 5 + 3 + 2, but 4 goes to the cheaper 5, 3 to 6, and 2 is left.
    lengths = np.array([20] * longer_than_the_cap + [6, 5, 4, 3, 2])
    rows = len(lengths)
    schedule = build_schedule(
        lengths,
        np.arange(rows),
        lengths,
        dp_size=dp_size,
        global_batch_size=rows,
        max_tokens=10,
        row_costs=lengths.astype(np.float64),
        balance_micro_batches=True,
    )
    assert sorted(m.tolist() for rank in schedule[0].micro_batches for m in rank) == expected


def test_rollouts_that_do_not_divide_into_steps_are_an_error_not_dropped() -> None:
    with pytest.raises(
        ValueError, match=r"10 rollouts cannot be cut into optimizer steps of 4 \(2 would be left over\)"
    ):
        build_schedule(np.ones(10), np.arange(10), np.ones(10), dp_size=1, global_batch_size=4, micro_batch_size=1)


@pytest.mark.parametrize(("rows", "dp_size", "needed"), [(3, 4, 4), (5, 4, 8)])
def test_too_few_rows_for_the_ranks_says_what_to_change(rows: int, dp_size: int, needed: int) -> None:
    ones = np.ones(rows, dtype=np.int64)
    message = f"step 0 has {rows} rows .* too few for the {needed} micro-batches .* raise --global-batch-size"
    with pytest.raises(ValueError, match=message):
        build_schedule(ones, np.arange(rows), ones, dp_size=dp_size, global_batch_size=rows, micro_batch_size=1)


def test_one_way_of_packing_has_to_be_chosen() -> None:
    ones = np.ones(4, dtype=np.int64)
    with pytest.raises(ValueError, match="micro_batch_size=1 and max_tokens=5"):
        build_schedule(ones, ones, ones, dp_size=1, global_batch_size=1, micro_batch_size=1, max_tokens=5)


WRONG = {
    "max_tokens is 0": {"max_tokens": 0},
    "micro_batch_size is -1": {"max_tokens": None, "micro_batch_size": -1},
    "dp_size is 0": {"dp_size": 0},
    "global_batch_size is 0": {"global_batch_size": 0},
    "micro_batch_multiple is 0": {"micro_batch_multiple": 0},
    "got shapes": {"mask_sums": np.ones(3)},
    "row 2 has 0 tokens": {"lengths": np.array([1, 2, 0, 3])},
    "row 1 costs nan": {"row_costs": np.array([1, np.nan, 1, 1])},
    "row 3 costs 0.0": {"row_costs": np.array([1.0, 1.0, 1.0, 0.0])},
    "balance_micro_batches needs max_tokens": {"balance_micro_batches": True},
    "0 rollouts cannot be cut": {name: np.empty(0) for name in ("lengths", "rollouts", "mask_sums")},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_an_error(message: str) -> None:
    right: dict[str, Any] = {
        "lengths": np.ones(4),
        "rollouts": np.arange(4),
        "mask_sums": np.ones(4),
        "dp_size": 2,
        "global_batch_size": 4,
        "max_tokens": 5,
    }
    with pytest.raises(ValueError, match=message):
        build_schedule(**(right | WRONG[message]))


MODES: dict[str, dict[str, Any]] = {
    "static": {"micro_batch_size": 4},
    "static, ranks balanced": {"micro_batch_size": 4, "row_costs": ...},
    "dynamic": {"max_tokens": 16384},
    "dynamic, ranks balanced": {"max_tokens": 16384, "row_costs": ...},
    "dynamic, micro-batches balanced": {"max_tokens": 16384, "row_costs": ..., "balance_micro_batches": True},
    "the same where too many rows are long": {"max_tokens": 4096, "row_costs": ..., "balance_micro_batches": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_thousand_rows_take_no_more_than_seconds(mode: str) -> None:
    lengths, options = skewed(100_000), dict(MODES[mode])
    start = time.process_time()
    if "row_costs" in options:
        options["row_costs"] = forward_flops(lengths, QWEN3_8B)
    build_schedule(lengths, np.arange(100_000), lengths, dp_size=64, global_batch_size=100_000, **options)
    assert time.process_time() - start < 10.0


TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
TINY_SHAPE = DecoderShape(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=56,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=101,
)
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
LATENT_SIZES: dict[str, Any] = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8}
LATENT_SIZES |= {"v_head_dim": 10}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 3, "pad_token_id": 0}
MOE_SHAPE = replace(TINY_SHAPE, num_moe_layers=2, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=24)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("Qwen3", {"head_dim": 12}, replace(TINY_SHAPE, kv_channels=12)),
        ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}, replace(TINY_SHAPE, kv_channels=12)),
        ("Llama", {"num_key_value_heads": 4}, replace(TINY_SHAPE, num_query_groups=4)),
        ("Qwen3Moe", EXPERTS | {"head_dim": 12}, replace(MOE_SHAPE, kv_channels=12)),
        (
            "Qwen2Moe",
            EXPERTS | {"shared_expert_intermediate_size": 40},
            replace(MOE_SHAPE, moe_shared_expert_intermediate_size=40),
        ),
        ("DeepseekV3", LATENT, replace(TINY_SHAPE, latent=LatentShape(**LATENT_SIZES))),
        (
            "DeepseekV3",
            LATENT | {"q_lora_rank": None},
            replace(TINY_SHAPE, latent=LatentShape(**LATENT_SIZES | {"q_lora_rank": None})),
        ),
    ],
)
def test_flops_are_those_that_a_forward_pass_is_counted_to_take(
    name: str, options: dict[str, Any], shape: DecoderShape
) -> None:
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(transformers, f"{name}Config")(**(TINY | options))
    # The counter sees no operations in grouped products of experts, so each expert is to be a product of its own.
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    assert model.config._attn_implementation == "eager"
    for n in (1, 2, int(np.random.default_rng().integers(3, 40))):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.randint(0, 101, (1, n)), use_cache=False)
        counted = counter.get_total_flops()
        # Eager attention computes all n * n pairs and masks the n * (n - 1) / 2 that look ahead: 2 products x 2 each.
        latent = shape.latent
        turned = latent.qk_pos_emb_head_dim if latent else shape.kv_channels
        widths = latent.qk_head_dim + turned + latent.v_head_dim if latent else 2 * turned
        counted -= shape.num_layers * 2 * shape.num_attention_heads * widths * n * (n - 1) // 2
        # Before transformers 5.19 position angles were written as a product, [rotated width / 2, 1] x [1, n].
        counted -= turned * n if PROVEN else 0
        # This model scales its shared expert by a number that it computes from each token, [n, hidden] x [hidden, 1].
        counted -= shape.num_moe_layers * 2 * n * shape.hidden_size if shape.moe_shared_expert_intermediate_size else 0
        assert forward_flops(np.array([n]), shape)[0] == counted


def test_flops_of_rows_do_not_overflow_and_keep_the_order_of_lengths() -> None:
    flops = forward_flops(np.array([1, 1000, 1 << 20], dtype=np.int32), QWEN3_8B)
    assert flops.dtype == np.float64
    assert (np.diff(flops) > 0).all()
    assert flops[1] == pytest.approx(1000 * 2 * 7.57e9, rel=0.02)  # 2 a matrix parameter and token, little attention


def test_each_rank_gets_its_rows_and_indices_into_them() -> None:
    rng = np.random.default_rng()
    rows = 24
    tokens = Ragged.from_rows([np.full(rng.integers(2, 9), i) for i in range(rows)], np.int32)
    number = np.arange(rows)
    columns = TrainBatch({}).changed(
        tokens=tokens,
        loss_mask=Ragged.from_rows([np.ones(n - 1) for n in tokens.lengths], np.uint8),
        rewards=number.astype(np.float32),
        raw_rewards=number.astype(np.float32),
        rollout_ids=number // 2,
        rollout_mask_sums=number,
        group_indices=number,
        sample_indices=number,
        truncated=number % 2 == 0,
    )
    schedule = build_schedule(
        tokens.lengths, columns.rollout_ids, tokens.lengths - 1, dp_size=3, global_batch_size=6, max_tokens=16
    )
    batches = train_batches(columns, schedule)
    assert len(batches) == 3
    for rank, batch in enumerate(batches):
        assert len(batch.steps) == 2
        assert batch.rollout_log_probs is None
        used = [rows for step in batch.steps for rows in step.micro_batches]
        assert np.concatenate(used).tolist() == list(range(len(batch)))
        for step, scheduled in zip(batch.steps, schedule, strict=True):
            assert (step.num_rollouts, step.num_tokens) == (scheduled.num_rollouts, scheduled.num_tokens)
            assert step.num_trained_rollouts == scheduled.num_trained_rollouts
            for own, whole in zip(step.micro_batches, scheduled.micro_batches[rank], strict=True):
                assert batch.sample_indices[own].tolist() == whole.tolist()
                assert [int(batch.tokens[i][0]) for i in own] == whole.tolist()
                assert [len(batch.loss_mask[i]) for i in own] == [len(columns.loss_mask[i]) for i in whole]
                assert batch.truncated[own].tolist() == columns.truncated[whole].tolist()
    assert sorted(np.concatenate([b.sample_indices for b in batches]).tolist()) == list(range(rows))
