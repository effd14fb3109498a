"""A sample: one prompt and (part of) one response, as it is generated, judged, buffered and trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Self

from slime.data import media, routes


class Status(Enum):
    """Where a sample is in its life."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class _Counters:
    def to_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**data)


@dataclass
class SpecInfo(_Counters):
    """Speculative-decoding counters of one sample, summed over its requests."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 where nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens that one verification brought; 0 where nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one reply by the engine's ``meta_info``; releases of SGLang differ in two of the names."""
        self.spec_accept_token_num += _count(meta_info, "spec_accept_token_num", "spec_num_correct_drafts")
        self.spec_draft_token_num += _count(meta_info, "spec_draft_token_num", "spec_num_proposed_drafts")
        self.spec_verify_ct += _count(meta_info, "spec_verify_ct")
        self.completion_token_num += _count(meta_info, "completion_tokens")


@dataclass
class PrefixCacheInfo(_Counters):
    """Prefix-cache counters of one sample, summed over its requests."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens whose keys and values were there already; 0 before the first request."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one reply by the engine's ``meta_info``."""
        self.cached_tokens += _count(meta_info, "cached_tokens")
        self.total_prompt_tokens += _count(meta_info, "prompt_tokens")


def _count(meta_info: Mapping[str, Any], *names: str) -> int:
    return next((meta_info[name] for name in names if meta_info.get(name) is not None), 0)


_WITH_MEDIA = (
    *("prompt", "metadata", "metadata_before", "train_metadata"),
    *("multimodal_inputs", "multimodal_train_inputs", "columns"),
)
"""Fields of a sample that may hold references to media."""


