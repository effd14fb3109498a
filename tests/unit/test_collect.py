"""What a rollout collects: over-sampling, filters, aborted and partial responses, hooks; every prompt counted."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.data import Sample, Status
from slime.data.sample import begun_anew
from slime.data.source.prompts import as_prompts
from slime.data.source.rollout_context import rollout_context
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import HookError
from tests.fake_client import Engine, FakeClient, accounts, hook_file, indices, push, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"


def test_over_sampling_keeps_the_first_and_puts_the_rest_back(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.groups.pool._DRAIN_GRACE_S", 60.0)
    engine = Engine(monkeypatch, longest=5)
    use(FakeClient(engine))
    args = make_args(over_sampling_batch_size=8, sglang_server_concurrency=100)
    source = RolloutDataSourceWithBuffer(args)
    output = rollout(args, 0, source)
    assert len(output.samples) == 4
    assert set(indices(output.samples)) < {0, 1, 2, 3, 4}
    assert indices(output.samples) == sorted(indices(output.samples))
    assert output.metrics is not None
    assert (output.metrics["rollout/surplus_groups"], output.metrics["rollout/aborted_groups"]) == (1, 3)
    assert engine.asked[0] is None, "nothing else generates"
    # The fifth short one is complete and rewarded; the long ones begin anew.
    surplus, *again = source.buffer
    assert [(s.status, s.reward) for s in surplus] == [(Status.COMPLETED, 1.0)] * 2
    assert indices(again) == [5, 6, 7]
    for sample in flatten_samples(again):
        assert (sample.status, sample.response_length, len(sample.tokens)) == (
            Status.PENDING,
            0,
            (sample.group_index or 0) + 1,
        )
    figures = accounts(args, source, flatten_samples(output.samples))
    assert (figures["rollout/prompts_read"], figures["rollout/prompts_buffered"]) == (8, 4)

    engine.go_on()
    client = use(FakeClient(engine))
    output = rollout(args, 1, source)
    # Every one of the four that were put back is in the next eight, and the surplus one is not generated again.
    drawn = indices(output.samples) + indices(source.buffer)
    assert sorted(i for i in drawn if i is not None) == sorted([*indices([surplus, *again]), 8, 9, 10, 11])
    assert not any(len(ids) == (surplus[0].group_index or 0) + 1 for ids, *_ in client.requests)
    accounts(args, source, flatten_samples(output.samples))


def test_partial_responses_go_on_in_the_next_rollout(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slime.rollout.groups.pool._DRAIN_GRACE_S", 60.0)
    engine = Engine(monkeypatch, longest=4)
    engine.version = 3
    use(FakeClient(engine))
    partial = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "asynchronous": True}
    args = make_args(over_sampling_batch_size=6, sglang_server_concurrency=100, **partial)
    source = RolloutDataSourceWithBuffer(args)
    push(3)
    output = rollout(args, 3, source)
    assert indices(output.samples) == [0, 1, 2, 3]
    assert output.metrics is not None
    assert output.metrics["rollout/partial_samples"] == 4
    assert engine.asked[0] is not None
    assert len(engine.asked[0]) == 4, "other rollouts may be under way: only our requests are ended"
    for sample in flatten_samples(source.buffer):
        assert (sample.status, sample.response, sample.response_length) == (Status.ABORTED, "so", 2)
    state = source.state_dict()

    # A resumed run has the partial responses too.
    source = RolloutDataSourceWithBuffer(args)
    source.load_state_dict(state)
    engine.go_on()
    engine.version = 4
    push(4)
    client = use(FakeClient(engine))
    later = rollout(args, 4, source)
    trained = flatten_samples(later.samples)
    assert later.metrics is not None
    masked = sum(version == "3" for sample in trained for version in sample.token_versions())
    assert later.metrics["rollout/offpolicy_tokens_masked"] == masked
    again = [sample for sample in trained if sample.group_index in (4, 5)]
    again += [sample for sample in flatten_samples(source.buffer) if sample.group_index in (4, 5)]
    assert len(again) == 4
    for sample in again:
        prompt = (sample.group_index or 0) + 1
        assert sample.metadata["start_rollout_id"] is None  # not within the manager, which knows the rollout
        assert sample.status is Status.COMPLETED
        assert sample.tokens[prompt:][:2] == [100 + b % 100 for b in b"so"]
        digits = len(str(prompt + 2))
        assert sample.weight_versions == ["3", "4"]
        assert sample.segment_lengths == [2, digits]
    for sample in flatten_samples(output.samples):
        assert sample.loss_mask == [1] * sample.response_length
    for sample in trained:
        by_new_weights = [int(version == "4") for version in sample.token_versions()]
        assert sample.loss_mask == by_new_weights, "of surplus groups nothing, of those that went on the rest"
    asked = [(len(ids), params["max_new_tokens"]) for ids, params, _ in client.requests if len(ids) in (7, 8)]
    assert asked.count((7, 30)) == 2, "what is there counts against --rollout-max-response-len"


def test_what_begins_anew_has_the_metadata_of_its_row(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not what a function noted of the response that was taken back; one that goes on has both."""
    monkeypatch.setattr("slime.rollout.groups.pool._DRAIN_GRACE_S", 60.0)
    engine = Engine(monkeypatch, longest=5)
    use(FakeClient(engine))
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as plain\n"
        "async def generate(args, sample, params):\n"
        "    sample.metadata.setdefault('calls', []).append(sample.response_length)\n"
        "    return await plain(args, sample, params)\n"
        "def rm(args, sample):\n"
        "    sample.metadata['judged'] = True\n"
        "    return 1.0\n",
    )
    args = make_args(
        over_sampling_batch_size=8,
        sglang_server_concurrency=100,
        partial_rollout=True,
        custom_generate_function_path=f"{hook}:generate",
        custom_rm_path=f"{hook}:rm",
    )
    source = RolloutDataSourceWithBuffer(args)
    rollout(args, 0, source)
    waiting = {sample.group_index: sample for sample in flatten_samples(source.buffer)}
    assert [sample.status for sample in waiting.values()] == [Status.COMPLETED, *[Status.ABORTED] * 3]
    assert all(sample.metadata["calls"] == [0] for sample in waiting.values())
    state = source.state_dict()
    source = RolloutDataSourceWithBuffer(args)
    source.load_state_dict(state)
    finished, partial = source.get_samples(2)
    for group in (as_prompts(source, finished), begun_anew(finished), as_prompts(source, partial), begun_anew(partial)):
        for sample in group:
            assert (sample.response, sample.status) == ("", Status.PENDING)
            assert not {"calls", "judged", "start_rollout_id"} & set(sample.metadata)
    engine.go_on()
    use(FakeClient(engine))
    source.load_state_dict(state)
    trained = flatten_samples(rollout(args, 1, source).samples) + flatten_samples(source.buffer)
    again = [sample for sample in trained if sample.group_index in waiting]
    calls = {sample.index: sample.metadata["calls"] for sample in again}
    assert all(sample.metadata_before is None for sample in trained if sample not in flatten_samples(source.buffer))
    assert sorted(calls.values()) == [[0], [0], *[[0, 2]] * 6], "the finished one is not generated again"


