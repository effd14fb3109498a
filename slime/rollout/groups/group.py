"""One group on its way: each sample generated, shown to hooks and rewarded, and what becomes of those that fail."""

from __future__ import annotations

import contextlib
import copy
import pickle
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from slime.algorithms.rewards import LARGEST_REWARD
from slime.data import Group, Sample, Status
from slime.data.rows.conversation import RowError
from slime.data.sample_values import check_filled
from slime.data.source.numbers import Numbers, numbers_kept, numbers_of, restore, same
from slime.data.source.rollout_context import current_rollout
from slime.observability import events
from slime.options.flags.schema import flag_named
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.train_data import check_response
from slime.rollout.engine.generation import generate, warm_up
from slime.rollout.engine.loop import run_all
from slime.rollout.engine.state import RolloutState, state_of_call
from slime.rollout.engine.versions import newest_version, note_version
from slime.rollout.on_policy_distillation import lacks_teacher
from slime.rollout.rm_hub import async_rm, batched_async_rm, judge_of
from slime.rollout.sampling import request_seed
from slime.rollout.user.hooks import Limit, accepted, call_hook
from slime.utils.calls import parameters_of
from slime.utils.errors import BadInputError, DeadlineError, HookError, SettingError, SlimeError
from slime.utils.http_client import NoReplyError, RequestError
from slime.utils.misc import load_function
from slime.utils.user_functions import naming

T = TypeVar("T")

_MAX_ABORTS = 16
_TRIES = 3
"""Of each sample with ``--on-sample-error retry``."""
_FINISHED = (Status.COMPLETED, Status.TRUNCATED)
_REFUSED = (400, 413, 422)
"""Statuses by which an engine refuses one request: others would come to all."""


