"""Data sources: order, epochs, identities, buffer, and resuming from a state."""

from __future__ import annotations

import pickle
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import DataSource, Group, RolloutDataSource, RolloutDataSourceWithBuffer, Sample, Status
from slime.data.rows.dataset import load_prompts, train_prompt_spec
from slime.data.source.changed_data import resized
from slime.data.source.prompts import draw_groups
from slime.data.source.rollout_context import current_rollout, rollout_context
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.metrics import accounting

NUM_GPUS = 0

Args = Callable[..., Namespace]


@pytest.fixture
def make_args(rollout_args: Args, write_jsonl: Callable[..., str]) -> Args:
    def make(num_prompts: int = 10, **changes: Any) -> Namespace:
        path = write_jsonl([{"prompt": f"p{i}", "label": str(i)} for i in range(num_prompts)])
        return rollout_args(prompt_data=path, **changes)

    return make


def labels(groups: list[list[Sample]]) -> list[int]:
    return [int(str(group[0].label)) for group in groups]


def test_groups_and_identities(make_args: Args) -> None:
    source = RolloutDataSource(make_args(n_samples_per_prompt=3))
    groups = source.get_samples(4) + source.get_samples(5)
    assert labels(groups) == list(range(9))
    samples = [sample for group in groups for sample in group]
    assert [s.index for s in samples] == [s.rollout_id for s in samples] == list(range(27))
    assert [s.group_index for s in samples] == [i // 3 for i in range(27)]
    samples[0].metadata["seen"] = True
    samples[0].tokens.append(1)
    assert samples[1].metadata == {}
    assert len(samples[1].tokens) == 2


def test_shuffle_is_private_seeded_and_per_epoch(make_args: Args) -> None:
    random.seed(1)
    np.random.seed(1)
    expected = (random.Random(1).random(), np.random.RandomState(1).random())
    source = RolloutDataSource(make_args(num_prompts=20, rollout_shuffle=True))
    epochs = [labels(source.get_samples(20)) for _ in range(3)]
    assert (random.random(), np.random.random()) == expected
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = RolloutDataSource(make_args(num_prompts=20, rollout_shuffle=True))
    assert [labels(again.get_samples(20)) for _ in range(3)] == epochs
    other = RolloutDataSource(make_args(num_prompts=20, rollout_shuffle=True, rollout_seed=7))
    assert labels(other.get_samples(20)) != epochs[0]


def test_fewer_prompts_than_a_batch_wrap_as_often_as_needed(make_args: Args) -> None:
    source = RolloutDataSource(make_args(num_prompts=3, rollout_shuffle=True))
    got = labels(source.get_samples(10))
    assert len(got) == 10
    assert all(sorted(got[i : i + 3]) == [0, 1, 2] for i in (0, 3, 6))
    assert len(source) == 3


def test_prompts_are_needed(rollout_args: Args) -> None:
    with pytest.raises(ValueError, match="--prompt-data is missing"):
        RolloutDataSource(rollout_args())


def test_rows_left_out_are_counted(rollout_args: Args, write_jsonl: Callable[..., str]) -> None:
    lengths = [random.randrange(1, 20) for _ in range(30)]
    path = write_jsonl(["{", *({"prompt": "x" * n, "label": ""} for n in [*lengths, 10]), "[]"])
    source = RolloutDataSource(rollout_args(prompt_data=path, skip_bad_rows=True, rollout_max_prompt_len=10))
    assert (source.num_bad, source.num_too_long) == (2, sum(n > 10 for n in lengths))
    assert len(source) + source.num_too_long == 31


def test_dataset_given_to_a_subclass(rollout_args: Args) -> None:
    class Mine(RolloutDataSource):
        def __init__(self, dataset: list[Sample], args: Namespace) -> None:
            super().__init__(dataset, args)

    source = Mine([Sample(prompt="a"), Sample(prompt="b")], rollout_args())
    assert [group[0].prompt for group in source.get_samples(3)] == ["a", "b", "a"]
    assert isinstance(source, DataSource)
    assert (source.num_bad, source.num_too_long) == (0, 0)


def test_buffer_first_in_first_out(make_args: Args) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    groups = source.get_samples(4)
    source.add_samples(groups[1:])
    assert source.get_buffer_length() == 3
    assert source.get_samples(2) == groups[1:3]
    mixed = source.get_samples(3)
    assert mixed[0] is groups[3]
    assert labels(mixed[1:]) == [4, 5]
    source.add_samples([groups[0][:1]])
    assert source.get_samples(1) == [groups[0][:1]]
    for wrong in ([[]], [groups[0][0]], [["x"]]):
        with pytest.raises(TypeError, match="non-empty lists of Sample"):
            source.add_samples(wrong)  # type: ignore[arg-type]


def test_source_without_buffer_refuses(make_args: Args) -> None:
    source = RolloutDataSource(make_args())
    source.add_samples([])
    with pytest.raises(RuntimeError, match=r"no buffer .* --data-source-path"):
        source.add_samples(source.get_samples(1))


def test_buffer_filter_method_of_a_subclass(make_args: Args) -> None:
    class ByReward(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Namespace, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
            buffer.sort(key=lambda group: -(group[0].reward or 0))  # type: ignore[operator]
            return super().buffer_filter(args, buffer, num_samples)

    source = ByReward(make_args())
    groups = source.get_samples(3)
    for group, reward in zip(groups, (0.1, 0.9, 0.5), strict=True):
        group[0].reward = reward
    source.add_samples(groups)
    assert labels(source.get_samples(3)) == [1, 2, 0]


def test_buffer_filter_that_chooses_too_many(make_args: Args) -> None:
    class Greedy(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Namespace, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
            return buffer

    source = Greedy(make_args())
    source.add_samples(source.get_samples(3))
    with pytest.raises(
        ValueError,
        match=r"Greedy\.buffer_filter \(--data-source-path\) must return up to 2 groups of the buffer; it returned 3",
    ):
        source.get_samples(2)


def test_the_documents_buffer_filter(make_args: Args) -> None:
    """It sorts what it calls samples by reward, and takes nothing out of the buffer."""

    class Prioritised(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Namespace, buffer: list[Any], num_samples: int) -> list[Any]:
            sorted_buffer = sorted(buffer, key=lambda s: s.reward, reverse=True)
            return sorted_buffer[:num_samples]

    source = Prioritised(make_args())
    groups = source.get_samples(3)
    for group, rewards in zip(groups, ([0.0, 0.0], [1.0, None], [0.0, 1.0]), strict=True):
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
    source.add_samples([[*groups[0]], groups[1], groups[2]])
    assert source.get_samples(2) == [groups[1], groups[2]]
    assert source.get_buffer_length() == 1
    assert source.get_samples(1) == [groups[0]]
    assert sum(source.num_dropped.values()) == 0


def test_metadata_of_hooks_is_kept(make_args: Args) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    source.update_metadata({"level": 2})
    state = pickle.loads(pickle.dumps(source.state_dict()))
    source.update_metadata({"level": 3})
    resumed = RolloutDataSourceWithBuffer(make_args())
    resumed.load_state_dict(state)
    assert (resumed.get_metadata(), source.get_metadata()) == ({"level": 2}, {"level": 3})
    del state["metadata"]  # a checkpoint of before
    resumed.load_state_dict(state)
    assert resumed.get_metadata() == {}


def test_resume_continues_exactly(make_args: Args) -> None:
    args = make_args(num_prompts=7, rollout_shuffle=True)
    source = RolloutDataSourceWithBuffer(args)
    source.count_trained([group[0] for group in source.get_samples(random.randrange(1, 30))])
    partial = source.get_samples(2)
    partial[0][0].append_response_tokens(
        tokens=[5, 6], log_probs=[-0.5, -0.25], meta_info={"weight_version": 3, "finish_reason": {"type": "abort"}}
    )
    source.add_samples(partial)
    state = pickle.loads(pickle.dumps(source.state_dict()))
    expected = source.get_samples(20)

    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(state)
    got = resumed.get_samples(20)
    assert got == expected
    assert got[0][0].status is Status.ABORTED
    assert (got[0][0].rollout_log_probs, got[0][0].weight_versions) == ([-0.5, -0.25], ["3"])
    assert resumed.state_dict() == source.state_dict()


def balance(source: RolloutDataSource, **counts: int) -> dict[str, float]:
    return {f"rollout/prompts_{name}": float(n) for name, n in {"read": source.num_read, **counts}.items()}


def test_every_prompt_is_accounted_for(make_args: Args) -> None:
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    kept, surplus, stale = source.get_samples(4), source.get_samples(3), source.get_samples(2)
    kept[0].append(kept[0][0])  # a rollout that was cut into several samples
    source.count_trained([sample for group in kept for sample in group])
    source.add_samples(surplus)
    with pytest.raises(
        RuntimeError, match=r"9 prompts were read and 0 added, but 4 trained \+ 0 dropped \+ 3 buffered \+ 0 in_fli"
    ):
        accounting(args, source)
    assert accounting(args, source, in_flight=2) == balance(source, trained=4, dropped=0, buffered=3, in_flight=2)
    source.count_dropped(stale, "stale")
    source.count_dropped([], "never")
    expected = {"trained": 4, "dropped": 2, "buffered": 3, "in_flight": 0, "dropped/stale": 2}
    assert accounting(args, source) == balance(source, **expected)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
    assert accounting(args, resumed) == accounting(args, source)
    source.count_trained(kept[0])
    with pytest.raises(RuntimeError, match="9 prompts were read and 1 added, but 5 trained"):
        accounting(args, source)


def test_own_functions_that_lose_prompts_are_warned_of(make_args: Args, caplog: pytest.LogCaptureFixture) -> None:
    args = make_args(rollout_function_path="my.generate_rollout")
    source = RolloutDataSource(args)
    source.get_samples(2)
    assert accounting(args, source) == balance(source, trained=0, dropped=0, buffered=0, in_flight=0)
    assert "2 prompts were read" in caplog.text
    assert "data_source.count_dropped" in caplog.text


def test_resume_over_other_data(make_args: Args, caplog: pytest.LogCaptureFixture) -> None:
    source = RolloutDataSource(make_args(num_prompts=10))
    source.get_samples(6)
    grown = RolloutDataSource(make_args(num_prompts=12))
    grown.load_state_dict(source.state_dict())
    assert "num_prompts: 10 then, 12 now" in caplog.text
    args = make_args(num_prompts=5)
    shrunk = RolloutDataSource(args)
    with pytest.raises(ValueError, match=r"has 5 prompts, the checkpoint was 6 into an epoch of 10: .*--restart-epoch"):
        shrunk.load_state_dict(source.state_dict())
    args.restart_epoch = True
    shrunk.load_state_dict(source.state_dict() | {"in_flight": []})
    assert labels(shrunk.get_samples(6)) == [0, 1, 2, 3, 4, 0], "its epoch is begun anew"


def test_resume_over_as_many_other_rows(
    make_args: Args, rollout_args: Args, write_jsonl: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    source = RolloutDataSource(make_args(num_prompts=10))
    source.get_samples(6)
    state = source.state_dict() | {"in_flight": []}
    rows = [{"prompt": f"p{i}", "label": str(i)} for i in range(10)]
    others = {
        "prompt": [*rows[:9], {"prompt": "p10", "label": "9"}],
        "order": [*rows[:8], rows[9], rows[8]],
    }
    for name, other in others.items():
        args = rollout_args(prompt_data=write_jsonl(other, f"{name}.jsonl"))
        resumed = RolloutDataSource(args)
        caplog.clear()
        resumed.load_state_dict(state)
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert f"prompts_digest: {state['prompts_digest']} then, {resumed.state_dict()['prompts_digest']} now" in line
        assert "--restart-epoch" in line
        assert "6 prompts into its epoch" in line
        args.restart_epoch = True
        anew = RolloutDataSource(args)
        anew.load_state_dict(state)
        assert len(labels(anew.get_samples(10))) == 10
        assert anew.state_dict()["epoch"] == 0
    moved = RolloutDataSource(rollout_args(prompt_data=write_jsonl(rows, "moved.jsonl"), restart_epoch=True))
    caplog.clear()
    moved.load_state_dict(state)
    assert labels(moved.get_samples(1)) == [6], "the same rows in another file: the flag has no effect"
    changed = RolloutDataSource(rollout_args(prompt_data=write_jsonl(others["order"], "old.jsonl")))
    changed.load_state_dict(
        {key: value for key, value in state.items() if key not in ("prompts_digest", "n_samples_per_prompt")}
    )
    assert "then" not in caplog.text, "checkpoints of earlier versions have no digest"


def test_the_digest_is_of_the_prompts_whatever_the_flags_and_the_kind_of_file(
    rollout_args: Args, write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    ask = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "n"}]
    rows: list[Any] = [
        {"prompt": [*ask, {"role": "user", "content": f"p{i}"}], "label": str(i), "other": {"x": i}, "number": i}
        for i in range(6)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    pyarrow.parquet.write_table(table.select(["number", "prompt", "label"]), tmp_path / "fewer.parquet")
    paths = [write_jsonl(rows), *(str(tmp_path / name) for name in ("rows.parquet", "fewer.parquet"))]
    flags: list[dict[str, Any]] = [
        {"label_key": None},
        {"label_key": "number"},
        {"label_key": "label", "metadata_key": None, "tool_key": None},
    ]
    digests = {
        load_prompts(train_prompt_spec(rollout_args(prompt_data=path, apply_chat_template=True, **more))).digest
        for path in paths
        for more in flags
    }
    assert len(digests) == 1
    assert None not in digests
    for wrong in (rows[::-1], rows[:5], [*rows[:5], rows[5] | {"prompt": ask}], [*rows, {"label": "7"}]):
        args = rollout_args(prompt_data=write_jsonl(wrong), apply_chat_template=True, skip_bad_rows=True)
        digests.add(load_prompts(train_prompt_spec(args)).digest)
    assert len(digests) == 5


def test_resume_with_another_group_size(make_args: Args, caplog: pytest.LogCaptureFixture) -> None:
    source = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=4))
    groups = source.get_samples(3)
    source.add_samples(groups[:1])
    resumed = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=2))
    resumed.load_state_dict(source.state_dict())
    assert "--n-samples-per-prompt is 2, and 3 groups that wait in the checkpoint were made with 4" in caplog.text
    assert "those of 4 are cut to 2 samples" in caplog.text
    handed = resumed.get_samples(4)
    assert [len(group) for group in handed] == [2, 2, 2, 2]
    assert sorted(sample.index for sample in flatten_samples(handed)) == [0, 1, 4, 5, 8, 9, 12, 13]
    caplog.clear()
    source.count_trained([sample for group in source.get_samples(1) + groups[1:] for sample in group])
    RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=2)).load_state_dict(source.state_dict())
    assert "wait in the checkpoint" not in caplog.text


