"""Trees of turns and the samples that they become, by upstream's way in: prompts that somebody else has rendered."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.agent.trajectory import DriftKind, Trajectory, TrajectoryManager, TurnRecord
from slime.data import Sample, Status

NUM_GPUS = 0
QUESTION = {"role": "user", "content": "What is there?"}


def turn(prompt: list[int], output: list[int], reason: str = "stop") -> TurnRecord:
    return TurnRecord(prompt, output, reason, [-1.0] * len(output))


def test_a_prompt_goes_on_from_the_longest_path_that_it_begins_with() -> None:
    """Also where a later turn, of the same tokens, has none behind it: an answer that was asked for twice."""
    trajectory = Trajectory()
    first = trajectory.add(turn([1], [2]), None)
    second = trajectory.add(turn([1, 2, 3], [4]), first)
    again = trajectory.add(turn([1], [2]), None)
    assert trajectory.find_by_ids([1, 2, 3, 4, 5]) is second
    assert trajectory.find_by_ids([1, 2, 9]) is again
    assert trajectory.find_by_ids([1, 2]) is None


def test_a_turn_that_two_paths_share_is_trained_in_the_first() -> None:
    manager = TrajectoryManager()
    said = {"role": "assistant", "content": "one"}
    for prompt, output, messages in (
        ([1, 2], [3, 4], [QUESTION]),
        ([1, 2, 3, 4, 5], [6], [QUESTION, said, {"role": "user", "content": "a"}]),
        ([1, 2, 3, 4, 9], [8, 7], [QUESTION, said, {"role": "user", "content": "b"}]),
    ):
        manager.record_turn("s", turn=turn(prompt, output), prompt_messages=messages, response_message=said)
    assert (manager.turn_count("s"), manager.has_session("s")) == (3, True)
    base = Sample(index=1, metadata={"a": 1}, label="x")
    first, second = manager.get_trajectory("s", base_sample=base, reward=1.0, extra_metadata={"b": 2})
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 4, 5, 6], [1, 1, 0, 1])
    assert (second.tokens, second.loss_mask) == ([1, 2, 3, 4, 9, 8, 7], [1, 1])
    assert [(each.reward, each.label, each.metadata) for each in (first, second)] == [(1.0, "x", {"a": 1, "b": 2})] * 2
    assert base.metadata == {"a": 1}
    assert base.tokens == []
    assert manager.get_trajectory("s", base_sample=base) == [], "the first call ended it"
    assert not manager.has_session("s")


@pytest.mark.parametrize(
    ("second", "threshold", "drift", "samples"),
    [
        ([1, 2, 3, 8, 9], 1, DriftKind.FORK, [([1, 2, 3, 4], [1, 1]), ([1, 2, 3, 8, 9, 5], [1])]),
        ([1, 2, 3, 4, 9], 1, DriftKind.CLEAN, [([1, 2, 3, 4, 9, 5], [1, 1, 0, 1])]),
        ([1, 2, 3, 8, 9], 2, DriftKind.REALIGN, [([1, 2, 3, 8, 9, 5], [1, 0, 0, 1])]),
        ([1, 2, 7, 8, 9], 2, DriftKind.FORK, [([1, 2, 3, 4], [1, 1]), ([1, 2, 7, 8, 9, 5], [1])]),
        ([1, 2, 7, 8, 9], 3, DriftKind.REALIGN, [([1, 2, 7, 8, 9, 5], [0, 0, 0, 1])]),
        ([1, 7, 3, 4, 9], 9, DriftKind.FORK, [([1, 2, 3, 4], [1, 1]), ([1, 7, 3, 4, 9, 5], [1])]),
    ],
)
def test_a_prompt_that_drifts_is_realigned_where_it_may_be(
    second: list[int], threshold: int, drift: DriftKind, samples: list[tuple[list[int], list[int]]]
) -> None:
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    said = {"role": "assistant", "content": "one"}
    manager.record_turn("s", turn=turn([1, 2], [3, 4]), prompt_messages=[QUESTION], response_message=said)
    node = manager.record_turn(
        "s", turn=turn(second, [5]), prompt_messages=[QUESTION, said, QUESTION], response_message=said
    )
    assert node.drift is drift
    found = manager.get_trajectory("s", base_sample=Sample())
    if drift is DriftKind.REALIGN and threshold == 3:
        assert found[0].loss_mask is not None
        assert (found[0].tokens, sum(found[0].loss_mask)) == (samples[0][0], 1)
        return
    assert [(each.tokens, each.loss_mask) for each in found] == samples


@pytest.mark.parametrize(("bound", "length"), [(0, 8), (8, 8), (7, 3), (2, None)])
def test_a_sample_is_no_longer_than_it_may_be_and_says_how_it_ended(bound: int, length: int | None) -> None:
    manager = TrajectoryManager()
    said = {"role": "assistant", "content": "one"}
    manager.record_turn("s", turn=turn([1], [2, 3]), prompt_messages=[QUESTION], response_message=said)
    messages = [QUESTION, said, QUESTION]
    manager.record_turn(
        "s", turn=turn([1, 2, 3, 4], [5] * 4, "length"), prompt_messages=messages, response_message=said
    )
    samples = manager.get_trajectory("s", base_sample=Sample(), max_sample_tokens=bound)
    assert [(len(sample.tokens), sample.status) for sample in samples] == (
        [(length, Status.TRUNCATED)] if length else []
    )


def test_a_sample_ends_before_the_first_turn_that_is_too_long() -> None:
    """Though a later one, which keeps only the beginning of that turn's answer, were short enough."""
    manager = TrajectoryManager(fork_threshold_tokens=99)
    said = {"role": "assistant", "content": "one"}
    messages = [QUESTION]
    for prompt, output in (([1], [2, 3]), ([1, 2, 3, 4], [5] * 40), ([1, 2, 3, 4, 5, 6], [7])):
        manager.record_turn("s", turn=turn(prompt, output), prompt_messages=messages, response_message=said)
        messages = [*messages, said, QUESTION]
    (sample,) = manager.get_trajectory("s", base_sample=Sample(), max_sample_tokens=30)
    assert (sample.tokens, sample.loss_mask, sample.status) == ([1, 2, 3], [1, 1], Status.TRUNCATED)