def test_a_function_that_takes_a_response_back_keeps_its_notes() -> None:
    sample = Sample(metadata={"row": 1, "task": 2}, metadata_before={"row": 1}, tokens=[1, 2], response_length=1)
    sample.reset_response()
    assert (sample.tokens, sample.metadata) == ([1], {"row": 1, "task": 2})
    sample.begin_anew()
    assert (sample.metadata, sample.metadata_before) == ({"row": 1}, None)


def test_sample_hooks_see_every_sample_before_its_reward(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "async def generate(args, sample, params):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(2)]\n"
        "    for part in parts: part.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n"
        "    return parts\n"
        "def first(args, sample, *, rollout_id=None, evaluation=False):\n"
        "    sample.metadata['first'] = (rollout_id, evaluation, sample.reward)\n"
        "async def second(args, sample):\n"
        "    sample = copy.copy(sample)\n"
        "    sample.response = 'seen'\n"
        "    return sample\n"
        "def rm(args, sample): return float(sample.response == 'seen')\n"
        "def bad(args, sample): return 7\n",
    )
    paths = {"custom_generate_function_path": f"{hook}:generate", "custom_rm_path": f"{hook}:rm"}
    args = make_args(**paths, rollout_sample_hook_path=[f"{hook}:first", f"{hook}:second"])
    samples = flatten_samples(rollout(args).samples)
    assert len(samples) == 16
    assert all(s.reward == 1.0 and s.metadata["first"] == (None, False, None) for s in samples)
    args = make_args(**paths, rollout_sample_hook_path=[f"{hook}:bad"], on_sample_error="stop")
    with pytest.raises(HookError, match=r"--rollout-sample-hook-path .*:bad must return a Sample or None, not 7"):
        rollout(args)