def test_resume_with_larger_groups(make_args: Args, caplog: pytest.LogCaptureFixture) -> None:
    """One that waits with a response keeps it; those that are added to it have none."""
    source = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=2))
    groups = source.get_samples(2)
    for sample in groups[0]:
        sample.metadata_before, sample.metadata = dict(sample.metadata), sample.metadata | {"turns": 3}
        sample.tokens, sample.response, sample.response_length = [*sample.tokens, 5], "5", 1
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
        sample.session_id, sample.trace = "one", {"events": []}
    source.add_samples([groups[0], [Sample(prompt="mine")]])
    resumed = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=3))
    resumed.load_state_dict(source.state_dict())
    assert "2 groups that wait in the checkpoint" not in caplog.text
    assert (
        "3 groups that wait in the checkpoint were made with 2: those of 2 are given 1 more samples each" in caplog.text
    )
    handed = resumed.get_samples(4)
    assert [len(group) for group in handed] == [3, 3, 1, 3]
    again = next(group for group in handed if group[0].group_index == 0)
    assert [sample.response_length for sample in again] == [1, 1, 0]
    assert again[2].tokens == again[0].tokens[:-1]
    assert again[2].session_id is again[2].trace is None
    assert (again[2].metadata, again[2].reward, again[2].status) == (groups[1][0].metadata, None, Sample.Status.PENDING)
    numbers = [(sample.index, sample.rollout_id) for sample in flatten_samples(handed)]
    assert len(set(numbers)) == 10
    assert all(index == rollout_id for index, rollout_id in numbers)


