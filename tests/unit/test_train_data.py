"""rollout.batches.train_data: samples to per-rank batches, reward post-processing, metrics and every input error."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import Sample, Status
from slime.rollout.batches.train_data import to_columns, to_train_batches
from tests.algorithm_options import algorithm_options

NUM_GPUS = 0


def make_args(**changes: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "reward_key": None,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_virtual_pipeline_stage": None,
        "balance_data": False,
        "balance_by_flops": False,
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "multi_latent_attention": False,
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "vocab_size": 300,
    }
    return algorithm_options(**{**defaults, **changes})


def make_samples(groups: int = 4, per_group: int = 4, seed: int | None = None) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(groups * per_group):
        prompt, response = rng.integers(1, 8, size=2).tolist()
        samples.append(
            Sample(
                group_index=i // per_group,
                index=i,
                rollout_id=i,
                tokens=rng.integers(0, 300, size=prompt + response).tolist(),
                response_length=response,
                reward=float(rng.normal()),
                rollout_log_probs=rng.normal(size=response).tolist(),
                status=Status.TRUNCATED if rng.random() < 0.3 else Status.COMPLETED,
            )
        )
    return samples


def test_columns_hold_what_the_samples_hold() -> None:
    samples = make_samples()
    samples[2].loss_mask = [0] * (samples[2].response_length - 1) + [1]
    samples[3].remove_sample = True
    columns = to_columns(make_args(), samples)
    assert len(columns) == len(samples)
    for i, sample in enumerate(samples):
        assert columns.tokens[i].tolist() == sample.tokens
        want = [0] * sample.response_length if i == 3 else sample.loss_mask or [1] * sample.response_length
        assert columns.loss_mask[i].tolist() == want
        assert columns.rollout_mask_sums[i] == sum(want)
        assert columns.rollout_log_probs is not None
        np.testing.assert_allclose(columns.rollout_log_probs[i], sample.rollout_log_probs or [], rtol=1e-6)
        assert columns.raw_rewards[i] == pytest.approx(sample.reward)
        assert bool(columns.truncated[i]) == (sample.status is Status.TRUNCATED)
    assert columns.tokens.values.dtype == np.int32
    assert columns.loss_mask.values.dtype == np.uint8
    assert columns.rewards.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "mean", "std"),
    [
        ({}, True, True),
        ({"disable_grpo_std_normalization": True}, True, False),
        ({"disable_rewards_normalization": True}, False, False),
    ],
)
def test_which_rewards_are_normalised(changes: dict[str, Any], mean: bool, std: bool) -> None:
    samples = make_samples()
    columns = to_columns(make_args(**changes), samples)
    raw = np.array([s.reward for s in samples], dtype=np.float64).reshape(4, 4)
    want = raw - raw.mean(1, keepdims=True) if mean else raw
    want = want / (raw.std(1, ddof=1, keepdims=True) + 1e-6) if std else want
    np.testing.assert_allclose(columns.rewards, want.ravel(), rtol=1e-5)
    np.testing.assert_allclose(columns.raw_rewards, raw.ravel(), rtol=1e-6)


def uneven_groups() -> list[Sample]:
    """Interleaved groups of 5, 3, 2 and a single sample; one rollout of the first is cut in two."""
    groups = [0, 1, 0, 2, 0, 1, 3, 0, 2, 1, 0, 0]
    samples = make_samples(groups=3, per_group=4)
    for sample, group in zip(samples, groups, strict=True):
        sample.group_index = group
    samples[11].rollout_id = samples[10].rollout_id
    return samples


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_rewards_of_uneven_groups(estimator: str) -> None:
    """GRPO (arXiv:2402.03300, 4.1.2), RLOO (arXiv:2402.14740, eq. 8), REINFORCE++-baseline (arXiv:2501.03262)."""
    samples = uneven_groups()
    whitened = estimator == "reinforce_plus_plus_baseline"
    columns = to_columns(make_args(advantage_estimator=estimator, normalize_advantages=whitened), samples)
    reward_of: dict[int, dict[int, float]] = {}  # group -> rollout -> mean over its samples
    square_of: dict[int, dict[int, float]] = {}  # likewise of their squares
    for sample in samples:
        assert sample.group_index is not None
        assert sample.rollout_id is not None
        parts = [float(s.reward or 0.0) for s in samples if s.rollout_id == sample.rollout_id]  # type: ignore[arg-type]
        reward_of.setdefault(sample.group_index, {})[sample.rollout_id] = sum(parts) / len(parts)
        squares = sum(part * part for part in parts) / len(parts)
        square_of.setdefault(sample.group_index, {})[sample.rollout_id] = squares
    for i, sample in enumerate(samples):
        of_group = reward_of[sample.group_index or 0]
        reward = float(sample.reward or 0.0)  # type: ignore[arg-type]
        others = [r for rollout, r in of_group.items() if rollout != sample.rollout_id]
        values = list(of_group.values())
        mean = sum(values) / len(values)
        if len(values) == 1:
            want = reward
        elif estimator == "rloo":
            want = reward - sum(others) / len(others)
        elif whitened:
            want = reward - mean
        else:
            squares = square_of[sample.group_index or 0].values()
            std = ((sum(squares) - len(values) * mean * mean) / (len(values) - 1)) ** 0.5
            want = (reward - mean) / (std + 1e-6)
        assert columns.rewards[i] == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert columns.raw_rewards[i] == pytest.approx(reward)


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_estimators_without_a_group_take_rewards_as_they_are(estimator: str) -> None:
    samples = make_samples()
    for sample in samples:
        sample.group_index = None
    options = {"advantage_estimator": estimator, "normalize_advantages": True, "n_samples_per_prompt": 1}
    columns = to_columns(make_args(**options), samples)
    np.testing.assert_array_equal(columns.rewards, columns.raw_rewards)
    assert columns.rewards.tolist() == pytest.approx([s.reward for s in samples], rel=1e-6)


def test_normalisation_follows_the_group_and_not_the_order() -> None:
    samples = make_samples()
    ordered = to_columns(make_args(), samples).rewards
    order = np.random.default_rng().permutation(len(samples))
    np.testing.assert_allclose(to_columns(make_args(), [samples[i] for i in order]).rewards, ordered[order], rtol=1e-6)


def test_removed_samples_still_count_in_the_normalisation() -> None:
    samples = make_samples()
    before = to_columns(make_args(), samples).rewards
    samples[5].remove_sample = True
    np.testing.assert_array_equal(to_columns(make_args(), samples).rewards, before)


def test_a_rollout_cut_into_samples_is_one_rollout() -> None:
    samples = make_samples()
    parts = [Sample.from_dict(samples[0].to_dict()) for _ in range(3)]
    cut = [parts[0], *samples[1:], *parts[1:]]
    args = make_args(global_batch_size=16, micro_batch_size=3)
    batches, metrics = to_train_batches(args, cut, dp_size=2)
    whole, plain_metrics = to_train_batches(args, samples, dp_size=2)
    assert sum(len(b) for b in batches) == 18
    assert [step.num_rollouts for b in batches for step in b.steps] == [16, 16]
    for batch in batches:
        rows = np.flatnonzero(batch.rollout_ids == 0)
        assert (batch.rollout_mask_sums[rows] == 3 * samples[0].response_length).all()
    assert metrics["rollout/num_rollouts"] == 16
    for key in ("rollout/raw_reward", "rollout/rewards"):
        assert metrics[key] == pytest.approx(plain_metrics[key], abs=1e-6)
    reward = {int(i): float(r) for b in whole for i, r in zip(b.rollout_ids, b.rewards, strict=True)}
    for batch in batches:
        for i, r in zip(batch.rollout_ids, batch.rewards, strict=True):
            assert r == pytest.approx(reward[int(i)], rel=1e-5)


def test_samples_without_rollout_id_are_rollouts_of_their_own() -> None:
    samples = make_samples()
    for sample in samples[::2]:
        sample.rollout_id = None
    assert len(set(to_columns(make_args(), samples).rollout_ids.tolist())) == len(samples)


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_rank_gets_as_many_micro_batches_of_every_step(dynamic: bool) -> None:
    samples = make_samples(groups=16)
    args = make_args(
        global_batch_size=32,
        use_dynamic_batch_size=dynamic,
        max_tokens_per_gpu=16,
        context_parallel_size=2,
        balance_data=dynamic,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    batches, _ = to_train_batches(args, samples, dp_size=4)
    assert sorted(i for b in batches for i in b.sample_indices.tolist()) == list(range(64))
    for step in range(2):
        counts = {len(b.steps[step].micro_batches) for b in batches}
        assert len(counts) == 1
        assert counts.pop() % 2 == 0
        in_step = [i for b in batches for rows in b.steps[step].micro_batches for i in b.sample_indices[rows].tolist()]
        assert sorted(in_step) == list(range(32 * step, 32 * step + 32))
        assert batches[0].steps[step].num_tokens == sum(samples[i].response_length for i in in_step)
        for rows in (rows for b in batches for rows in b.steps[step].micro_batches):
            assert len(rows) <= 2 or dynamic
    for batch in batches:
        assert batch.tokens.lengths.max() <= 32
        assert all(batch.tokens.lengths[rows].sum() <= 32 for step in batch.steps for rows in step.micro_batches)


def test_metrics() -> None:
    samples = make_samples(groups=3, per_group=2)
    for sample, reward in zip(samples, [1.0, 1.0, 0.0, 0.0, 1.0, 0.0], strict=True):
        sample.reward = reward
    samples[0].loss_mask = [1] + [0] * (samples[0].response_length - 1)
    samples[4].loss_mask, samples[5].remove_sample = [0] * samples[4].response_length, True  # in no length
    _, metrics = to_train_batches(make_args(global_batch_size=6), samples, dp_size=1)
    lengths = [1] + [s.response_length for s in samples[1:4] + samples[6:]]
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/rewards"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rollout/zero_std/count_0"] == 1
    assert metrics["rollout/zero_std/count_1"] == 1
    assert metrics["rollout/response_len/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["rollout/response_len/median"] == np.median(lengths)
    assert (metrics["rollout/response_len/min"], metrics["rollout/response_len/max"]) == (min(lengths), max(lengths))
    assert metrics["rollout/truncated_ratio"] == np.mean([s.status is Status.TRUNCATED for s in samples])


@pytest.mark.parametrize("of_parts", [(0.0, 1.0), (1.0, 1.0)])
def test_the_raw_reward_of_parts_is_that_of_the_last(of_parts: tuple[float, float]) -> None:
    samples = make_samples(groups=1, per_group=4)
    samples[1].rollout_id, samples[3].rollout_id = samples[0].rollout_id, samples[2].rollout_id
    for sample, reward in zip(samples, [*of_parts, 0.0, 0.0], strict=True):
        sample.reward = reward
    _, metrics = to_train_batches(make_args(global_batch_size=2), samples, dp_size=1)
    assert metrics["rollout/raw_reward"] == 0.5
    assert not any("zero_std" in name for name in metrics)


def test_sft_needs_neither_rewards_nor_groups_nor_log_probs() -> None:
    samples = make_samples()
    for sample in samples:
        sample.reward, sample.group_index, sample.rollout_log_probs = None, None, None
    batches, metrics = to_train_batches(make_args(loss_type="sft_loss"), samples, dp_size=2)
    assert all(b.rollout_log_probs is None and (b.rewards == 0).all() for b in batches)
    assert "rollout/raw_reward" not in metrics  # an SFT step has no reward to print


def test_post_processing_hook_replaces_the_normalisation(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def process(args, samples):\n    return [s.reward for s in samples], [2 * s.reward for s in samples]\n"
        "def short(args, samples):\n    return [1.0], [1.0]\n"
    )
    samples = make_samples()
    columns = to_columns(make_args(custom_reward_post_process_path=f"{hook}:process"), samples)
    np.testing.assert_allclose(columns.rewards, 2 * columns.raw_rewards, rtol=1e-6)
    with pytest.raises(ValueError, match="--custom-reward-post-process-path: 1 values for 16 samples"):
        to_columns(make_args(custom_reward_post_process_path=f"{hook}:short"), samples)
    with pytest.raises(ValueError, match=r"--custom-reward-post-process-path .*proces'"):
        to_columns(make_args(custom_reward_post_process_path=f"{hook}:proces"), samples)


def test_reward_key_picks_from_a_dict() -> None:
    samples = make_samples()
    for i, sample in enumerate(samples):
        sample.reward = {"score": float(i), "other": 0.0}
    columns = to_columns(make_args(reward_key="score", disable_rewards_normalization=True), samples)
    assert columns.rewards.tolist() == list(range(16))
    with pytest.raises(ValueError, match="sample 0: the reward is a dict with keys"):
        to_columns(make_args(), samples)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", [1], "sample 6: response_length"),
        ("loss_mask", [1] * 99, "sample 6: loss_mask has 99 entries"),
        ("rollout_log_probs", None, r"sample 6 .*: no rollout_log_probs, but other samples have them \(1 of 16"),
        ("reward", None, "sample 6 .* has no reward"),
        ("reward", float("nan"), "sample 6 .*: the reward is nan"),
        ("group_index", None, "sample 6 .* needs a group_index"),
    ],
)
def test_a_bad_sample_is_named(field: str, value: Any, message: str) -> None:
    samples = make_samples(seed=1)
    samples[6].response_length = max(samples[6].response_length, 1)
    setattr(samples[6], field, value)
    if field == "tokens":
        samples[6].response_length, samples[6].rollout_log_probs = 2, [0.0, 0.0]
    with pytest.raises(ValueError, match=message):
        to_columns(make_args(), samples)


def test_values_that_cannot_be_trained_on_are_named() -> None:
    def broken(**changes: Any) -> list[Sample]:
        samples = make_samples()
        for name, value in changes.items():
            setattr(samples[9], name, value)
        return samples

    with pytest.raises(ValueError, match=r"sample 9 \(position 9, group 2, status aborted\): empty response"):
        to_columns(make_args(), broken(tokens=[1, 2], response_length=0, rollout_log_probs=[], status=Status.ABORTED))
    with pytest.raises(ValueError, match=r"sample 9 .*: 2 tokens, all of them response"):
        to_columns(make_args(), broken(tokens=[1, 2], response_length=2, rollout_log_probs=[0.0, 0.0]))
    with pytest.raises(ValueError, match=r"sample 9 .*: token id 300 is outside the model's vocabulary of 300"):
        to_columns(make_args(), broken(tokens=[1, 300], response_length=1, rollout_log_probs=[0.0]))
    with pytest.raises(ValueError, match=r"sample 9 .*: the rollout_log_prob of response token 0 is -inf, which is t"):
        to_columns(make_args(), broken(tokens=[1, 2], response_length=1, rollout_log_probs=[float("-inf")]))
    masked = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 0]}
    for value in (float("nan"), None):
        with pytest.raises(ValueError, match=r"of response token 1 is nan, which is masked: give it 0\.0"):
            to_columns(make_args(), broken(**masked, rollout_log_probs=[0.0, value]))
    with pytest.raises(ValueError, match=r"sample 9: loss_mask must be of 0 and 1, got \[2\]"):
        to_columns(make_args(), broken(tokens=[1, 2], response_length=1, rollout_log_probs=[0.0], loss_mask=[2]))
    with pytest.raises(ValueError, match="returned no samples"):
        to_columns(make_args(), [])


def make_removed() -> list[Sample]:
    samples = make_samples()
    for sample in samples:
        sample.remove_sample, sample.rollout_log_probs = True, None
    return samples


def test_samples_that_are_not_trained_need_no_log_probs() -> None:
    samples = make_samples()
    masked, removed, lacking = samples[:3]
    for sample in (masked, removed):
        sample.rollout_log_probs = None
    masked.loss_mask, removed.remove_sample = [0] * masked.response_length, True
    log_probs = to_columns(make_args(use_tis=True), samples).rollout_log_probs
    assert log_probs is not None
    assert not log_probs[0].any()
    assert not log_probs[1].any()
    np.testing.assert_allclose(log_probs[2], np.asarray(lacking.rollout_log_probs, dtype=np.float32))
    nothing = to_columns(make_args(use_tis=True), make_removed()).rollout_log_probs
    assert nothing is not None
    assert not nothing.values.any()
    lacking.rollout_log_probs = None
    for name in ("use_rollout_logprobs", "true_on_policy_mode"):
        with pytest.raises(ValueError, match=f"no rollout_log_probs, which --{name.replace('_', '-')} needs"):
            to_columns(make_args(**{name: True}), [*make_removed(), lacking])
    with pytest.raises(ValueError, match=r"\(position 2, .*: no rollout_log_probs, which --use-tis needs"):
        to_columns(make_args(use_tis=True), samples)


def test_log_probs_may_be_missing_from_every_sample() -> None:
    samples = make_samples()
    for sample in samples:
        sample.rollout_log_probs = None
    assert to_columns(make_args(), samples).rollout_log_probs is None


def test_versions_of_tokens_are_those_of_their_segments() -> None:
    samples = make_samples(1, 4)
    whole, with_tool, masked, by_hand = samples
    for sample in samples:
        sample.reset_response()
        sample.tokens = [1]

    def say(sample: Sample, version: int | None, count: int) -> None:
        meta = None if version is None else {"weight_version": version, "finish_reason": {"type": "stop"}}
        trainable = version is not None or sample is by_hand
        log_probs = [-1.0] * count if trainable else None
        sample.append_response_tokens(tokens=[2] * count, log_probs=log_probs, trainable=trainable, meta_info=meta)

    for sample, turns in (
        (whole, [(3, 2), (4, 3)]),
        (with_tool, [(3, 2), (None, 2), (4, 1)]),
        (masked, [(3, 2), (None, 1), (4, 2)]),
        (by_hand, [(3, 3), (None, 2)]),
    ):
        for version, count in turns:
            say(sample, version, count)
        sample.reward = 1.0
    masked.loss_mask = [0, 0, 0, 1, 1]  # as --mask-offpolicy-in-partial-rollout makes it
    args = make_args(keep_old_actor=True, disable_rewards_normalization=True)
    versions = to_columns(args, [whole, with_tool, masked]).weight_versions
    assert versions is not None
    assert [versions[i].tolist() for i in range(3)] == [[3, 3, 4, 4, 4], [3, 3, -1, -1, 4], [3, 3, -1, 4, 4]]
    assert to_columns(make_args(), [whole]).weight_versions is None
    with pytest.raises(ValueError, match=r"--keep-old-actor needs .* 2 of 5 have none; a generate function notes"):
        to_columns(args, [by_hand])


@pytest.mark.parametrize(("rm_reward", "key"), [(1.0, None), ({"score": 1.0, "acc": True}, "score")])
def test_long_responses_lose_some_of_their_reward(rm_reward: Any, key: str | None) -> None:
    """DAPO's example at a tenth of its length in the paper's terms: no loss up to 12 tokens, all of it from 16 on."""
    lengths = (1, 12, 13, 14, 15, 16, 17)
    samples = [
        Sample(
            group_index=0,
            index=i,
            rollout_id=i,
            tokens=[1] * (length + 1),
            response_length=length,
            reward=rm_reward,
            rollout_log_probs=[0.0] * length,
            status=Status.COMPLETED,
        )
        for i, length in enumerate(lengths)
    ]
    changes = {"reward_key": key, "rollout_max_response_len": 16, "overlong_buffer_len": 4, "global_batch_size": 7}
    plain = make_args(**changes, micro_batch_size=1, disable_rewards_normalization=True, overlong_penalty_factor=2.0)
    batches, metrics = to_train_batches(plain, samples, dp_size=1)
    assert batches[0].rewards.tolist() == [1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0]
    assert batches[0].raw_rewards.tolist() == [1.0] * 7
    assert metrics["rollout/overlong_penalty"] == pytest.approx(-(0.5 + 1.0 + 1.5 + 2.0 + 2.0) / 7)
    assert metrics["rollout/raw_reward"] == 1.0
    assert [sample.reward for sample in samples] == [rm_reward] * 7, "a second conversion starts from the same rewards"
    compared = to_columns(make_args(**changes, disable_grpo_std_normalization=True), samples)
    assert compared.rewards.tolist() == pytest.approx([2 / 4 + x for x in (0, 0, -1 / 4, -2 / 4, -3 / 4, -1, -1)])
    unshaped = make_args(**changes | {"overlong_buffer_len": None}, micro_batch_size=1)
    batches, metrics = to_train_batches(unshaped, samples, dp_size=1)
    assert not batches[0].rewards.any()
    assert "rollout/overlong_penalty" not in metrics