async def generate_and_rm(
    args: Namespace, sample_or_group: Sample | Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate and reward a sample, or all of a group; one that is complete is only rewarded, one that has a reward is
    left as it is. ``evaluation`` is passed on to functions of the user that take it. A ``sampling_seed`` is a group's:
    each of its samples gets one derived from it, because requests with equal seeds and prompts give equal responses.

    Returns the sample, or the list of samples that a custom generate function cut it into; for a group a list of these.
    A sample that failed for good has status FAILED and no reward; with ``--on-sample-error stop``, or where engines
    fail, its HookError, DeadlineError or RequestError is raised.
    """
    async with state_of_call(args) as state:
        if isinstance(sample_or_group, Sample):
            run = GroupRun(args, state, [sample_or_group], sampling_params, evaluation)
            return (await run.run(seeded=False))[0]
        return await GroupRun(args, state, sample_or_group, sampling_params, evaluation).run()


generate_and_rm_group = generate_and_rm
"""Upstream's name for a group."""


class GroupRun:
    """A group, and what has become of each of its samples so far."""

    def __init__(
        self, args: Namespace, state: RolloutState, group: Group, params: dict[str, Any], evaluation: bool = False
    ) -> None:
        self.args = args
        self._state = state
        self.results: list[Sample | list[Sample]] = list(group)
        """In the order of the group; a list where a custom generate function cut a sample into several."""
        self._params = params
        self._evaluation = evaluation
        self._generated = {position for position, sample in enumerate(group) if sample.status in _FINISHED}
        """Positions of samples that need no more than a reward."""
        self._numbers = [numbers_of(sample) for sample in group]
        self._untouched: dict[int, bytes] = {}
        """By position, samples as they were: those that a user's function gets, and those that go on."""

    async def run(self, *, seeded: bool = True) -> list[Sample | list[Sample]]:
        """Generate and reward all samples, by seeds of their own if ``seeded``; raises as `generate_and_rm` does."""
        if self.args.rollout_prefix_warmup:
            await self._warm_up()
        await run_all([self._member(position, seeded) for position in range(len(self.results))])
        if self.args.group_rm:
            await self._reward_group()
        return self.results

    async def _warm_up(self) -> None:
        """Have the prompt computed once, if several responses to it are yet to begin; with media, text is not all of
        it. What is wrong with a prompt, or with all engines, the responses find themselves, and are tried again."""
        unbegun = [
            sample
            for position, sample in enumerate(self.results)
            if position not in self._generated and isinstance(sample, Sample) and not sample.response_length
        ]
        if len(unbegun) < 2 or unbegun[0].multimodal_inputs is not None:
            return
        with self._state.doing(unbegun[0], "warming up"), contextlib.suppress(SlimeError, TimeoutError):
            await warm_up(self.args, self._state, unbegun[0], self._params)

    def unfinished(self) -> Group:
        """The samples as they can go back to a data source, after `run` was cancelled or its requests were aborted.

        Finished samples stay as they are, to be rewarded if they were not. With ``--partial-rollout`` so do partial
        ones, whose ``metadata["start_rollout_id"]`` is the rollout that began them; others lose their responses.
        """
        return [part for position in range(len(self.results)) for part in self._to_go_on(position)]

    def finished(self) -> Group:
        """The samples as they can go back to a data source, after `run` was done."""
        return [part for position in range(len(self.results)) for part in self._parts(position)[0]]

    def _parts(self, position: int) -> tuple[list[Sample], Sample | None]:
        """What a sample was made into, with its metadata as it was; and that sample, where it is known."""
        parts = flatten_samples(self.results[position])
        before: Sample | None = pickle.loads(self._untouched[position]) if position in self._untouched else None
        if before is not None:
            for part in parts:
                part.note_metadata(before)
        return parts, before

    def _to_go_on(self, position: int) -> list[Sample]:
        parts, before = self._parts(position)
        for part in parts:  # a function that was given up in the middle may have changed them
            restore(part, self._numbers[position], "a function that was not done")
        if position in self._generated and all(part.status in _FINISHED for part in parts):
            return parts
        sample = parts[0]
        is_partial = len(parts) == 1 and sample.status is Status.ABORTED and sample.response_length > 0
        if is_partial and self.args.partial_rollout:
            sample.metadata.setdefault("start_rollout_id", current_rollout())
            if self.args.mask_offpolicy_in_partial_rollout:
                note_version(sample, newest_version(self.args), as_segment=True)
            return parts
        if before is not None:
            sample = before
        sample.begin_anew()
        return [sample]

    async def _member(self, position: int, seeded: bool) -> None:
        sample = self.results[position]
        if position not in self._generated:
            assert isinstance(sample, Sample)
            params = dict(self._params)
            if seeded and (seed := params.get("sampling_seed")) is not None:
                params["sampling_seed"] = request_seed(seed, position)
            with self._state.doing(sample, "generating"):
                await self._generate(position, sample, params)
        if not self.args.group_rm:
            parts = flatten_samples(self.results[position])
            with self._state.doing(parts[0], "rewarding"):
                jobs = [self._reward(part) for part in parts if self._wants_reward(part)]
                # Most samples are one part, which needs no task of its own.
                await (jobs[0] if len(jobs) == 1 else run_all(jobs))
        self._state.num_samples_done += 1

    async def _generate(self, position: int, sample: Sample, params: dict[str, Any]) -> None:
        path = sample.generate_function_path or self.args.custom_generate_function_path
        judge = sample.custom_rm_path or self.args.custom_rm_path
        if path or sample.response_length or self.args.rollout_sample_hook_path or judge:
            self._untouched[position] = _pickled(sample)

        async def attempt(number: int) -> Sample | list[Sample]:
            failure = sample.failure
            given = self._as_it_was(position) if number else sample
            result: Sample | list[Sample]
            if path is None:
                result = await self._show(await generate(self.args, given, params))
            else:
                made = await self._custom(position, path, given, params)
                result = [await self._show(part) for part in made] if isinstance(made, list) else await self._show(made)
            for part in flatten_samples(result):
                part.failure = part.failure or failure
                if part.reward is not None:
                    self._with_reward(part, part.reward, f"the generation by {path or 'a sample hook'}")
                # A filter may leave such samples out by itself: `Pool` looks at what it keeps.
                is_over = self._evaluation or self._state.ending
                judged_later = is_over or self.args.dynamic_sampling_filter_path is not None
                if not judged_later and (problem := untrainable(self.args, part)):
                    raise RowError(problem)
            return result

        result = await self._tried(sample, "generate", attempt)
        if result is not None:
            self.results[position] = result
            self._generated.add(position)
        elif position in self._untouched:
            failed = self._as_it_was(position)
            failed.status, failed.failure = Status.FAILED, sample.failure

    def _as_it_was(self, position: int) -> Sample:
        """For another try: a new object where a user's function, given up, may go on writing into the old one."""
        sample = self.results[position]
        assert isinstance(sample, Sample)
        if position in self._untouched:
            sample = self.results[position] = pickle.loads(self._untouched[position])
        else:
            sample.reset_response()
        return sample

    async def _custom(self, position: int, path: str, sample: Sample, params: dict[str, Any]) -> Sample | list[Sample]:
        """Call a user's generate function; one with a parameter ``samples`` is given a list of the one sample. One that
        reports an aborted request, by a sample's status, is called again with a new copy: only it knows how to go
        on."""
        flag = "--custom-generate-function-path"
        if path == sample.generate_function_path:
            flag = "Sample.generate_function_path"
        function = load_function(path, flag=flag, default_names=("generate", "custom_generate"))
        takes_list = "samples" in parameters_of(function)
        for attempt in range(_MAX_ABORTS):
            given, version = self._as_it_was(position) if attempt else sample, newest_version(self.args)
            own = copy.deepcopy(params)  # what it changes in them is for this call
            by_position = [[given]] if takes_list else [given, own]
            by_name = {"sampling_params": own} if takes_list else {}
            known = accepted(function, evaluation=self._evaluation, **by_name)
            limit = self._limit(f"the generation of sample {sample.index} by {flag} {path}")
            numbers = numbers_of(given)
            result = await call_hook(function, f"{flag} {path}", self.args, *by_position, limit=limit, **known)
            result = _checked(result, numbers, f"{flag} {path}", self._vocabulary())
            if self.args.asynchronous or self.args.mask_offpolicy_in_partial_rollout:
                for part in flatten_samples(result):
                    note_version(part, version)  # when it was called: the oldest that it can be
            if self._state.ending or all(part.status is not Status.ABORTED for part in flatten_samples(result)):
                return result
        raise HookError(
            f"{flag} {path} returned sample {sample.index} as aborted {_MAX_ABORTS} times; slime's `generate` goes on "
            "with a request that a weight update has interrupted"
        )

    def _vocabulary(self) -> int | None:
        """None where nobody trains on samples as a generate function leaves them."""
        own = self._evaluation or self.args.custom_convert_samples_to_train_data_path is not None
        return None if own else self.args.vocab_size

    async def _show(self, sample: Sample) -> Sample:
        flag = "--rollout-sample-hook-path"
        for path in self.args.rollout_sample_hook_path or []:
            function = load_function(path, flag=flag, default_names=("sample_hook", "rollout_sample_hook"))
            known = accepted(function, rollout_id=current_rollout(), evaluation=self._evaluation)
            limit = self._limit(f"{flag} {path} with sample {sample.index}")
            numbers = numbers_of(sample)
            shown = await call_hook(function, f"{flag} {path}", self.args, sample, limit=limit, **known)
            if shown is not None and not isinstance(shown, Sample):
                raise HookError(f"{flag} {path} must return a Sample or None, not {shown!r:.120}")
            sample = sample if shown is None else shown
            restore(sample, numbers, f"{flag} {path}")
        return sample

    def _limit(self, what: str) -> Limit | None:
        seconds = self.args.generate_timeout
        return None if seconds is None else Limit(seconds, "--generate-timeout", what)

    def _wants_reward(self, sample: Sample) -> bool:
        """Whether it is judged: a sample that has its reward already is where the same function asks a teacher."""
        if sample.status in (Status.ABORTED, Status.FAILED):
            return False
        return sample.reward is None or (not self._evaluation and lacks_teacher(self.args, sample))

    async def _reward(self, sample: Sample) -> None:
        async def attempt(number: int) -> Sample:
            judge = judge_of(self.args, sample)
            with naming("the reward", passes=SlimeError), numbers_kept([sample], judge):
                return self._with_reward(sample, await async_rm(self.args, sample), judge)

        await self._tried(sample, "reward", attempt)

    async def _reward_group(self) -> None:
        samples = flatten_samples(self.results)
        is_cut = any(sample.status in (Status.ABORTED, Status.FAILED) for sample in samples)
        if is_cut or not any(map(self._wants_reward, samples)):
            return

        async def attempt(number: int) -> list[Sample]:
            judge = judge_of(self.args, samples[0])
            with naming("the reward", passes=SlimeError), numbers_kept(samples, judge):
                rewards = await batched_async_rm(self.args, samples)
            pairs = [(s, reward) for s, reward in zip(samples, rewards, strict=True) if self._wants_reward(s)]
            return [self._with_reward(sample, reward, judge_of(self.args, sample)) for sample, reward in pairs]

        with self._state.doing(samples[0], "rewarding its group"):
            await self._tried(samples[0], "reward", attempt)

    async def _tried(self, sample: Sample, what: str, attempt: Callable[[int], Awaitable[T]]) -> T | None:
        """What the first successful attempt gives, called with the number of those that failed before it; None where
        the sample has failed for good, which its status then says."""
        how, state = self.args.on_sample_error, self._state
        tries = _TRIES if how == "retry" else 1
        for number in range(tries):
            try:
                return await attempt(number)
            except SlimeError as error:
                if how == "stop" or state.ending or not _is_of_sample(error, what):
                    raise
                reason = f"{what}_timeout" if isinstance(error, (DeadlineError, NoReplyError)) else f"{what}_error"
                state.failures[reason] += 1
                sample.failure = f"{reason}: {error}"
                state.runtime.failures.warn(f"sample {sample.index}, try {number + 1} of {tries}", reason, error)
                is_last = number + 1 == tries or (what == "reward" and _is_refusal(error))
                if state.failures[reason] == 1:
                    self._tell(sample, what, error, "it is given up" if is_last else "it is tried again")
                if is_last:
                    break
        sample.status, sample.reward = Status.FAILED, None
        return None

    def _tell(self, sample: Sample, what: str, error: SlimeError, action: str) -> None:
        kind = "reward_failed" if what == "reward" else "request_failed"
        number = current_rollout()
        phase = "evaluation" if self._evaluation else "rollout" if number is None else f"rollout {number}"
        events.add(kind, f"sample {sample.index}", phase=phase, cause=str(error), action=action)

    def _with_reward(self, sample: Sample, reward: Any, judge: str) -> Sample:
        if reward is None and not self._evaluation:
            raise HookError(f"sample {sample.index} has no reward (status {sample.status.value}): {judge} gave None")
        sample.reward = reward
        try:
            self._must_be_trainable(sample, judge)
        except SlimeError:
            sample.reward = None
            raise
        return sample

    def _must_be_trainable(self, sample: Sample, judge: str) -> None:
        args = self.args
        name = "eval_reward_key" if self._evaluation else "reward_key"
        key = getattr(args, name)
        own = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
        if sample.reward is None or (isinstance(sample.reward, dict) and key is None and own):
            return
        try:
            value = sample.get_reward_value(Namespace(reward_key=key), flag_named(name))
        except (ValueError, TypeError, OverflowError) as error:
            # Of a judge that gives numbers too it is an odd answer; else the key is missing, which no try can mend.
            is_odd = (
                judge in self._state.runtime.judges_of_numbers or not isinstance(sample.reward, dict) or key is not None
            )
            kind = HookError if is_odd or args.on_sample_error == "drop" else SettingError
            raise kind(f"{judge}: {error}") from error
        if not isinstance(sample.reward, dict):
            self._state.runtime.judges_of_numbers.add(judge)
        if not abs(value) <= LARGEST_REWARD:
            raise HookError(
                f"sample {sample.index}: its reward is {value:g}, of which no advantage can be made: {judge} gave it, "
                f"and must give numbers within {LARGEST_REWARD:g}"
            )


def untrainable(args: Namespace, sample: Sample) -> str | None:
    """Why a finished sample cannot be trained; None where it can, or a user's own conversion is to judge."""
    if sample.status not in _FINISHED or args.custom_convert_samples_to_train_data_path is not None:
        return None
    try:
        check_response(sample, f"sample {sample.index} (status {sample.status.value})")
    except ValueError as error:
        return str(error)
    return None


def _pickled(sample: Sample) -> bytes:
    try:
        return pickle.dumps(sample)
    except Exception as error:
        raise SettingError(
            f"sample {sample.index} cannot be copied for another try: {type(error).__name__}: {error}; what a data "
            "source puts into its metadata must be picklable"
        ) from error


def _is_of_sample(error: Exception, what: str) -> bool:
    if isinstance(error, SettingError):
        return False
    if what != "generate":
        return True
    return isinstance(error, (HookError, DeadlineError, RowError, NoReplyError)) or (
        isinstance(error, RequestError) and error.status in _REFUSED
    )


def _is_refusal(error: Exception) -> bool:
    """Whether a reward, ours or a user's, says that what it was given cannot be used: another try would end alike."""
    return isinstance(error, BadInputError) or isinstance(error.__cause__, BadInputError)


def _checked(result: Any, numbers: Numbers, where: str, vocab_size: int | None) -> Sample | list[Sample]:
    """The result of a custom generate function; all its samples have the numbers of the one that it was given."""
    parts = result if isinstance(result, list) else [result]
    if not parts or not all(isinstance(part, Sample) for part in parts):
        raise HookError(f"{where} must return a Sample or a non-empty list of Sample, not {result!r:.120}")
    for part in parts:
        if part.status is Status.PENDING:
            part.status = Status.COMPLETED
        try:
            check_filled(part, vocab_size)
        except ValueError as error:
            raise HookError(f"{where} returned an inconsistent sample: {error}") from error
    ids = [part.rollout_id for part in parts if part.rollout_id is not None]
    if not all(same(one, ids[0]) for one in ids):
        raise HookError(f"{where} cut one rollout into samples of different rollout_id {ids}")
    for part in parts:
        restore(part, numbers, where)
    return result