def test_a_group_that_is_judged_together_is_judged_again_in_its_new_size() -> None:
    group = [Sample(prompt="1+1=", index=i, rollout_id=i, reward=float(i)) for i in range(4)]
    assert [sample.reward for sample in resized(group, 4, 2, judged_together=False)] == [0.0, 1.0]
    assert [sample.reward for sample in resized(group, 4, 2, judged_together=True)] == [None, None]


def test_a_group_of_several_prompts_keeps_them() -> None:
    group = [Sample(prompt=f"{i}=", index=i, rollout_id=i) for i in range(2)]
    assert resized(group, 2, 1, judged_together=False) is group


def test_resume_with_another_class(make_args: Args) -> None:
    args = make_args()
    plain, buffered = RolloutDataSource(args), RolloutDataSourceWithBuffer(args)
    with pytest.raises(ValueError, match=r"had no buffer, RolloutDataSourceWithBuffer has one: .* --data-source-path"):
        buffered.load_state_dict(plain.state_dict())
    plain.load_state_dict(buffered.state_dict())
    buffered.add_samples(buffered.get_samples(2))
    with pytest.raises(
        ValueError, match=r"2 groups in its buffer, and RolloutDataSource has none: .*--data-source-path"
    ):
        plain.load_state_dict(buffered.state_dict())
    assert labels(plain.get_samples(1)) == [0], "the refused state has changed nothing"


