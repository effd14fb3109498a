"""Which checkpoint or snapshot trainers come back to, and what is said of one that could not be written."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.driver import recovery
from slime.driver.recovery import snapshot_directory
from slime.fleet.placement import Placement, Slot
from slime.fleet.train_group import Checkpoint, Saver
from slime.observability import events
from slime.ray import janitor
from slime.ray.supervision import Deadline, InputError, LostError, RunError

NUM_GPUS = 0
LOST = LostError("train on rollout 5: the process of trainer 1 died", ["trainer 1"], "train on rollout 5")
PLACEMENT = Placement([], [Slot(0, "here", None), Slot(1, "here", None)], [])


class Group:
    """Trainers that write what they are told to, or fail."""

    def __init__(self) -> None:
        self.actors, self.fails, self.version = [0, 1], False, "4"
        self.error: RunError = LOST

    def call_each(self, phase: str, method: str, limit: Deadline, values: Any) -> None:
        for rollout_id, state, *places in values:
            for place in () if self.fails else places:
                directory = Path(place, f"iter_{rollout_id:07d}")
                directory.mkdir(parents=True, exist_ok=True)
                Path(place, "latest_checkpointed_iteration.txt").write_text(str(rollout_id))
            assert (state is not None) or method == "save"
        if self.fails:
            raise self.error


def make_saver(tmp_path: Path, **changes: Any) -> tuple[Saver, Group]:
    values = {"save": str(tmp_path / "kept"), "critic_save": str(tmp_path / "kept" / "critic"), "use_critic": False}
    values |= {"save_hf": None, "save_lora": None, "checkpoint_timeout": 5.0}
    group = Group()
    return Saver(Namespace(**values | changes), group), group  # type: ignore[arg-type]


def test_the_newest_is_one_of_the_runs_own(tmp_path: Path) -> None:
    older = tmp_path / "kept"
    (older / "iter_0000099").mkdir(parents=True)
    (older / "latest_checkpointed_iteration.txt").write_text("99")
    saver, group = make_saver(tmp_path)
    assert saver.newest() is None, "another run has written that one"
    memory = str(tmp_path / "memory")
    saver.snapshot(0, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 0)
    saver.save(1, {})
    assert saver.newest() == Checkpoint(str(older), str(older / "critic"), 1)
    assert saver.has_written(1)
    assert not saver.has_written(99)
    saver.snapshot(2, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 2)
    assert [path.name for path in Path(memory).glob("iter_*")] == ["iter_0000002"], "only the newest is kept"
    group.fails = True
    with pytest.raises(LostError):
        saver.snapshot(3, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 2)


def test_what_could_not_be_saved_is_told_of_unless_a_trainer_was_lost(tmp_path: Path, told: Any) -> None:
    saver, group = make_saver(tmp_path)
    group.fails = True
    with pytest.raises(LostError):
        saver.save(3, {})
    assert not (tmp_path / events.FILE).exists()
    group.error = RunError("save after rollout 3: trainer 1 failed: --save /kept: the disk is full")
    with pytest.raises(RunError, match="the disk is full"):
        saver.save(3, {})
    (line,) = told()
    assert (line["kind"], line["subject"], line["phase"]) == ("save_failed", "the trainers", "save after rollout 3")
    assert line["version"] == "4"
    assert line["cause"] == str(group.error)
    assert "iter_0000003 is as it was before" in line["action"]


def test_a_critic_has_snapshots_of_its_own(tmp_path: Path) -> None:
    saver, _ = make_saver(tmp_path, use_critic=True)
    saver.snapshot(4, {}, str(tmp_path / "memory"))
    saver.snapshot(5, {}, str(tmp_path / "memory"))
    newest = saver.newest()
    assert newest == Checkpoint(str(tmp_path / "memory"), str(tmp_path / "memory" / "critic"), 5)
    assert sorted(path.parent.name for path in tmp_path.rglob("iter_0000005")) == ["critic", "memory"]
    assert not list(tmp_path.rglob("iter_0000004"))


def test_snapshots_are_refused_where_they_have_no_room_or_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "MEMORY", str(tmp_path))
    monkeypatch.setenv(janitor.RUN_MARK, "abc")
    monkeypatch.setattr(recovery, "expected_checkpoint_bytes", lambda args: 1 << 20)
    args = Namespace(trainer_snapshot_interval=2)
    assert snapshot_directory(args, PLACEMENT, "here") == f"{tmp_path}/slime-abc"
    assert (tmp_path / "slime-abc").stat().st_mode & 0o777 == 0o700
    apart = Placement([], [Slot(0, "here", None), Slot(1, "there", None)], [])
    with pytest.raises(
        InputError, match=r"--trainer-snapshot-interval: .* host, here, and the trainers are on here, there"
    ):
        snapshot_directory(args, apart, "here")
    monkeypatch.setattr(recovery, "expected_checkpoint_bytes", lambda args: 1 << 60)
    with pytest.raises(InputError, match=r"two snapshots of about .* each have to fit"):
        snapshot_directory(args, PLACEMENT, "here")
    assert snapshot_directory(Namespace(trainer_snapshot_interval=None), PLACEMENT, "here") is None
