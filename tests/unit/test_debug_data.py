"""Saved rollouts: what comes back is what was there, and reading a file runs none of its code."""

from __future__ import annotations

import enum
import itertools
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.data import Sample, Status
from slime.files.safe_dump import load_safe, save_safe
from slime.options.debug import kept_groups
from slime.rollout.batches.debug_data import check_recorded, load_samples, save_samples
from slime.utils.errors import BadInputError

NUM_GPUS = 0


def options(directory: Path, **changes: Any) -> Namespace:
    template = str(directory / "deep" / "{rollout_id:03d}.pt")
    values = {"save_debug_rollout_data": template, "load_debug_rollout_data": template}
    return Namespace(**values | {"load_debug_rollout_data_subsample": None} | changes)


def samples(groups: int = 5, per_group: int = 3) -> list[Sample]:
    rng = np.random.default_rng()
    made = []
    for i in range(groups * per_group):
        sample = Sample(
            group_index=100 + i // per_group, index=i, rollout_id=i, label=str(i), reward=float(rng.normal())
        )
        sample.tokens, sample.status = [3, 4], Status.TRUNCATED
        sample.append_response_tokens(
            tokens=rng.integers(0, 9, 4).tolist(),
            log_probs=rng.normal(size=4).tolist(),
            meta_info={"weight_version": 3},
        )
        sample.metadata = {"turns": i, "nested": {"list": [1, (2, None)]}}
        sample.train_metadata = {"difficulty": rng.normal()} if i % 2 else None
        sample.spec_info.spec_verify_ct = i
        sample.own_attribute = [i]  # type: ignore[attr-defined]
        made.append(sample)
    return made


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    args, before = options(tmp_path), samples()
    save_samples(args, 7, before)
    after = load_samples(args, 7)
    assert after == before
    assert [vars(sample) for sample in after] == [vars(sample) for sample in before]


def test_every_value_comes_back_with_its_type(tmp_path: Path) -> None:
    content = {
        "numbers": [0.1 + 0.2, 2**70, True, None, 1j],
        "bytes": b"\x00",
        "set": {1, (2, "x")},
        "tensor": torch.randn(3, dtype=torch.bfloat16),
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2], np.array(["a", "bc"]), np.float32(0.1)],
        5: "a number as key",
    }
    save_safe(tmp_path / "x.pt", content, "--flag")
    found = load_safe(tmp_path / "x.pt", "--flag")
    assert torch.equal(found.pop("tensor"), content.pop("tensor"))
    integers, strings, scalar = found.pop("arrays")
    assert integers.dtype == np.int16
    assert integers.tolist() == [[0, 2], [3, 5]]
    assert strings == ["a", "bc"]
    assert scalar == float(np.float32(0.1))
    del content["arrays"]
    assert found == content


class Colour(enum.StrEnum):
    RED = "red"


def test_what_only_code_could_restore_is_saved_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args, (sample, *others) = options(tmp_path), samples(1)
    sample.metadata = {"tool": Namespace(name="x"), "path": Path("a"), "colour": Colour.RED}
    with caplog.at_level(logging.WARNING):
        save_samples(args, 0, [sample, *others])
    found = load_samples(args, 0)[0].metadata
    assert found["tool"] == "Namespace(name='x')"
    assert type(found["colour"]) is str
    assert found["colour"] == "red"
    warning = caplog.messages[0]
    assert warning.startswith("--save-debug-rollout-data: ['samples'][0]['metadata']['tool'] holds a Namespace")


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_reading_a_file_runs_no_code_in_it(tmp_path: Path) -> None:
    args, sprung = options(tmp_path, load_debug_rollout_data=str(tmp_path / "trap")), tmp_path / "sprung"
    torch.save({"rollout_id": 0, "samples": [Trap(sprung)]}, tmp_path / "trap")
    with pytest.raises(BadInputError, match=r"--load-debug-rollout-data, rollout 0: .*/trap is not a file of plain"):
        load_samples(args, 0)
    assert not sprung.exists()
    torch.load(tmp_path / "trap", weights_only=False)
    assert sprung.exists(), "the trap itself works"


@pytest.mark.parametrize("content", [b"", b"not a file of torch"])
def test_other_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    args = options(tmp_path, load_debug_rollout_data=str(tmp_path / "x"))
    with pytest.raises(BadInputError, match=r"--load-debug-rollout-data, rollout 3: .*/x is not a file of plain"):
        load_samples(args, 3)
    with pytest.raises(BadInputError, match=r"--load-debug-rollout-data, rollout 3: there is no file .*/003.pt"):
        load_samples(options(tmp_path), 3)
    args.load_debug_rollout_data = str(tmp_path / "y")
    odd: list[Any] = [5, None, "abc", ["x"], [5], [None], [{"status": "no such"}]]
    for samples in odd:
        save_safe(tmp_path / "y", {"samples": samples}, "--flag")
        with pytest.raises(BadInputError, match=r"/y holds no samples as --save-debug-rollout-data writes them"):
            load_samples(args, 3)
    save_safe(tmp_path / "y", {"samples": []}, "--flag")
    with pytest.raises(BadInputError, match=r"/y has no samples in it"):
        load_samples(args, 3)


def test_a_missing_rollout_is_noticed_before_anything_starts(tmp_path: Path) -> None:
    args = options(tmp_path, num_rollout=3, start_rollout_id=None, load=None)
    for rollout_id in (1, 2):
        save_samples(args, rollout_id, samples(1))
    with pytest.raises(BadInputError, match=r"there is no file .*/000.pt for rollout 0, counted from 0, of --num-ro"):
        check_recorded(args)
    check_recorded(Namespace(**vars(args) | {"start_rollout_id": 1}))
    check_recorded(Namespace(**vars(args) | {"load": "a checkpoint after some rollout"}))
    with pytest.raises(BadInputError, match="for rollout 3, counted"):
        check_recorded(Namespace(**vars(args) | {"load": "x", "num_rollout": 4}))
    check_recorded(Namespace(**vars(args) | {"num_rollout": 0}))


@pytest.mark.parametrize(("share", "kept"), [(0.4, [100, 102]), (0.01, [100]), (1.0, [100, 101, 102, 103, 104])])
def test_a_share_of_the_groups(share: float, kept: list[int], tmp_path: Path) -> None:
    args, before = options(tmp_path), samples()
    save_samples(args, 0, before)
    args.load_debug_rollout_data_subsample = share
    found = load_samples(args, 0)
    assert found == [sample for sample in before if sample.group_index in kept]
    assert load_samples(args, 0) == found


def test_kept_groups_are_spread_evenly() -> None:
    for groups in range(1, 40):
        for share in (0.05, 0.25, 0.5, 0.9, 1.0):
            kept = kept_groups(groups, share)
            assert len(kept) == max(1, round(groups * share))
            assert kept == sorted(set(kept))
            assert kept[-1] < groups
            gaps = [b - a for a, b in itertools.pairwise(kept)]
            assert not gaps or max(gaps) - min(gaps) <= 1
    assert kept_groups(0, 0.5) == []