# ---- prompts in flight


def copy_of(source: RolloutDataSource) -> RolloutDataSource:
    resumed = type(source)(source.args)
    resumed.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
    return resumed


def finish(groups: list[Group]) -> list[Sample]:
    """What a rollout does to its groups."""
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        sample.append_response_tokens(tokens=[1], log_probs=[-1.0])
        sample.reward, sample.status = 1.0, Status.COMPLETED
    return samples


@pytest.mark.parametrize("kind", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_runs_that_are_killed_again_and_again_train_every_prompt_once(
    kind: type[RolloutDataSource], make_args: Args
) -> None:
    args = make_args(rollout_shuffle=True, rollout_batch_size=3)
    source = kind(args)
    expected = [group[0].prompt for group in kind(args).get_samples(60)]
    trained: list[str] = []
    for rollout_id in range(20):
        ahead = random.randrange(4)
        drawn = {}
        for later in range(rollout_id, rollout_id + 1 + ahead):
            with rollout_context(later):
                assert source.rollout_id == later
                drawn[later] = draw_groups(args, source, args.rollout_batch_size)
        samples = finish(drawn[rollout_id])
        if ahead:
            finish(drawn[rollout_id + 1])  # complete, and waiting for the trainer
        source.count_trained(samples)
        counts = accounting(args, source, in_flight=source.num_in_flight(after=rollout_id))
        assert counts["rollout/prompts_in_flight"] == 3 * ahead
        trained += [str(sample.prompt) for sample in samples[:: args.n_samples_per_prompt]]
        source = copy_of(source)
        assert source.get_buffer_length() >= 3 * ahead
    assert current_rollout() is None
    assert trained == expected
    assert source.num_trained == 60


def test_a_rollout_that_loses_a_group_is_found_out_while_others_are_in_flight(make_args: Args) -> None:
    args = make_args()
    source = RolloutDataSource(args)
    with rollout_context(0):
        groups = source.get_samples(4)
    with rollout_context(1):
        source.get_samples(4)
    source.count_trained(finish(groups[:3]))
    with pytest.raises(
        RuntimeError, match=r"8 prompts were read and 0 added, but 3 trained \+ 0 dropped \+ 0 buff.* \+ 4 in_fl"
    ):
        accounting(args, source, in_flight=source.num_in_flight(after=0))
    source.count_dropped(groups[3:], "filtered")
    accounting(args, source, in_flight=source.num_in_flight(after=0))


def test_groups_in_flight_are_kept_as_they_were_handed_out(make_args: Args) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    first, second, third = source.get_samples(3)
    finish([first, second])
    source.add_samples([second])
    finish([third])
    again = copy_of(source).get_samples(3)
    assert [group[0].index for group in again] == [first[0].index, third[0].index, second[0].index]
    assert [group[0].response_length for group in again] == [0, 0, 1], "put back, it keeps what it has"