@pytest.mark.parametrize(("answer", "samples"), [([3], [[1, 2, 3]]), ([], [[1, 2, 4]])])
def test_a_path_of_which_nothing_is_trained_is_no_sample_unless_all_are_so(
    answer: list[int], samples: list[list[int]]
) -> None:
    trajectory = Trajectory()
    silent = trajectory.add(turn([1, 2], []), None)
    trajectory.add(turn([1, 2, 4], []), silent)
    if answer:
        trajectory.add(turn([1, 2], answer), None)
    assert [sample.tokens for sample in trajectory.samples(Sample())] == samples


# ---- whole sessions, in short: a message is its role's letter, its words and a dot, which is the token that ends it

TEMPLATE = """{% for message in messages %}{{ message.role[0] + message.content + '<|im_end|>' }}{% endfor -%}
{%- if add_generation_prompt %}a{% endif %}"""
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


class Rendered:
    """A session whose prompts are rendered whole, with something wrong in some of them."""

    def __init__(self, tokenizer: Any, threshold: int | None = None) -> None:
        self._tokenizer, self.manager = tokenizer, TrajectoryManager(fork_threshold_tokens=threshold)

    def ask(
        self, said: str, output: str, drifted: str | None = None, log_probs: Sequence[float] | None = None
    ) -> TurnRecord:
        """A turn behind the messages ``said``, as the prompt of which the engine had ``drifted``."""
        messages = [{"role": ROLES[each[0]], "content": each[1:]} for each in said.split(".")[:-1]]
        if drifted is None:
            drifted = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt, ids = self._ids(drifted), self._ids(output)
        turn = TurnRecord(prompt, ids, "stop", [-0.5] * len(ids) if log_probs is None else log_probs)
        reply = {"role": "assistant", "content": output.removesuffix(".")} if output else None
        self.manager.record_turn("s", turn=turn, prompt_messages=messages, response_message=reply)
        return turn

    def samples(self) -> list[str]:
        """Of each sample its text, with what is trained in brackets."""
        found = []
        for sample in self.manager.get_trajectory("s", base_sample=Sample(index=3), reward=0.5):
            sample.check()
            assert (sample.index, sample.reward) == (3, 0.5)
            assert sample.loss_mask is not None
            start = len(sample.tokens) - sample.response_length
            mask = [0] * start + list(sample.loss_mask)
            text = "".join(
                f"[{piece}]" if trained else piece
                for token, trained in zip(sample.tokens, mask, strict=True)
                for piece in [self._tokenizer.decode([token]).replace("<|im_end|>", ".")]
            )
            found.append(text.replace("][", ""))
        return found

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text.replace(".", "<|im_end|>"), add_special_tokens=False)["input_ids"]
        return ids


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[[str | None], Path]) -> Any:
    return AutoTokenizer.from_pretrained(str(make_tokenizer(TEMPLATE)))


