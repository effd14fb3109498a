"""What is compared after a push, with engines that load as they are told."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.loads.loaded import Loaded, Tally, held_by
from slime.files.hf_writer import NamedTensors
from slime.weights.proof import PushProof
from slime.weights.tensor import TensorPublisher
from tests.fake_control import FakeControl, addresses_of

NUM_GPUS = 0

SENT: NamedTensors = [("norm", torch.ones(4)), ("up", torch.full((3, 4), 2.0)), ("down", torch.full((4, 3), 3.0))]


class Engine(FakeControl):
    """One that notes what it loads: of ``ranks`` ranks, which hold ``norm`` and, of ``up`` and ``down``, one fused."""

    def __init__(self, url: str, ranks: int = 1) -> None:
        super().__init__(url)
        self.noted = [Tally() for _ in range(ranks)]
        self.held: dict[str, torch.Tensor] = {"norm": torch.zeros(4), "fused": torch.zeros(24)}
        self.dropped: int | None = 0
        """Bytes that no parameter takes."""
        self.stale: tuple[str, ...] = ()
        self.asked = 0

    @property
    def reached(self) -> set[int]:
        """Parameters that loads have reached."""
        return {id(tensor) for tensor in self.held.values()}

    def load(self, weights: NamedTensors, rank: int = 0) -> None:
        for name, tensor in weights:
            self.noted[rank].add(name, tensor)
            if name in self.held:
                self.held[name] = tensor.clone()
            else:
                self.held["fused"] = torch.cat([tensor.flatten()] * 2)

    def loads(self, number: int) -> Any:
        self.asked += 1
        told = [self._of(noted, number) for noted in self.noted]
        self.noted = [Tally() for _ in self.noted]
        return told

    def _of(self, noted: Tally, number: int) -> Loaded:
        taken = None if self.dropped is None else noted.nbytes - self.dropped
        return Loaded(noted, taken, 0, self.stale, held_by(self.held.items(), number, self.reached))


class Plain(Engine):
    """A server that takes no note, and may tell checksums."""

    sums: Any = None

    def loads(self, number: int) -> Any:
        return None

    def checksums_if_told(self) -> Any:
        return self.sums


class Pushed:
    """A proof, and what it makes of engines."""

    def __init__(self, *engines: Engine, ranks_of: dict[str, list[int]] | None = None) -> None:
        self.engines = engines
        self.addresses = addresses_of(engines, [len(engine.noted) for engine in engines])
        self.proof = PushProof()
        self._ranks_of = ranks_of or {}
        self.version = 0

    def _ask(self, phase: str, call: Any, engines: Iterable[Any]) -> dict[str, Any]:
        return {each.url: call(each.engine) for each in engines}

    def begin(self, buckets: NamedTensors = SENT) -> None:
        self.version += 1
        self.proof.begin(self.version)
        self.proof.meet(self._ask, self.addresses)
        self.proof.note(buckets)

    def check(self, words: dict[int, str] | None = None) -> None:
        whose = self._ranks_of
        self.proof.check(
            self._ask,
            self.addresses,
            words or {0: self.proof.words()},
            lambda engine, index: whose[engine.url][index] if whose else 0,
        )


def test_what_arrived_passes_push_after_push() -> None:
    engines = Engine("http://e0"), Engine("http://e1", ranks=2)
    engines[0].load(SENT[:1])  # before they were met
    pushed = Pushed(*engines)
    for _ in range(3):
        pushed.begin()
        for engine in engines:
            for rank in range(len(engine.noted)):
                engine.load(SENT, rank)
        pushed.check()
    assert [engine.asked for engine in engines] == [4, 4], "once more when they are met"
    assert pushed.proof._samples.keys() == {"norm"}


def broken(**changes: Any) -> Any:
    def change(engine: Engine) -> None:
        for name, value in changes.items():
            setattr(engine, name, value)

    return change


@pytest.mark.parametrize(
    ("loads", "change", "message"),
    [
        ([], broken(), "loaded nothing in the place of the 3 tensors of 112 bytes that it was sent"),
        (SENT[1:], broken(), "loaded 2 tensors of 96 bytes in the place of the 3 tensors of 112 bytes"),
        ([*SENT[:2], ("odd", SENT[2][1])], broken(), "loaded others in the place of the 3 tensors"),
        (SENT, broken(dropped=112), "loaded the 3 tensors of 112 bytes that it was sent, and its modules took nothing"),
        (SENT, broken(dropped=16), "and its modules took 96 bytes of it"),
        (SENT, broken(stale=("gate._weight_fp32",)), "computes with copies of older weights: gate._weight_fp32"),
        (SENT, broken(held={"norm": torch.zeros(4)}), "holds other values than it was sent of norm"),
        (SENT, broken(dropped=None), None),
    ],
)
def test_what_is_wrong_is_one_line(loads: NamedTensors, change: Any, message: str | None) -> None:
    engine = Engine("http://e0")
    pushed = Pushed(engine)
    pushed.begin()
    engine.load(loads)
    change(engine)
    if message is None:
        pushed.check()
        return
    with pytest.raises(EngineError, match=f"^engine http://e0 rank 0 .*{re.escape(message)}") as caught:
        pushed.check()
    assert "\n" not in str(caught.value)


def test_engines_of_one_layout_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another one are not compared, nor what no load has reached."""
    one, other = Engine("http://e0"), Engine("http://e1")
    wide = Engine("http://e2", ranks=2)
    wide.held["fused"] = torch.ones(24)
    half = Engine("http://e3")
    half.held["fused"] = torch.ones(24, dtype=torch.bfloat16)
    pushed = Pushed(one, other, wide, half)
    pushed.begin([])
    pushed.check()
    other.held["fused"][5] = 1.0
    pushed.begin([])
    with pytest.raises(EngineError, match="engines http://e0 and http://e1 hold different values on rank 0 of fused"):
        pushed.check()
    monkeypatch.setattr(Engine, "reached", {id(engine.held["norm"]) for engine in (one, other, wide, half)})
    pushed.begin([])
    pushed.check()