def test_functions_of_a_whole_batch(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from slime.rollout.sglang_rollout import generate\n"
        "seen = []\n"
        "async def late(args, sample, sampling_params):\n"
        "    for _ in range(100 * (9 - sample.group_index)): await asyncio.sleep(0)\n"  # the first is done last
        "    return await generate(args, sample, sampling_params)\n"
        "def sample_filter(args, groups):\n"
        "    groups[0][0].remove_sample = True\n"
        "async def process_all_samples(args, all_groups, data_source):\n"
        "    seen.append(([group[0].group_index for group in all_groups], len(data_source)))\n"
        "def keep(args, samples): return samples[0].group_index != 1\n",
    )
    args = make_args(
        custom_generate_function_path=f"{hook}:late",
        rollout_sample_filter_path=f"{hook}:sample_filter",
        rollout_all_samples_process_path=f"{hook}:process_all_samples",
        dynamic_sampling_filter_path=f"{hook}:keep",
    )
    output = rollout(args)
    assert [s.remove_sample for s in flatten_samples(output.samples)] == [True] + [False] * 7
    from slime.utils.misc import load_module

    assert load_module(str(hook)).seen == [([0, 1, 2, 3, 4], 12)]


def test_group_rm_judges_a_group_at_once(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "calls = []\n"
        "async def generate(args, sample, params):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(2)]\n"
        "    for part in parts: part.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n"
        "    parts[0].reward = 9.0 if sample.index == 0 else None\n"
        "    return parts\n"
        "async def batched_custom_rm(args, samples):\n"
        "    calls.append(len(samples))\n"
        "    if samples[0].group_index == 2: raise OSError('no judge')\n"
        "    return [float(i) for i in range(len(samples))]\n",
    )
    paths = {"custom_generate_function_path": f"{hook}:generate", "custom_rm_path": f"{hook}:batched_custom_rm"}
    args = make_args(group_rm=True, **paths)
    source = RolloutDataSourceWithBuffer(args)
    output = rollout(args, 0, source)
    assert indices(output.samples) == [0, 1, 3, 4]
    assert [s.reward for s in flatten_samples(output.samples[0])] == [9.0, 1.0, 2.0, 3.0]
    assert [s.reward for s in flatten_samples(output.samples[1])] == [0.0, 1.0, 2.0, 3.0]
    assert source.num_dropped == {"reward_error": 1}
    from slime.utils.misc import load_module

    assert load_module(str(hook)).calls == [4] * 7, "one call for a group, three for the one that fails"