CASES: list[tuple[str, int | None, list[tuple[str, ...]], list[str]]] = [
    (
        "clean turns, one behind a wrong end of a tool's result, a clean one, one behind a wrong question",
        None,
        [
            ("uq.", "0."),
            ("uq.a0.t0.", "1."),
            ("uq.a0.t0.a1.t1.", "2."),
            ("uq.a0.t0.a1.t1.a2.t2.", "3.", "uq.a0.t0.a1.t1.a2.t2#a"),
            ("uq.a0.t0.a1.t1.a2.t2.a3.t3.", "4."),
            ("uq.a0.t0.a1.t1.a2.t2.a3.t3.a4.t4.", "5.", "uq#a0.t0.a1.t1.a2.t2.a3.t3.a4.t4.a"),
        ],
        [
            "uq.a[0.]t0.a[1.]t1.a[2.]t2#a[3.]",
            "uq.a0.t0.a1.t1.a2.t2.a3.t3.a[4.]",
            "uq#a0.t0.a1.t1.a2.t2.a3.t3.a4.t4.a[5.]",
        ],
    ),
    (
        "a drift within the last answer, and clean turns behind it",
        None,
        [
            ("uq.", "what."),
            ("uq.awhat.tx.", "then.", "uq.awha#tx.a"),
            ("uq.awhat.tx.athen.ty.", "so.", "uq.awha#tx.athen.ty.a"),
        ],
        ["uq.a[wha]#tx.a[then.]ty.a[so.]"],
    ),
    (
        "a long answer of which less than the threshold differs, whatever is said behind it",
        3,
        [("uq.", "a long one."), ("uq.aa long one.tx.", "and another.", "uq.aa long on#tx.a")],
        ["uq.a[a long on]#tx.a[and another.]"],
    ),
    (
        "as much as the threshold",
        2,
        [("uq.", "what."), ("uq.awhat.tx.", "so.", "uq.awha#tx.a")],
        ["uq.a[what.]", "uq.awha#tx.a[so.]"],
    ),
    (
        "nothing is realigned",
        0,
        [("uq.", "what."), ("uq.awhat.tx.", "so.", "uq.awhat#tx.a")],
        ["uq.a[what.]", "uq.awhat#tx.a[so.]"],
    ),
    (
        "a drift in an answer before the last one",
        None,
        [("uq.", "0."), ("uq.a0.tx.", "1."), ("uq.a0.tx.a1.ty.", "2.", "uq.a0#tx.a1.ty.a")],
        ["uq.a[0.]tx.a[1.]", "uq.a0#tx.a1.ty.a[2.]"],
    ),
    (
        "two paths from one turn, of which one drifts in the question",
        None,
        [
            ("uq.", "0."),
            ("uq.a0.tx.", "1."),
            ("uq.a0.tx.a1.tz.", "2.", "uq#a0.tx.a1.tz.a"),
            ("uq.a0.ty.", "3."),
        ],
        ["uq.a[0.]tx.a[1.]", "uq#a0.tx.a1.tz.a[2.]", "uq.a0.ty.a[3.]"],
    ),
    (
        "answers that nobody gave are context, wherever they are",
        None,
        [("uq.", "0."), ("uq.a0.aother.tx.", "1."), ("uq.a0.aother.tx.a1.ty.", "2.")],
        ["uq.a[0.]aother.tx.a[1.]ty.a[2.]"],
    ),
    (
        "an answer that the client has changed is trained, and what it has made of it is context of another path",
        None,
        [("uq.", "ok."), ("uq.aOK.tx.", "1."), ("uq.aOK.tx.a1.ty.", "2.")],
        ["uq.a[ok.]", "uq.aOK.tx.a[1.]ty.a[2.]"],
    ),
    ("no answer", None, [("uq.", "")], []),
    ("no answer, twice on one path", None, [("uq.", ""), ("uq.a.tx.", "")], []),
    ("no messages, and an answer", None, [("", "0.", "uq.a")], ["uq.a[0.]"]),
]


@pytest.mark.parametrize(("threshold", "turns", "samples"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_sessions_become_samples(
    threshold: int | None, turns: list[tuple[str, ...]], samples: list[str], tokenizer: Any
) -> None:
    session = Rendered(tokenizer, threshold)
    for said, output, *drifted in turns:
        session.ask(said, output, *drifted)
    assert session.manager.turn_count("s") == len(turns)
    assert session.samples() == samples
    assert not session.manager.has_session("s")


@pytest.mark.parametrize(
    ("first", "second", "samples"),
    [
        ([-0.5] * 2, [], ["uq.a[0.]tx.a1."]),
        ([], [-0.5] * 2, ["uq.a0.tx.a[1.]"]),
        ([], [], []),
    ],
)
def test_what_has_no_log_probs_is_not_trained(
    first: list[float], second: list[float], samples: list[str], tokenizer: Any
) -> None:
    session = Rendered(tokenizer)
    session.ask("uq.", "0.", log_probs=first)
    session.ask("uq.a0.tx.", "1.", log_probs=second)
    assert session.samples() == samples


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"output_log_probs": [-0.5] * 2}, "a turn of 3 output_ids has output_log_probs of 2"),
        ({"output_log_probs": [-0.5] * 4}, "a turn of 3 output_ids has output_log_probs of 4"),
        ({"segments": [("1", 1), ("2", 1)]}, "a turn of 3 output_ids has segments of 2"),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused_and_the_others_stay(
    changes: dict[str, Any], told: str, tokenizer: Any
) -> None:
    session = Rendered(tokenizer)
    session.ask("uq.", "0.")
    bad = TurnRecord(**({"prompt_ids": [1, 2], "output_ids": [3, 4, 5], "output_log_probs": [-0.5] * 3} | changes))
    with pytest.raises(ValueError, match=re.escape(told)):
        session.manager.record_turn("s", turn=bad, prompt_messages=[QUESTION], response_message=None)
    assert session.samples() == ["uq.a[0.]"]


def test_a_base_sample_must_be_given() -> None:
    with pytest.raises(TypeError, match="base_sample"):
        TrajectoryManager().get_trajectory("s", reward=1.0)  # type: ignore[call-arg]