def test_of_servers_that_take_no_note_checksums_are_compared_where_they_tell_any() -> None:
    plain = [Plain("http://p0"), Plain("http://p1")]
    engine = Engine("http://e0")
    pushed = Pushed(engine, *plain)
    for sums in ([None, None], [[{"a": "1"}], None], [[{"a": "1"}], [{"a": "1"}]]):
        plain[0].sums, plain[1].sums = sums
        pushed.begin()
        engine.load(SENT)
        pushed.check()
    plain[1].sums = [{"a": "2"}]
    pushed.begin()
    engine.load(SENT)
    with pytest.raises(EngineError, match="engines http://p0 and http://p1 hold different values on rank 0 of a"):
        pushed.check()


def test_each_rank_is_compared_with_what_the_training_rank_beside_it_has_sent() -> None:
    """Where each has experts of its own."""
    engine = Engine("http://e0", ranks=2)
    own = [*SENT[:1], ("experts.0", torch.ones(2))], [*SENT[:1], ("experts.1", torch.ones(2))]
    pushed = Pushed(engine, ranks_of={"http://e0": [0, 1]})
    words = {}
    for rank, sent in enumerate(own):
        other = PushProof()
        other.begin(1)
        other.note(sent)
        words[rank] = other.words()
    for right in (True, False):
        pushed.begin(own[0])
        for rank in range(2):
            engine.load(own[rank if right else 0], rank)
        if right:
            pushed.check(words)
        else:
            with pytest.raises(EngineError, match="engine http://e0 rank 1 loaded others"):
                pushed.check(words)


def test_values_in_float8_and_of_another_type_are_left_to_the_names() -> None:
    """Engines may keep these otherwise than they come."""
    engine = Engine("http://e0")
    engine.held |= {
        "w": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.zeros(1, 1),
        "router": torch.zeros(4),
    }
    pushed = Pushed(engine)
    sent = [
        ("w", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        ("w_scale_inv", torch.ones(1, 1)),
        ("router", torch.ones(4, dtype=torch.bfloat16)),
    ]
    pushed.begin(sent)
    for name, tensor in sent:
        engine.noted[0].add(name, tensor)
    pushed.check()
    assert pushed.proof._samples == {}


def test_what_is_sent_in_the_place_of_buckets_counts_instead() -> None:
    """Adapters with what engines need beside them, or files that a user's function has changed."""
    engine = Engine("http://e0")
    pushed = Pushed(engine)
    pushed.begin()
    pushed.proof.send_instead([("norm", torch.zeros(4, dtype=torch.bfloat16)), *SENT[1:], ("more", torch.ones(1))])
    engine.noted[0].add("norm", torch.zeros(4, dtype=torch.bfloat16))
    engine.load([*SENT[1:], ("more", torch.ones(1))])
    pushed.check()


class Loading(Engine):
    """An engine beside a trainer, to which a publisher pushes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.forgets = False

    def update_weights_from_tensor(self, payloads: Any, **_: Any) -> None:
        self.load(SENT[:2] if self.forgets else SENT)


def test_a_push_that_is_not_proved_fails_and_the_next_one_begins_anew() -> None:
    args = Namespace(
        check_weight_update_equal=False,
        asynchronous=False,
        weight_update_timeout=100.0,
        drafts_apart=False,
        allow_untested_versions=False,
    )
    publisher, engine = TensorPublisher(args, 0), Loading("http://e0")
    engines = addresses_of([engine])
    publisher.publish(1, [SENT], engines)
    engine.forgets = True
    message = r"weight update to version 2 \(TensorPublisher\): engine http://e0 rank 0 loaded 2 tensors of 64 bytes"
    with pytest.raises(EngineError, match=message):
        publisher.publish(2, [SENT], engines)
    assert engine.version == "1"
    engine.forgets = False
    engine.load(SENT[:1])  # of what was begun
    publisher.publish(2, [SENT], engines)
    assert (engine.version, engine.asked) == ("2", 5)


def test_one_that_takes_the_place_of_another_is_met_anew() -> None:
    engine = Engine("http://e0")
    pushed = Pushed(engine)
    pushed.begin()
    engine.load(SENT)
    pushed.check()
    engine.load(SENT)  # its next life
    pushed.addresses = [replace(address, life=1) for address in pushed.addresses]
    pushed.begin()
    engine.load(SENT)
    pushed.check()
