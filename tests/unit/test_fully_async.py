"""The rollout function that never stops: what rollouts take, how old it may be, and what comes back."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.options.eval_datasets import eval_datasets
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import accounting
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.loop import background_loop
from slime.rollout.engine.versions import staleness
from slime.rollout.fully_async_rollout import choose, generate_rollout_fully_async
from slime.rollout.runtime import current
from slime.utils.errors import HookError, SettingError
from tests.fake_client import FakeClient, hook_file, push, reply
from tests.waiting import skip, wait_for

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]


async def end_everything() -> None:
    """End what is under way on this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def own_loop() -> Iterator[None]:
    """A loop for each test, on which no stream is left: it would hear of the next test's pushes, in another thread."""
    background_loop.cache_clear()
    yield
    background_loop().run(end_everything(), timeout=60, what="end the stream")
    background_loop.cache_clear()


class Engine:
    """Answers with the weights that were pushed last; some prompts take until ``released``."""

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        self.slow, self.released = slow, False
        self.push(0)

    def push(self, version: int) -> None:
        self.version = version
        push(version)

    async def __call__(self, number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        version = self.version
        while len(input_ids) - 1 in self.slow and not self.released:
            await asyncio.sleep(0.005)
        return reply(str(len(input_ids)), version=version)


def make(make_args: Args, **changes: Any) -> tuple[Namespace, RolloutDataSourceWithBuffer]:
    always: dict[str, Any] = {"num_prompts": 200, "asynchronous": True, "num_rollout": 100}
    args = make_args(**{**always, "max_weight_staleness": 1, **changes})
    return args, RolloutDataSourceWithBuffer(args)


def take(args: Namespace, rollout_id: int, source: RolloutDataSourceWithBuffer) -> RolloutFnTrainOutput:
    output = generate_rollout_fully_async(args, rollout_id, source)
    assert isinstance(output, RolloutFnTrainOutput)
    assert len(output.samples) == args.rollout_batch_size
    source.count_trained(flatten_samples(output.samples))
    accounting(args, source, source.num_in_flight(after=rollout_id))
    return output


def num_kept() -> int:
    """How many groups of the stream are done and taken by no rollout yet."""
    runtime = current()
    assert runtime is not None
    streams = [its.stream for its in runtime._loops.values()]
    return sum(len(stream._pool.kept) for stream in streams if stream and stream._pool)


def stream_has_ended() -> bool:
    runtime = current()
    assert runtime is not None
    return any(its.stream is not None and its.stream._task.done() for its in runtime._loops.values())


def groups_of(output: RolloutFnTrainOutput) -> list[int | None]:
    return [flatten_samples(group)[0].group_index for group in output.samples]


def test_it_goes_on_between_rollouts_and_a_slow_group_holds_up_only_the_last_that_may_take_it(
    make_args: Args, use: Use
) -> None:
    engine = Engine(slow=(1,))
    use(FakeClient(engine))
    args, source = make(make_args, max_weight_staleness=2)
    trained: list[int | None] = []
    for rollout_id in range(3):
        engine.push(rollout_id)
        assert 1 not in trained
        if rollout_id == 2:
            threading.Timer(0.5, setattr, (engine, "released", True)).start()
        output = take(args, rollout_id, source)
        trained += groups_of(output)
        assert engine.released == (rollout_id == 2)
        wait_for(lambda: source.num_in_flight() >= args.rollout_batch_size, "others are generated meanwhile")
    (late, *_) = [sample for sample in flatten_samples(output.samples) if sample.group_index == 1]
    assert staleness(late, 2) == 2, "begun by weights of version 0"
    assert len(set(trained)) == len(trained) == 12
    assert source.as_handed_out(1) is None


@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_responses_of_any_length_are_trained_on_once_and_none_is_thrown_away(
    make_args: Args, use: Use, allowed: int
) -> None:
    engine, rng, asked = Engine(), random.Random(allowed), Counter[int]()

    async def in_its_time(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        asked[len(input_ids)] += 1
        answer = await engine(number, input_ids, params)  # its first token has the version that it was begun with
        await asyncio.sleep(min(0.4, rng.lognormvariate(-4, 1.5)))
        return answer

    use(FakeClient(in_its_time))
    args, source = make(make_args, max_weight_staleness=allowed)
    trained: Counter[int | None] = Counter()
    for rollout_id in range(12):
        engine.push(rollout_id)
        output = take(args, rollout_id, source)
        trained.update(groups_of(output))
        assert (output.metrics or {})["rollout/stale_groups_returned"] == 0
        assert all((staleness(s, rollout_id) or 0) <= allowed for s in flatten_samples(output.samples))
    assert set(trained.values()) == {1}
    assert set(range(4 * (12 - allowed))) <= set(trained), "those of the first rollouts, however long they took"
    assert max(asked.values()) == args.n_samples_per_prompt, "nothing is generated again"


@pytest.mark.parametrize(
    ("done", "under_way", "chosen"),
    [
        ([7, 7, 7], [7, 7], [0, 1]),  # the next two rollouts take the others
        ([7, 5, 7], [7], [1, 0]),
        ([7, 7, 7], [5], None),
        ([7, 7, 6, 6, 6], [], [2, 0]),  # rollout 6 has room for two of three
        ([7, 7, 6], [6, 6, 6], None),
        ([7, 6, 6], [6, 6], [1, 2]),
        ([5, 5, 5], [5], [0, 1]),  # more than can be taken in time
        ([math.inf, math.inf], [7], [0, 1]),
        ([5], [], None),
    ],
)
def test_a_rollout_takes_what_is_done_but_for_what_later_ones_cannot(
    done: list[float], under_way: list[float], chosen: list[int] | None
) -> None:
    assert choose(done, under_way, wanted=2, rollout_id=5) == chosen


def test_outstanding_groups_are_bounded_by_staleness(make_args: Args, use: Use) -> None:
    engine = Engine()
    use(FakeClient(engine))
    args, source = make(make_args)
    for rollout_id in range(3):
        engine.push(rollout_id)
        take(args, rollout_id, source)
        wait_for(lambda: source.num_in_flight() == args.rollout_batch_size, "one rollout more than the trainer has")
        time.sleep(0.3)
        assert source.num_in_flight() == args.rollout_batch_size


def test_nothing_is_begun_that_is_too_old_when_it_is_taken(make_args: Args, use: Use) -> None:
    """Weights are pushed after every second rollout: the third may only use those of the push before it."""
    engine = Engine()
    use(FakeClient(engine))
    args, source = make(make_args)
    stale = []
    for rollout_id in range(6):
        if rollout_id % 2 == 0:
            engine.push(rollout_id)
        stale.append((take(args, rollout_id, source).metrics or {})["rollout/stale_groups_returned"])
        if rollout_id % 2 == 1:
            time.sleep(0.3)
            assert source.num_in_flight() == 0
    assert set(stale) == {0}


def test_room_that_a_stale_group_leaves_is_filled_while_a_rollout_waits(make_args: Args, use: Use) -> None:
    """Weights are pushed after two rollouts: before it only as many groups may be begun as a rollout has. An engine
    answers by older weights than were pushed."""
    engine, asked = Engine(slow=(12, 13)), Counter[int]()

    async def noted(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        prompt = len(input_ids) - 1
        asked[prompt] += 1
        again = asked[prompt] > 2
        answer = await engine(number, input_ids, params)
        return answer if again or prompt not in (12, 13) else reply(str(len(input_ids)), version=1)

    def slowly(groups: list[Any]) -> None:
        time.sleep(0.3)  # who fills the room waits for more of it before the rollout waits again
        put_back(groups)

    use(FakeClient(noted))
    args, source = make(make_args)
    for rollout_id in range(3):
        engine.push(rollout_id)
        take(args, rollout_id, source)
    wait_for(lambda: asked[12] == asked[13] == 2, "two groups are begun, and take longer")
    put_back, source.add_samples = source.add_samples, slowly  # type: ignore[method-assign]
    for late, slow in ((0.5, (12,)), (2.0, ())):
        threading.Timer(late, setattr, (engine, "slow", slow)).start()
    output = take(args, 3, source)
    assert not engine.slow, "the rollout has waited for both"
    assert all((staleness(s, 3) or 0) <= 1 for s in flatten_samples(output.samples))
    assert (output.metrics or {})["rollout/stale_groups_returned"] == 2


def test_a_group_whose_filter_is_cancelled_comes_back(make_args: Args, use: Use, tmp_path: Path) -> None:
    """Something else ends the stream while a user's filter waits."""
    engine = Engine()
    use(FakeClient(engine))
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "filtering = asyncio.Event()\n"
        "judged = 0\n"
        "async def keep(args, samples):\n"
        "    global judged\n"
        "    judged += 1\n"
        "    if judged == 6:\n"
        "        filtering.set()\n"
        "        await asyncio.sleep(60)\n"
        "    return True\n",
    )
    args, source = make(make_args, dynamic_sampling_filter_path=f"{hook}:keep")
    draw, draws = source.get_samples, 0

    def failing(num_samples: int) -> list[Any]:
        nonlocal draws
        draws += 1
        if draws == 2:
            from slime.utils.misc import load_module

            wait_for(load_module(str(hook)).filtering.is_set, "the filter of the sixth group is called")
            raise OSError("no more prompts")
        return draw(num_samples)

    source.get_samples = failing  # type: ignore[method-assign]
    trained = groups_of(take(args, 0, source))
    engine.push(1)
    with pytest.raises(HookError, match="no more prompts"):
        take(args, 1, source)
    assert sorted([*trained, *(group[0].group_index for group in source.buffer)]) == list(range(8))
    assert source.num_in_flight() == 0


def test_a_failure_while_no_rollout_waits_is_the_next_ones(make_args: Args, use: Use) -> None:
    engine = Engine()
    use(FakeClient(engine))
    args, source = make(make_args)
    draw, draws = source.get_samples, iter([True, False, True, True])

    def fails_once(num_samples: int) -> list[Any]:
        if not next(draws):
            raise OSError("no more prompts")
        return draw(num_samples)

    source.get_samples = fails_once  # type: ignore[method-assign]
    take(args, 0, source)
    engine.push(1)
    wait_for(stream_has_ended, "the stream has ended")
    with pytest.raises(HookError, match="no more prompts"):
        take(args, 1, source)
    take(args, 1, source)


def test_filter_hooks_and_failures(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient(Engine()))
    hook = hook_file(
        tmp_path,
        "seen, failed = [], set()\n"
        "def keep(args, samples): return samples[0].group_index % 3 > 0\n"
        "def sample_filter(args, groups): groups[0][0].remove_sample = True\n"
        "def process_all_samples(args, all_groups, data_source): seen.append(len(all_groups))\n"
        "def rm(args, sample):\n"
        "    if sample.group_index == 4: raise OSError('no judge')\n"
        "    return 1.0\n",
    )
    args, source = make(
        make_args,
        dynamic_sampling_filter_path=f"{hook}:keep",
        rollout_sample_filter_path=f"{hook}:sample_filter",
        rollout_all_samples_process_path=f"{hook}:process_all_samples",
        custom_rm_path=f"{hook}:rm",
    )
    outputs = [take(args, rollout_id, source) for rollout_id in range(2)]
    for output in outputs:
        assert sum(s.remove_sample for s in flatten_samples(output.samples)) == 1
    taken = [index for output in outputs for index in groups_of(output)]
    assert len(set(taken)) == 8
    assert not any(index in (0, 3, 4, 6) for index in taken)
    assert source.num_dropped["reward_error"] == 1
    assert source.num_dropped["filter_dynamic"] >= 3
    from slime.utils.misc import load_module

    assert all(count >= 4 for count in load_module(str(hook)).seen)


def test_groups_kept_for_later_rollouts_keep_the_numbers_that_a_hook_of_all_sets(
    make_args: Args, use: Use, tmp_path: Path
) -> None:
    engine = Engine()
    use(FakeClient(engine))
    hook = hook_file(
        tmp_path,
        "seen = []\n"
        "def process_all_samples(args, all_groups, data_source):\n"
        "    seen.append(len(all_groups))\n"
        "    for group in all_groups:\n"
        "        for s in group: s.group_index = s.index = s.rollout_id = 7000\n",
    )
    args, source = make(make_args, rollout_all_samples_process_path=f"{hook}:process_all_samples")
    trained: list[Sample] = []
    for rollout_id in range(3):
        engine.push(rollout_id)
        if rollout_id:
            wait_for(lambda: num_kept() == 2 * args.rollout_batch_size, "those of the rollout after it are done")
        trained += flatten_samples(take(args, rollout_id, source).samples)
    from slime.utils.misc import load_module

    assert max(load_module(str(hook)).seen) > args.rollout_batch_size, "it saw some of the next rollout's"
    assert set(Counter(sample.group_index for sample in trained).values()) == {args.n_samples_per_prompt}
    assert len({sample.index for sample in trained}) == len({sample.rollout_id for sample in trained}) == len(trained)


def test_a_crashed_group_goes_back_and_is_generated_again(make_args: Args, use: Use) -> None:
    engine, crashed = Engine(), []

    async def crash_once(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if len(input_ids) == 3 and not crashed:
            crashed.append(number)
            raise ZeroDivisionError("a bug")
        return await engine(number, input_ids, params)

    use(FakeClient(crash_once))
    args, source = make(make_args)
    trained: Counter[int | None] = Counter()
    for rollout_id in range(40):
        engine.push(rollout_id)
        trained.update(groups_of(take(args, rollout_id, source)))
        if trained[2]:
            break
    assert crashed
    assert trained[2] == 1, "it comes back when its thread has put it back, however busy the machine is"
    assert set(trained.values()) == {1}


def test_what_always_crashes_ends_the_run_and_leaves_all_prompts_in_the_source(make_args: Args, use: Use) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    use(FakeClient(crash))
    args, source = make(make_args)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        generate_rollout_fully_async(args, 0, source)
    assert source.get_buffer_length() >= 4
    assert source.num_read == source.get_buffer_length() + source.num_in_flight()
    use(FakeClient(Engine()))
    take(args, 0, source)


def test_failure_ends_the_waiting_rollout_at_once_with_its_cause(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient(Engine()))
    hook = hook_file(tmp_path, "def rm(args, sample): raise OSError('no judge')\n")
    args, source = make(make_args, custom_rm_path=f"{hook}:rm", on_sample_error="stop", rollout_timeout=200.0)
    started = time.monotonic()
    with pytest.raises(HookError, match="no judge"):
        generate_rollout_fully_async(args, 0, source)
    assert time.monotonic() - started < args.rollout_timeout / 2


def test_counters_are_of_each_rollout_and_nothing_is_begun_for_the_end(
    make_args: Args, use: Use, tmp_path: Path
) -> None:
    engine = Engine()
    use(FakeClient(engine))
    hook = hook_file(
        tmp_path,
        "import time\ndef keep(args, samples):\n    time.sleep(0.02)\n    return samples[0].group_index % 2 == 0\n",
    )
    args, source = make(make_args, dynamic_sampling_filter_path=f"{hook}:keep")
    args.num_rollout = 4
    dropped = 0.0
    for rollout_id in range(4):
        engine.push(rollout_id)
        dropped += (take(args, rollout_id, source).metrics or {}).get("rollout/dynamic_filter/drop_dynamic", 0.0)
    time.sleep(0.2)
    assert dropped == source.num_dropped["filter_dynamic"]
    assert source.num_in_flight() == 0


def test_deadline_says_what_it_waits_for(make_args: Args, use: Use) -> None:
    engine = Engine(slow=tuple(range(200)))

    async def never(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if number == 8:
            skip(1000)
        return await engine(number, input_ids, params)

    use(FakeClient(never))
    args, source = make(make_args)
    expected = r"rollout 5: 0 of 8 samples finished; waiting for sample \d+ \(generating .* within 20 s \(--rollout-ti"
    with pytest.raises(TimeoutError, match=expected):
        generate_rollout_fully_async(args, 5, source)


def test_evaluation_is_the_usual_one(make_args: Args, use: Use, write_jsonl: Callable[..., str]) -> None:
    use(FakeClient(Engine()))
    args, source = make(make_args)
    args.eval_prompt_data = [["e", write_jsonl([{"prompt": "abc", "label": "3"}], "eval.jsonl")]]
    args.eval_datasets = eval_datasets(args)
    output = generate_rollout_fully_async(args, 0, source, evaluation=True)
    assert output.data["e"]["rewards"] == [1.0]  # type: ignore[union-attr]


def test_samples_carry_nothing_of_the_stream(make_args: Args, use: Use) -> None:
    use(FakeClient(Engine()))
    args, source = make(make_args)
    (first, *_) = flatten_samples(take(args, 0, source).samples)
    assert isinstance(first, Sample)
    assert first.metadata == {}


def test_settings_that_are_wrong_end_the_stream_at_once(make_args: Args, use: Use, tmp_path: Path) -> None:
    client = use(FakeClient(Engine()))
    hook = hook_file(tmp_path, "async def rm(args, sample): return {'score': 1.0}\n")
    args, source = make(make_args, custom_rm_path=f"{hook}:rm")
    with pytest.raises(SettingError, match="--reward-key"):
        generate_rollout_fully_async(args, 0, source)
    assert client.running == 0