def test_fan_out_goes_through_buffer_and_filter(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Engine(monkeypatch, longest=10**6)
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "async def generate(args, sample, params):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(3)]\n"
        "    for part in parts: part.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n"
        "    return parts\n"
        "def rm(args, sample): return float(sample.rollout_id % 2)\n",
    )
    args = make_args(
        custom_generate_function_path=f"{hook}:generate",
        custom_rm_path=f"{hook}:rm",
        over_sampling_batch_size=6,
        dynamic_sampling_filter_path=f"{FILTERS}.check_reward_nonzero_std",
    )
    source = RolloutDataSourceWithBuffer(args)
    trained: Counter[int | None] = Counter()
    for rollout_id in range(3):
        output = rollout(args, rollout_id, source)
        for group in output.samples:
            samples = flatten_samples(group)
            assert len(samples) == 6
            assert len({s.rollout_id for s in samples}) == 2
            trained[samples[0].group_index] += 1
        accounts(args, source, flatten_samples(output.samples))
    assert set(trained.values()) == {1}, "nothing is trained twice"


def test_source_without_a_buffer_counts_what_is_not_needed(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(monkeypatch, longest=4)
    use(FakeClient())
    args = make_args(over_sampling_batch_size=6)
    source = RolloutDataSource(args)
    output = generate_rollout(args, 0, source)
    assert source.num_dropped["no_buffer"] == 2
    accounts(args, source, flatten_samples(output.samples))  # type: ignore[union-attr]


@pytest.mark.parametrize("numbered", [True, False])
def test_source_that_gives_a_flat_list(numbered: bool, make_args: Args, use: Use) -> None:
    use(FakeClient())

    class Flat:
        def get_samples(self, num_samples: int) -> list[Sample]:
            if not numbered:
                return [Sample(prompt="ab", label="2") for _ in range(num_samples)]
            return [Sample(prompt="abc", label="3", group_index=i) for _ in range(3) for i in range(num_samples)]

    groups = generate_rollout(make_args(), 0, Flat()).samples  # type: ignore[union-attr]
    assert [len(group) for group in groups] == [3 if numbered else 2] * 4
    samples = flatten_samples(groups)
    assert len({s.index for s in samples}) == len({s.rollout_id for s in samples}) == len(samples)
    assert len({s.group_index for s in samples}) == 4
    assert all(s.reward == 1.0 for s in samples)


def test_run_without_prompts_of_its_own(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as ask\n"
        "async def generate(args, sample, params):\n"
        "    assert not sample.prompt\n"
        "    sample.prompt, sample.label = 'abc', '3'\n"
        "    return await ask(args, sample, params)\n",
    )
    changes = {"disable_rollout_global_dataset": True, "custom_generate_function_path": f"{hook}:generate"}
    args = make_args(**changes, prompt_data=None)
    source = RolloutDataSourceWithBuffer(args)
    samples = flatten_samples(rollout(args, 0, source).samples)
    assert [s.reward for s in samples] == [1.0] * 8
    accounts(args, source, samples)


def test_buffer_filter_may_throw_groups_away(make_args: Args, tmp_path: Path) -> None:
    hook = hook_file(
        tmp_path,
        "def pop(args, rollout_id, buffer, num_samples):\n"
        "    taken = [g for g in buffer if g[0].group_index % 2][:num_samples]\n"
        "    buffer.clear()\n"
        "    return taken\n",
    )
    args = make_args(buffer_filter_path=f"{hook}:pop")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(5))
    groups = source.get_samples(4)
    assert indices(groups) == [1, 3, 5, 6]
    assert source.num_dropped == {"buffer_filter": 3}
    accounts(args, source, flatten_samples(groups))


def test_buffer_filters_that_come_with_slime(make_args: Args) -> None:
    hub = "slime.rollout.filter_hub.buffer_filters"

    def filled(name: str) -> RolloutDataSourceWithBuffer:
        args = make_args(buffer_filter_path=f"{hub}.{name}", max_weight_staleness=1, asynchronous=True)
        source = RolloutDataSourceWithBuffer(args)
        groups = source.get_samples(3)
        for group, (length, version) in zip(groups, [(2, 5), (4, 1), (3, 7)], strict=True):
            group[0].append_response_tokens(
                tokens=[9] * length, log_probs=[-1.0] * length, meta_info={"weight_version": version}
            )
        source.add_samples(groups)
        return source

    assert indices(filled("pop_first").get_samples(2)) == [0, 1]
    assert indices(filled("pop_longest").get_samples(2)) == [1, 2]
    with rollout_context(7):
        groups = filled("pop_fresh").get_samples(3)
    assert {g[0].group_index: g[0].response_length for g in groups} == {0: 0, 1: 0, 2: 3}