@dataclass
class Sample:
    """One prompt and (part of) one response.

    ``tokens`` holds prompt and response; ``loss_mask`` and ``rollout_log_probs`` cover the response only, one entry a
    token. Samples that one rollout was cut into share ``rollout_id``; samples of one prompt share ``group_index``.
    ``weight_versions`` has the weights of every segment that an engine generated, ``segment_starts`` where in the
    response it begins, ``segment_lengths`` its tokens.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any | None = None
    """The row's ``--label-key`` with the type that it has there: text, a number, a list of answers, an object."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    metadata_before: dict[str, Any] | None = None
    """Of a sample that waits to go on: what ``metadata`` was before a user's function wrote into it. It is that again
    where the sample begins anew."""
    failure: str | None = None
    """What went wrong in the last try that failed; where none succeeded, ``status`` is FAILED."""

    multimodal_inputs: Any | None = None
    multimodal_train_inputs: Any | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None

    weight_versions: list[str] = field(default_factory=list)
    segment_starts: list[int] = field(default_factory=list)
    segment_lengths: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any | None = None
    """An array as `slime.data.routes` has them, where the run replays its engines' routes."""
    teacher_log_probs: Any | None = None
    """A number for each response token, of a server's in on-policy distillation."""
    columns: dict[str, Any] = field(default_factory=dict)
    """By name, values of the columns that a module of the user's declares (`slime.data.columns`)."""

    remove_sample: bool = False
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    trace: dict[str, Any] | None = None
    """What was done for it and when, of every try, as `slime.observability.trace_utils` records it."""

    Status = Status
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    def __post_init__(self) -> None:
        # `append_response_tokens` grows these in place: samples that were made of one list must not share it.
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            if isinstance(column := getattr(self, name), list):
                setattr(self, name, list(column))
        self.columns = dict(self.columns)

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that count in the loss."""
        if self.remove_sample:
            return 0
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any, flag: str = "--reward-key") -> float:
        """The scalar reward; of a dict reward the entry named by ``args.reward_key``. ValueError where there is none,
        which names the ``flag`` that it is of."""
        key = getattr(args, "reward_key", None)
        if self.reward is None:
            raise ValueError(f"sample {self.index} (group {self.group_index}) has no reward")
        if isinstance(self.reward, dict):
            if key is None or key not in self.reward:
                raise ValueError(
                    f"sample {self.index}: the reward is a dict with keys {sorted(self.reward)}; "
                    f"name one of them with {flag} (now {key!r})"
                )
            return float(self.reward[key])
        return float(self.reward)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, keeping mask, log-probs, length, versions, counters and status consistent.

        The sample's lists grow in place: who holds one of them sees what is appended. ValueError, and the sample as it
        was, of trainable tokens without as many log-probs, or lengths that contradict each other.

        Args:
            tokens: token ids to append: a list, an array or a tensor; None for a reply without any.
            log_probs: the engine's log-probs, one a token; required for trainable tokens, not read of others: those
                have 0.0.
            trainable: whether the tokens count in the loss (model output) or not (tool output).
            meta_info: the engine's ``meta_info`` of the reply: weight version, finish reason (an object with a
                ``type``, or that as a string), and the counters of ``spec_info`` and ``prefix_cache_info`` are taken
                from it, and routes where ``args`` has them replayed.
            text: text to append to ``response``.
            update_terminal_info: whether ``meta_info`` decides ``status``.
        """
        new = [] if tokens is None else [int(token) for token in tokens]
        given = None if log_probs is None else [float(log_prob) for log_prob in log_probs]
        if trainable and len(given or []) != len(new):
            got = "none" if given is None else str(len(given))
            raise ValueError(f"{len(new)} trainable tokens need as many log-probs, got {got}")
        # All that may fail comes before anything grows.
        info = {} if meta_info is None else dict(meta_info)
        reason = info.get("finish_reason")  # SGLang's object, or the plain string of OpenAI's interface
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        status = _STATUS_OF_FINISH.get(str(kind), self.status) if update_terminal_info else self.status
        version = None if info.get("weight_version") is None else str(info["weight_version"])
        spec_info, prefix_cache_info = replace(self.spec_info), replace(self.prefix_cache_info)
        spec_info.add(info)
        prefix_cache_info.add(info)
        said = self.response + (text or "")
        self.check(len(new))
        routed = self._with_routes(args, info, len(self.tokens) + len(new))
        start = self.response_length
        self._grow("tokens", new, before=0)
        self._grow("loss_mask", [int(trainable)] * len(new), before=1)
        self._grow("rollout_log_probs", given if trainable and given else [0.0] * len(new), before=0.0)
        self.response_length += len(new)
        self.response, self.status = said, status
        self.spec_info, self.prefix_cache_info = spec_info, prefix_cache_info
        self.rollout_routed_experts = routed
        # A request that was aborted before its first token has made nothing with those weights.
        if new and version is not None:
            self.weight_versions.append(version)
            self.segment_starts.append(start)
            self.segment_lengths.append(len(new))

    def _with_routes(self, args: Any, info: Mapping[str, Any], tokens: int) -> Any:
        if info.get(routes.FIELD) is None or not getattr(args, "use_rollout_routing_replay", False):
            return self.rollout_routed_experts
        try:
            return routes.joined(self.rollout_routed_experts, info, routes.RouteShape.of(args), tokens)
        except routes.RouteError as error:
            raise ValueError(f"sample {self.index}: {error}") from error

    def _grow(self, name: str, values: list[Any], before: float) -> None:
        """Extend a list in place; one that is not there yet begins with ``before`` for each token of the response."""
        column = getattr(self, name)
        if not isinstance(column, list):
            column = [before] * self.response_length if column is None else list(column)
            setattr(self, name, column)
        column.extend(values)

    def note_metadata(self, before: Sample) -> None:
        """Keep the metadata that the sample had ``before`` a user's function was given it, if none are kept yet."""
        if self.metadata_before is None:
            kept = before.metadata if before.metadata_before is None else before.metadata_before
            self.metadata_before = copy.deepcopy(kept)

    def begin_anew(self) -> None:
        """Take the response back, and what a user's function has noted of it."""
        if self.metadata_before is not None:
            self.metadata, self.metadata_before = self.metadata_before, None
        self.reset_response()

    def reset_response(self) -> None:
        """Take the response back, and everything that followed from it: what is left is the prompt, to be generated."""
        self.tokens = self.tokens[: len(self.tokens) - self.response_length]
        self.response, self.response_length, self.status = "", 0, Status.PENDING
        self.weight_versions, self.segment_starts, self.segment_lengths = [], [], []
        self.reward = self.loss_mask = self.rollout_log_probs = self.failure = None
        self.remove_sample, self.non_generation_time = False, 0.0
        self.metadata.pop("start_rollout_id", None)
        self.teacher_log_probs = self.rollout_routed_experts = None
        # Media are the prompt's.
        self.columns = {name: value for name, value in self.columns.items() if media.are_references(value)}
        self.spec_info, self.prefix_cache_info = SpecInfo(), PrefixCacheInfo()

    def token_versions(self) -> list[str | None]:
        """Which weights made each response token; None of tokens that no engine made, as those that a tool said."""
        made: list[str | None] = [None] * self.response_length
        if not len(self.weight_versions) == len(self.segment_starts) == len(self.segment_lengths):
            return made  # a hook wrote some of them by hand
        for version, start, length in zip(self.weight_versions, self.segment_starts, self.segment_lengths, strict=True):
            made[start : start + length] = [str(version)] * length
        return made[: self.response_length]

    def check(self, more: int = 0) -> None:
        """Raise ValueError where lengths contradict each other, once ``more`` response tokens are there."""
        length, tokens = self.response_length + more, len(self.tokens) + more
        if length > tokens:
            raise ValueError(f"sample {self.index}: response_length {length} > {tokens} tokens")
        for name, grows in (("loss_mask", more), ("rollout_log_probs", more), ("teacher_log_probs", 0)):
            column = getattr(self, name)
            if column is not None and len(column) + grows != length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(column) + grows} entries for {length} response tokens"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values as they are now, attributes that a user's code added included; `from_dict` reads them back."""
        names = {f.name for f in fields(self)}
        extra = {k: v for k, v in vars(self).items() if k not in names}
        # Copies of lists: `append_response_tokens` may go on while the dict is being written.
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        plain = {name: list(value) if isinstance(value, list) else value for name, value in values}
        if self.trace is not None:
            plain["trace"] = {**self.trace, "events": list(self.trace["events"])}
        try:
            plain |= {name: media.to_plain(plain[name]) for name in _WITH_MEDIA}
        except media.MediaError as error:
            raise media.MediaError(f"sample {self.index}: {error}") from error
        plain["status"] = self.status.value
        plain["spec_info"] = self.spec_info.to_dict()
        plain["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return {**plain, **extra}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; keys that are no field become attributes."""
        names = {f.name for f in fields(cls)}
        known = {k: v for k, v in data.items() if k in names}
        known["status"] = Status(known.get("status", Status.PENDING.value))
        known["spec_info"] = SpecInfo.from_dict(known.get("spec_info", {}))
        known["prefix_cache_info"] = PrefixCacheInfo.from_dict(known.get("prefix_cache_info", {}))
        known |= {name: media.from_plain(known[name]) for name in _WITH_MEDIA if name in known}
        sample = cls(**known)
        for key, value in data.items():
            if key not in names:
                setattr(sample, key, value)
        return sample


Group = list[Sample]
"""The samples of one prompt: the unit of buffering, filtering and abort."""

RolloutBatch = dict[str, Any]
"""Columns by name, as hooks on training ranks are given them."""


def begun_anew(group: Group) -> Group:
    """The first sample of each rollout of a group, without its response: others are parts that it was cut into."""
    first: dict[int | None, Sample] = {}
    for sample in group:
        first.setdefault(sample.rollout_id, sample)
    for sample in first.values():
        sample.begin_anew()
    return list(first.values())


def flatten_samples(samples: Sample | Iterable[Any]) -> list[Sample]:
    """Groups, however deeply nested, as one flat list in order; TypeError where something else is among them."""
    if isinstance(samples, Sample):
        return [samples]
    if isinstance(samples, str | Mapping) or not isinstance(samples, Iterable):
        raise TypeError(f"samples, or lists of them, are expected, not {samples!r:.80}")
    return [leaf for part in samples for leaf in flatten_samples(part)]
