"""What shows, after every push, that engines hold what they were sent: names and bytes, and a sample of the values.

Each rank of an engine of ours notes what its loads were given and what its parameters took of it. A server that takes
no note says so when it is asked; of it only what all servers can tell is compared: SGLang's own checksums.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from slime.backends.sglang.client import EngineControl, EngineError
from slime.backends.sglang.loads.loaded import Held, Loaded, Tally, digests, sample
from slime.files.block_scaled import SCALE_END
from slime.files.hf_writer import NamedTensors
from slime.utils.errors import abbreviate
from slime.weights.engines import EngineAddress

logger = logging.getLogger(__name__)

Ask = Callable[[str, Callable[[EngineControl], Any], Sequence[EngineAddress]], dict[str, Any]]
"""`WeightPublisher.each_engine`."""
RankOf = Callable[[EngineAddress, int], int]
"""Which training rank's buckets a rank of an engine got."""


class PushProof:
    """Of one publisher. Every rank counts what it sends; rank 0 asks the engines, and compares."""

    def __init__(self) -> None:
        self.sent = Tally()
        """Of the present push, by this rank."""
        self._number = 0
        self._held: dict[EngineAddress, dict[str, Held] | None] = {}
        """Parameters of the first rank of engines that have forgotten all loads before; None of servers that take no
        note."""
        self._comparable: dict[str, Held] = {}
        """What engines have as it is sent."""
        self._samples: dict[str, torch.Tensor] = {}
        """Of what was sent under these names."""

    def forget(self) -> None:
        """Begin anew with the next push: after this one engines may have loaded anything."""
        self._held = {}

    def begin(self, version: int) -> None:
        """Count from 0 (every rank)."""
        self.sent, self._number = Tally(), version
        self._comparable, self._samples = {}, {}

    def meet(self, ask: Ask, engines: Sequence[EngineAddress]) -> None:
        """Have engines that are new forget what they have loaded so far (rank 0)."""
        self._held = {engine: self._held[engine] for engine in engines if engine in self._held}
        if new := [engine for engine in engines if engine not in self._held]:
            told = ask("begin the proof", self._loads, new)
            self._held |= {engine: _first_of(told[engine.url]) for engine in new}
            if plain := [engine.url for engine in new if self._held[engine] is None]:
                logger.info("%s: takes no note of what it loads: checksums and the probe alone prove", ", ".join(plain))
        for held in self._held.values():
            for name, each in (held or {}).items():
                if each.digest and "float8" not in each.dtype and not name.endswith(SCALE_END):
                    self._comparable[name] = each

    def note(self, bucket: NamedTensors) -> None:
        """Count a bucket that is sent, and keep samples of it where engines have been met."""
        for name, tensor in bucket:
            self.sent.add(name, tensor)
            there = self._comparable.get(name)
            if there is not None and there.shape == tuple(tensor.shape) and there.dtype == str(tensor.dtype):
                self._samples[name] = sample(tensor.contiguous(), self._number)

    def send_instead(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Count these in the place of all buckets: what became of them before it was sent (rank 0)."""
        self.sent, self._samples = Tally(), {}
        for name, tensor in tensors:
            self.sent.add(name, tensor)

    def words(self) -> str:
        """This rank's count, for rank 0."""
        return json.dumps(astuple(self.sent))

    def check(self, ask: Ask, engines: Sequence[EngineAddress], words: Mapping[int, str], rank_of: RankOf) -> None:
        """Compare what engines have loaded with what training ranks have sent, by ``words`` of each (rank 0).
        EngineError names engines, ranks and what differs."""
        noting = [engine for engine in engines if self._held.get(engine) is not None]
        others = [engine for engine in engines if self._held.get(engine) is None]
        told: dict[str, list[Loaded]] = ask("prove", self._loads, noting)
        sent = {rank: Tally(*json.loads(text)) for rank, text in words.items()}
        expected = digests(self._samples)
        problems: list[str] = []
        for engine in noting:
            for index, loaded in enumerate(told[engine.url]):
                wrong = _differences(loaded, sent[rank_of(engine, index)], expected, self._comparable)
                problems += [f"engine {engine.url} rank {index} {each}" for each in wrong]
            self._held[engine] = _first_of(told[engine.url])
        if not problems:
            of_samples = {url: [_values(loaded) for loaded in ranks] for url, ranks in told.items()}
            if len(others) > 1:
                checksums = ask("prove: checksums", lambda control: control.checksums_if_told(), others)
                of_samples |= {url: [_as_held(rank) for rank in ranks] for url, ranks in checksums.items() if ranks}
            problems = list(_disagreements(of_samples))
        if problems:
            raise EngineError("; ".join(problems))

    def _loads(self, control: EngineControl) -> list[Loaded] | None:
        return control.loads(self._number)


def _first_of(ranks: Sequence[Loaded] | None) -> dict[str, Held] | None:
    return dict(ranks[0].parameters) if ranks else None


def _values(loaded: Loaded) -> dict[str, Held]:
    # Others, which the model may not even use, have undefined values once an engine has slept.
    return {name: held for name, held in loaded.parameters.items() if held.loaded and held.digest}


def _as_held(checksums: Mapping[str, str]) -> dict[str, Held]:
    return {name: Held("", (), checksum) for name, checksum in checksums.items()}


def _differences(
    loaded: Loaded, sent: Tally, expected: Mapping[str, str], comparable: Mapping[str, Held]
) -> Iterator[str]:
    given = loaded.given
    if given != sent:
        what = "others" if (given.tensors, given.nbytes) == (sent.tensors, sent.nbytes) else str(given)
        yield f"loaded {what if given.tensors else 'nothing'} in the place of the {sent} that it was sent"
        return
    if loaded.taken is not None and loaded.taken + loaded.drafts < sent.nbytes:
        took = f"{loaded.taken + loaded.drafts} bytes" if loaded.taken + loaded.drafts else "nothing"
        yield f"loaded the {sent} that it was sent, and its modules took {took} of it"
    if loaded.stale:
        yield f"computes with copies of older weights: {abbreviate(set(loaded.stale))}"
    differing = {
        name
        for name, digest in expected.items()
        if (there := loaded.parameters.get(name)) is not None
        and (there.dtype, there.shape) == (comparable[name].dtype, comparable[name].shape)
        and there.digest not in ("", digest)
    }
    if differing:
        yield f"holds other values than it was sent of {abbreviate(differing)}"


def _disagreements(of_samples: Mapping[str, list[dict[str, Held]]]) -> Iterator[str]:
    """Engines of one layout, with the same parameters on as many ranks, hold the same."""
    first: dict[Any, str] = {}
    for url, ranks in of_samples.items():
        layout = tuple(tuple((name, held.dtype, held.shape) for name, held in rank.items()) for rank in ranks)
        other = first.setdefault(layout, url)
        for index, (ours, theirs) in enumerate(zip(ranks, of_samples[other], strict=True)):
            if differing := {name for name in ours if ours[name].digest != theirs[name].digest}:
                yield f"engines {other} and {url} hold different values on rank {index} of {abbreviate(differing)}"