def test_stale_groups_of_cut_rollouts_begin_anew_as_they_were_drawn(make_args: Args) -> None:
    args = make_args(
        buffer_filter_path="slime.rollout.filter_hub.buffer_filters.pop_fresh",
        max_weight_staleness=1,
        asynchronous=True,
    )
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    parts = []
    for sample in group:
        sample.session_id = f"of {sample.index}"
        for text in (sample.prompt, "a summary of it"):
            part = copy.deepcopy(sample)
            part.prompt, part.status = text, Status.COMPLETED
            part.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info={"weight_version": 1})
            parts.append(part)
    drawn = [(sample.rollout_id, sample.prompt, sample.session_id) for sample in group]
    assert [(s.rollout_id, s.prompt, s.session_id) for s in as_prompts(None, copy.deepcopy(parts))] == drawn
    source.add_samples([copy.deepcopy(parts)])
    with rollout_context(7):
        (again,) = source.get_samples(1)
    assert [(s.rollout_id, s.prompt, s.session_id) for s in again] == drawn
    assert [(s.status, s.response_length) for s in again] == [(Status.PENDING, 0)] * 2
    # Handed out as parts, it is no more than a prompt for each rollout when it is too old again.
    source.add_samples([parts])
    with rollout_context(1):
        (cut,) = source.get_samples(1)
    assert len(cut) == 4
    assert [(s.rollout_id, s.prompt, s.session_id) for s in as_prompts(source, cut)] == drawn


def test_groups_that_a_hook_adds_are_counted_and_get_numbers_of_their_own(
    make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "from slime.data import Sample\n"
        "def process_all_samples(args, all_groups, data_source):\n"
        "    newest = max(all_groups, key=lambda group: group[0].group_index)\n"
        "    again = [copy.deepcopy(sample) for sample in newest]\n"
        "    for sample in again: sample.reset_response()\n"
        "    new = [Sample(prompt='abcd', label='4') for _ in range(2)]\n"
        "    data_source.add_samples([again, new])\n",
    )
    args = make_args(rollout_all_samples_process_path=f"{hook}:process_all_samples")
    source = RolloutDataSourceWithBuffer(args)
    seen: Counter[int | None] = Counter()
    for rollout_id in range(3):
        samples = flatten_samples(rollout(args, rollout_id, source).samples)
        assert len({s.rollout_id for s in samples}) == 8
        seen.update({s.group_index for s in samples})
        figures = accounts(args, source, samples)
        assert figures["rollout/prompts_added"] == rollout_id + 1
        assert figures["rollout/prompts_in_flight"] == 0
    assert set(seen.values()) == {1, 2}


def test_unnumbered_groups_of_a_subclass_do_not_take_the_numbers_of_others(make_args: Args, use: Use) -> None:
    use(FakeClient())

    class Curated(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            own = [Sample(prompt="abc", label="3") for _ in range(2)]
            return [*super().get_samples(num_samples - 1), own]

    args = make_args()
    source = Curated(args)
    for rollout_id in range(2):
        samples = flatten_samples(rollout(args, rollout_id, source).samples)
        assert len({s.group_index for s in samples}) == 4
        assert len({s.rollout_id for s in samples}) == 8
        figures = accounts(args, source, samples)
        assert (figures["rollout/prompts_in_flight"], figures["rollout/prompts_read"]) == (0, 4 * (rollout_id + 1))
    assert source.state_dict()["in_flight"] == []
