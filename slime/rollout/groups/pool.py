"""Groups under way: begun, judged by the filter when they are done, and ended when they are no longer needed."""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from slime.data import Group, Sample, Status
from slime.data.rows.conversation import RowError
from slime.data.source.numbers import numbers_kept
from slime.data.source.prompts import as_prompts, count_dropped, draw_groups, put_back
from slime.observability.logs import should_log
from slime.observability.trace import span
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.reward_log import one_of
from slime.rollout.engine.loop import cancel, in_own_thread
from slime.rollout.engine.state import POSITION, RolloutState
from slime.rollout.engine.versions import MASKED_TOKENS, mask_older_tokens, newest_version, oldest_version
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.groups.group import GroupRun, untrainable
from slime.rollout.sampling import seeded, train_sampling_params
from slime.rollout.user.hooks import call_hook
from slime.utils.errors import HookError, SettingError
from slime.utils.misc import attribute_of, load_function
from slime.utils.user_functions import setting

logger = logging.getLogger(__name__)

_ABORT_S = 10.0
_ABORT_POLL_S = 0.2
_DRAIN_GRACE_S = 0.5
"""For a user's code to return what it has, once its requests are ended."""
_MANY_DROPPED = 32
"""Groups in a row; a filter that keeps one in five on average drops as many by chance once in some 1000 times."""
_NO_REASON = "dynamic"
"""Of a filter that gives none."""


async def call_batch_hook(state: RolloutState, flag: str, path: str, samples: list[Any], *values: Any) -> Any:
    """What a user's function of a whole group or batch (``samples``) gives; the deadline's message names it."""
    where = f"{flag} {path}"
    with state.busy(f"waiting for {where}"), numbers_kept(flatten_samples(samples), where):
        return await call_hook(load_function(path, flag=flag), where, *values)


class Kept(NamedTuple):
    """A group that is done, to be trained on."""

    number: int
    """Its place in the order of drawing."""
    run: GroupRun
    oldest: int | None
    """The oldest weights that made any of its tokens; None where that is not known."""


class _Running(NamedTuple):
    number: int
    run: GroupRun
    oldest: int


