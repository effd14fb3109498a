"""What the comparison of the trainer's and the engine's forward passes says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tools import compare_log_probs, make_tiny_model
from tools.forwards import differences
from tools.forwards.differences import Difference
from tools.forwards.places import SAMPLED, Recorder, Source, by_token, places

NUM_GPUS = 0
ORDER = ["embedding", "layer 0: values", "layer 1: values", "final norm", SAMPLED]


def passes() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two, which differ from layer 1 on; the engine is without the final norm."""
    ours = {place: torch.arange(4.0).reshape(2, 2) for place in ORDER}
    theirs = {place: tensor.clone() for place, tensor in ours.items() if place != "final norm"}
    theirs["layer 1: values"][0, 1] += 0.5
    theirs[SAMPLED] += torch.tensor([[0.0, -0.25], [0.0, 0.25]])
    return ours, theirs


def test_differences_are_absolute_and_of_places_that_both_sides_have() -> None:
    found = differences.differences(ORDER, *passes())
    assert found == [
        Difference("embedding", 0.0, 0.0, 0.0),
        Difference("layer 0: values", 0.0, 0.0, 0.0),
        Difference("layer 1: values", 0.25, 0.5, 0.125),
        Difference(SAMPLED, 0.5, 0.25, 0.125),
    ]
    assert differences.first(found) == "layer 1: values"
    assert differences.kinds(found) == [
        ("embedding", "-", 0.0, 0.0),
        ("values", "1", 0.5, 0.0625),
        (SAMPLED, "*", 0.25, 0.125),
    ]
    assert differences.table("prefill", found).startswith("prefill: first difference at layer 1: values\n")


def test_equal_passes_have_no_first_difference() -> None:
    ours, _ = passes()
    assert differences.first(differences.differences(ORDER, ours, ours)) == "none"


def test_places_of_other_shapes_are_not_compared() -> None:
    ours, theirs = passes()
    with pytest.raises(ValueError, match=r"embedding: \(2, 2\) of the trainer, \(1, 4\) of the engine"):
        differences.differences(ORDER, ours, theirs | {"embedding": torch.zeros(1, 4)})


@pytest.mark.parametrize(
    ("largest", "mean", "names"),
    [(None, None, []), (0.25, 0.125, []), (0.2, None, ["max"]), (None, 0.1, ["mean"]), (0.0, 0.0, ["max", "mean"])],
)
def test_bounds_are_of_the_log_probs_of_tokens(largest: float | None, mean: float | None, names: list[str]) -> None:
    lines = differences.exceeded("prefill", differences.differences(ORDER, *passes()), largest, mean)
    assert [line.split(": ")[2].split()[0] for line in lines] == names


def test_what_is_no_number_is_within_no_bound() -> None:
    ours, theirs = passes()
    theirs[SAMPLED] = torch.full((2, 2), torch.nan)
    found = differences.differences(ORDER, ours, theirs)
    assert len(differences.exceeded("prefill", found, 1.0, 1.0)) == 2
    assert found[-1].share == 1.0


def test_a_recorder_copies_before_a_kernel_writes_over_it() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(inplace=True))
    recorder = Recorder(model, {"in": Source("1", argument=0), "first": Source("0"), "absent": Source("7")})
    x = torch.tensor([[-1.0, 2.0]])
    model(x)
    assert torch.equal(recorder.taken["first"][0], torch.tensor([[-1.0, 2.0]]))
    assert recorder.taken.keys() == {"in", "first"}


def test_heads_and_a_batch_of_one_are_channels() -> None:
    x = torch.arange(24.0)
    assert torch.equal(by_token(x.reshape(3, 1, 8), 3), by_token(x.reshape(6, 4), 3))


def test_places_are_in_the_order_of_computation() -> None:
    names = [place.name for place in places(2)]
    assert len(names) == len(set(names)) == 3 + 2 * 14
    assert (names[0], names[1], names[15], names[-1]) == (
        "embedding",
        "layer 0: residual",
        "layer 1: residual",
        "final norm",
    )


@pytest.mark.parametrize(
    ("arch", "words", "message"),
    [("llama", [], "is of type llama"), ("qwen3", ["--prompt", "0"], "must be at least 1")],
)
def test_bad_input_is_one_line(
    arch: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model.write(make_tiny_model.parse([str(tmp_path / "m"), "--arch", arch]))
    with pytest.raises(SystemExit, match="2"):
        compare_log_probs.parse([str(tmp_path / "m"), *words])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_engine_gets_what_follows_two_dashes(tmp_path: Path) -> None:
    make_tiny_model.write(make_tiny_model.parse([str(tmp_path / "m")]))
    args = compare_log_probs.parse([str(tmp_path / "m"), "--max", "1", "--", "--max", "2"])
    assert (args.max, args.engine_flags) == (1.0, ["--max", "2"])
    tokens = compare_log_probs.tokens_of(args)
    assert [len(sequence) for sequence in tokens] == [48] * 4
    assert tokens == compare_log_probs.tokens_of(args)