class Pool:
    """Groups under way, and those that are done and were kept, for one rollout or for a stream of them."""

    def __init__(
        self, args: Namespace, source: Any, state: RolloutState, rollout_id: int, *, forgives: bool = False
    ) -> None:
        """Seeds of a deterministic engine depend on ``rollout_id``. With ``forgives`` a group that crashes goes back to
        the data source; else its exception is `advance`'s."""
        self._forgives = forgives
        self._args = args
        self._source = source
        self._state = state
        self._rollout_id = rollout_id
        self._running: dict[asyncio.Task[Any], _Running] = {}
        self._done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._num_begun = 0
        self.kept: list[Kept] = []
        """In the order in which they were done."""
        self._all_done: list[tuple[int, Group]] = []
        self.dropped: Counter[str] = Counter()
        """By reason; of these the filter's in ``filtered``, by its own."""
        self.filtered: Counter[str] = Counter()
        self._dropped_in_a_row: Counter[str] = Counter()
        """The filter's, by its reasons, since it has kept a group."""
        self.num_failed = 0
        self.num_stale = 0
        self._num_masked = 0
        """Tokens of older weights."""

    @property
    def num_under_way(self) -> int:
        """Groups that were begun and are neither kept, dropped nor put back."""
        return len(self._running)

    @property
    def oldest_under_way(self) -> list[int]:
        """Of each group under way no token was made by older weights than these."""
        return [running.oldest for running in self._running.values()]

    async def draw(self, num_groups: int, version: int = 0) -> None:
        """Begin new groups of the data source, which may take its time in a thread of its own."""
        with self._state.busy("waiting for --data-source-path"):
            groups = await in_own_thread(draw_groups, self._args, self._source, num_groups)
        self.begin(groups, version)

    def begin(self, groups: list[Group], version: int = 0) -> None:
        """Begin to generate groups, by weights of ``version`` or newer."""
        params = train_sampling_params(self._args)
        for group in groups:
            self._state.num_samples += len(group)
            params_of = seeded(self._args, params, "rollout", self._rollout_id, group[0].group_index)
            run = GroupRun(self._args, self._state, group, params_of)
            with setting(POSITION, self._num_begun):
                task = asyncio.create_task(run.run())
            before = oldest_version(group)
            oldest = version if before is None else min(version, before)
            self._running[task] = _Running(self._num_begun, run, oldest)
            task.add_done_callback(self._done.put_nowait)
            self._num_begun += 1

    async def advance(self, wanted: int) -> None:
        """Wait until another group is done; keep it, or drop it with a reason. HookError where the filter failed, or
        more groups failed than are ``wanted``; else what a group raised."""
        task = await self._done.get()
        number, run, _ = self._running[task]
        error = None if task.cancelled() else task.exception()
        if self._forgives and isinstance(error, Exception) and not isinstance(error, SettingError):
            try:
                await self._put_back_crashed(run, error, wanted)
            finally:
                del self._running[task]  # its thread puts it back, also when nobody waits for that any longer
            return
        results = task.result()
        samples = flatten_samples(results)
        failed = [sample for sample in samples if sample.status is Status.FAILED]
        # A group whose filter fails, or is cancelled, is still one that `end` puts back.
        verdict = None if failed else await self._judge(number, results)
        # Only now: who fills the pool while the filter takes its time must not take its place for free.
        del self._running[task]
        if verdict is None:
            self._give_up(samples, failed[0], wanted)
        elif verdict.keep or (verdict.keep_when_insufficient and len(self.kept) + self.num_under_way < wanted):
            self._keep(number, run, wanted)
        else:
            reason = verdict.reason or _NO_REASON
            self.filtered[reason] += 1
            self._drop(samples, f"filter_{reason}")
            self._dropped_in_a_row[reason] += 1
            self._warn_of_filter(samples)

    async def _put_back_crashed(self, run: GroupRun, error: Exception, wanted: int) -> None:
        self._state.failures["crash"] += 1
        self.num_failed += 1
        await in_own_thread(put_back, self._source, [run.unfinished()])
        if self.num_failed > wanted:
            raise error
        logger.warning("a group crashed and is generated again", exc_info=error)

    def _keep(self, number: int, run: GroupRun, wanted: int) -> None:
        samples = flatten_samples(run.results)
        problems = ((sample, untrainable(self._args, sample)) for sample in samples)
        failed, problem = next(((sample, why) for sample, why in problems if why is not None), (None, None))
        if failed is None:
            self._dropped_in_a_row.clear()
            self.kept.append(Kept(number, run, oldest_version(samples)))
        elif self._args.on_sample_error == "stop":
            raise RowError(problem)
        else:
            failed.failure = f"generate_error: {problem}"
            self._give_up(samples, failed, wanted)

    def _give_up(self, samples: Group, failed: Sample, wanted: int) -> None:
        failure = failed.failure or "generate_failed: a custom generate function left status FAILED"
        self._drop(samples, failure.partition(":")[0])
        self.num_failed += 1
        if self.num_failed > wanted:
            others = self.kept or self.filtered
            every = "" if others else "all "
            raise HookError(
                f"{every}{self.num_failed} groups failed, more than a rollout has (--on-sample-error "
                f"{self._args.on_sample_error}); the last one: {failure}"
            )

    def _drop(self, samples: Group, reason: str) -> None:
        self.dropped[reason] += 1
        count_dropped(self._source, samples, reason)

    def _warn_of_filter(self, samples: list[Sample]) -> None:
        """Of a filter that keeps nothing more: until the rollout's deadline it would look like a run that hangs."""
        dropped = self._dropped_in_a_row.total()
        if dropped < _MANY_DROPPED or not should_log(dropped):
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._dropped_in_a_row.most_common())
        told = "" if set(self._dropped_in_a_row) == {_NO_REASON} else f" ({reasons})"
        logger.warning(
            "--dynamic-sampling-filter-path has dropped %d groups in a row%s: check the filter, the reward function "
            "and --label-key, or take easier or harder prompts\n%s",
            *(dropped, told, one_of(samples)),
        )

    def progress(self) -> str:
        """What is done and what it waits for, for the message of a deadline."""
        if not self.dropped:
            return self._state.progress()
        dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in self.dropped.items())
        return f"{len(self.kept)} groups kept, {dropped}; {self._state.progress()}"

    async def _judge(self, number: int, results: list[Any]) -> DynamicFilterOutput:
        if self._args.rollout_all_samples_process_path is not None:
            self._all_done.append((number, results))
        path = self._args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(keep=True)
        flag = "--dynamic-sampling-filter-path"
        samples = flatten_samples(results)
        with span("rollout/filter", group=samples[0].group_index):
            verdict = await call_batch_hook(self._state, flag, path, samples, self._args, samples)
        where = f"{flag} {path}: its answer"
        if isinstance(verdict, bool) or attribute_of(verdict, "ndim", None, where) == 0:  # a tensor's comparison
            return DynamicFilterOutput(keep=bool(verdict))
        if not isinstance(verdict, DynamicFilterOutput):
            raise HookError(f"{flag} {path} must return a bool or a DynamicFilterOutput, not {verdict!r:.120}")
        return verdict

    def take_all_done(self) -> list[Group]:
        """Every group that was judged since the last call, filtered ones included, in the order of drawing: for
        ``--rollout-all-samples-process-path``, without which there are none."""
        done, self._all_done = self._all_done, []
        return [results for _, results in sorted(done, key=lambda entry: entry[0])]

    def take(self, places: Iterable[int], rollout_id: int) -> list[list[Any]]:
        """Of the groups that were kept those at ``places``, in the order of drawing, for a rollout to be trained on."""
        taken = [self.kept[place] for place in places]
        numbers = {entry.number for entry in taken}
        self.kept = [entry for entry in self.kept if entry.number not in numbers]
        self.num_failed = 0
        groups: list[list[Any]] = [entry.run.results for entry in sorted(taken, key=lambda entry: entry.number)]
        samples = flatten_samples(groups)
        for sample in samples:
            sample.metadata_before = None  # it waits no longer
        if self._args.mask_offpolicy_in_partial_rollout:
            self._num_masked += mask_older_tokens(samples, newest_version(self._args, rollout_id))
            if not any(sample.effective_response_length for sample in samples):
                logger.warning(
                    "rollout %d: older weights generated every token, and --mask-offpolicy-in-partial-rollout leaves "
                    "nothing to train on: lower --max-weight-staleness or --over-sampling-batch-size, or drop the flag",
                    rollout_id,
                )
        return groups

    def older(self, version: int) -> list[Kept]:
        """Kept groups with tokens of weights older than ``version``."""
        return [entry for entry in self.kept if entry.oldest is not None and entry.oldest < version]

    async def return_older(self, version: int) -> bool:
        """Put kept groups that are `older` back into the data source, to be generated anew; whether there are any."""
        stale = self.older(version)
        if not stale:
            return False
        numbers = {entry.number for entry in stale}
        self.kept = [entry for entry in self.kept if entry.number not in numbers]
        self.num_stale += len(stale)
        prompts = [as_prompts(self._source, entry.run.finished()) for entry in stale]
        await in_own_thread(put_back, self._source, prompts)
        return True

    async def end(self) -> dict[str, float]:
        """End what is under way, and put it and what was kept besides back into the data source; how much it was."""
        self._state.ending = True
        if self._running:
            await self._end_requests()
            await asyncio.wait(self._running, timeout=_DRAIN_GRACE_S)
        await cancel(list(self._running))
        left = [entry.run.finished() for entry in self.kept]
        left += [running.run.unfinished() for running in self._running.values()]
        self._running, self.kept = {}, []
        await in_own_thread(put_back, self._source, left)
        cut = [group for group in left if any(sample.reward is None for sample in group)]
        return {
            "rollout/surplus_groups": float(len(left) - len(cut)),
            "rollout/aborted_groups": float(len(cut)),
            "rollout/partial_samples": float(sum(s.status is Status.ABORTED for group in cut for s in group)),
        }

    async def _end_requests(self) -> None:
        """Have the engines answer with what they have; a request that is on its way there is ended by the next try."""
        deadline = time.monotonic() + _ABORT_S
        everything = not self._args.asynchronous  # nothing else generates at the same time
        if everything and not self._state.requests:
            await self._state.runtime.abort_requests(None)  # those that a user's code has sent by itself
        while self._state.requests and time.monotonic() < deadline:
            if not await self._state.runtime.abort_requests(None if everything else list(self._state.requests)):
                return
            await asyncio.sleep(_ABORT_POLL_S)

    async def cancel(self) -> None:
        """Give everything up, after an error."""
        await cancel(list(self._running))

    def metrics(self) -> dict[str, float]:
        """How many groups were filtered, and how often samples failed, by reason, since it was asked last."""
        figures = {f"rollout/dynamic_filter/drop_{reason}": float(n) for reason, n in self.filtered.items()}
        figures |= {f"rollout/sample_failures/{reason}": float(n) for reason, n in self._state.failures.items()}
        stale = {"rollout/stale_groups_returned": float(self.num_stale)} if self._forgives else {}
        self.filtered.clear()
        self._state.failures.clear()
        if self._args.mask_offpolicy_in_partial_rollout:
            figures[MASKED_TOKENS] = float(self._num_masked)
        self.num_stale = self._num_masked = 0
        return figures | stale
