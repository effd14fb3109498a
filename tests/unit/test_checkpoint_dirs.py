"""Checkpoint directories are complete or absent, whenever a run stops."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from slime.backends.megatron import trainer
from slime.backends.megatron.hf_to_torch_dist import check_target
from slime.files.checkpoints import LATEST, find_checkpoint, is_release, is_torch_dist
from slime.options.errors import OptionError
from slime.options.lora import check_adapters, check_base
from slime.training import checkpoint_dirs
from slime.training.checkpoint_dirs import begin_save, commit_directory, commit_save, staging_directory
from slime.utils.errors import BadInputError
from tests.algorithm_options import algorithm_options

NUM_GPUS = 0


def write(save_dir: Path, rollout_id: int, text: str) -> None:
    Path(begin_save(save_dir, rollout_id), "data").write_text(text)
    commit_save(save_dir, rollout_id)


def test_save_appears_only_when_committed(tmp_path: Path) -> None:
    save_dir = tmp_path / "save"
    assert find_checkpoint(save_dir) is None
    begin_save(save_dir, 12)
    assert find_checkpoint(save_dir) is None
    assert not (save_dir / "iter_0000012").exists()
    commit_save(save_dir, 12)
    assert find_checkpoint(save_dir) == (save_dir / "iter_0000012", 12)
    assert (save_dir / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert sorted(p.name for p in save_dir.iterdir()) == ["iter_0000012", "latest_checkpointed_iteration.txt"]


def test_half_written_save_is_ignored_and_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3, "three")
    Path(begin_save(tmp_path, 4), "half").write_text("written")
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000003", 3)
    write(tmp_path, 4, "four")
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000004", 4)
    assert [p.name for p in (tmp_path / "iter_0000004").iterdir()] == ["data"]
    assert (tmp_path / "iter_0000003" / "data").read_text() == "three"


def test_run_that_dies_before_it_names_the_latest_resumes_from_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 3, "three")
    begin_save(tmp_path, 4)
    commit_directory(tmp_path / "iter_0000004")
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000003", 3)


def test_save_over_an_older_one_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5, "old")
    write(tmp_path, 5, "new")
    assert (tmp_path / "iter_0000005" / "data").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    for text in ("one", "two"):
        (staging_directory(target) / text).write_text(text)
        commit_directory(target)
    assert [p.name for p in target.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_latest_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, 1, "one")
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("2")
    with pytest.raises(FileNotFoundError, match=r"names iter_0000002, but .* has iter_0000001"):
        find_checkpoint(tmp_path)
    latest.write_text("last")
    with pytest.raises(ValueError, match="should hold the number of a checkpoint or release, not 'last'"):
        find_checkpoint(tmp_path)


def test_a_release_is_followed_by_the_first_rollout(tmp_path: Path) -> None:
    """It holds weights only, as a conversion writes them."""
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("release")
    assert is_release(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"names release, but .* has no checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "release").mkdir()
    assert find_checkpoint(tmp_path) == (tmp_path / "release", -1)
    latest.write_text("3")
    assert not is_release(tmp_path)


def test_torch_dist_directory_is_known_by_the_file_written_last(tmp_path: Path) -> None:
    assert not is_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    assert is_torch_dist(tmp_path)


def test_where_a_critic_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where --critic-load says, and never from what a run left that ended between its first save's two parts."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(trainer, "MegatronLearner", lambda args, *rest: made.append(rest))
    save, model = tmp_path / "save", tmp_path / "model"
    model.mkdir()
    write(save / "critic", 0, "of a run that died")
    resumable = {"load": str(save), "save": str(save)}
    for options, source in (({}, "actor"), ({"critic_load": str(model)}, str(model)), (resumable, "actor")):
        trainer._make_critic(algorithm_options(advantage_estimator="ppo", lr=1e-6, **options), "actor", None)
        assert made.pop() == ("critic", source, None)


def test_other_adapters_than_the_checkpoints_are_named() -> None:
    saved = {"rank": 8, "alpha": 16.0, "target_modules": ["o_proj", "q_proj"]}

    def modules(targets: Collection[str]) -> Collection[str]:
        return [f"{i}.{name}" for i in range(2) for name in (["q_proj", "o_proj"] if "all" in targets else targets)]

    for own, flags in (
        ({"target_modules": ["q_proj"]}, "other adapters: go on with --lora-target-modules o_proj q_proj"),
        ({"rank": 4}, "other adapters: go on with --lora-rank 8"),
        ({"rank": 4, "target_modules": ["all"]}, "other adapters: go on with --lora-rank 8"),
        ({"rank": 4, "alpha": 8.0}, "other adapters: go on with --lora-rank 8 --lora-alpha 16.0"),
    ):
        with pytest.raises(ValueError, match=f"iter_0000001 holds {flags}$"):
            check_adapters("iter_0000001", saved, {**saved, **own}, modules)
    every = "--lora-rank 8 --lora-alpha 16.0 --lora-target-modules o_proj q_proj"
    with pytest.raises(ValueError, match=f"holds adapters: go on with {every}$"):
        check_adapters("iter_0000001", saved, None, modules)
    with pytest.raises(ValueError, match=r"holds a whole model, and this run trains adapters: .* by --ref-load"):
        check_adapters("iter_0000001", None, saved, modules)
    check_adapters("iter_0000001", saved, dict(saved), modules)
    check_adapters("iter_0000001", saved, {**saved, "target_modules": ["all"]}, modules)
    check_adapters("iter_0000001", {**saved, "target_modules": ["all"]}, saved, modules)


def test_both_bases_of_adapters_are_named_where_they_differ() -> None:
    saved, other = {"source": "/a", "sha256": "1"}, {"source": "/b", "sha256": "2"}
    expected = "iter_0000001 holds adapters of /a, and the base of this run, /b, has other weights: name .* start new"
    with pytest.raises(OptionError, match=expected):
        check_base("iter_0000001", saved, other)
    check_base("iter_0000001", saved, {**other, "sha256": "1"})
    check_base("iter_0000001", None, None)


@pytest.mark.parametrize(
    ("present", "latest", "force", "problem"),
    [
        ((), None, False, ""),
        ((".release.tmp",), None, False, ""),
        (("release", ".release.tmp"), None, False, "pass --force to replace it, or write release into"),
        (("release",), None, True, ""),
        (("release",), "release", False, "pass --force to replace it$"),
        (("release",), "release", True, ""),
        ((".release.tmp", ".release.replaced"), "release", False, ""),
        (("iter_0000007",), "7", True, "has other things in it"),
        (("release", "notes"), None, True, "has other things in it"),
        (("notes",), None, True, "has other things in it"),
        (("release", "release/0.distcp"), "release", True, ""),
        (
            ("release", "release/0.distcp", "release/notes"),
            "release",
            True,
            "release/notes is of no earlier conversion",
        ),
        (("release", "release/notes"), None, True, "release/notes is of no earlier conversion"),
    ],
)
def test_where_a_conversion_may_write(
    present: tuple[str, ...], latest: str | None, force: bool, problem: str, tmp_path: Path
) -> None:
    """Whenever an earlier one was killed: before, between and after the renames, and before it named its checkpoint."""
    for name in present:
        (tmp_path / name).mkdir()
    if latest:
        (tmp_path / LATEST).write_text(latest)
    with pytest.raises(BadInputError, match=problem) if problem else contextlib.nullcontext():
        check_target(tmp_path, force=force)


def see(rank: int, directory: str, others: str, ranks: int) -> None:
    """One rank, for which ``--save`` is a place of its own where ``others`` says so."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    place = Path(directory, "save", others if rank else "")
    try:
        checkpoint_dirs.check_shared(place, "--save")
        said = "shared"
    except (BadInputError, OSError) as error:
        said = str(error)
    Path(directory, f"rank{rank}").write_text(said)
    dist.destroy_process_group()


@pytest.mark.parametrize("others", ["", "elsewhere"])
def test_all_ranks_are_to_see_a_save(others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host, where the second's place stands for that of a host without the first's file system."""
    monkeypatch.setattr(checkpoint_dirs, "_SEEN_WITHIN_S", 0.3)
    start_processes(see, (str(tmp_path), others, 2), nprocs=2, start_method="fork")
    said = {tmp_path.joinpath(f"rank{rank}").read_text() for rank in range(2)}
    host = socket.gethostname()
    blind = f"--save {tmp_path}/save: training ranks on {host} do not see what the first one, on {host}, writes there: "
    if others:
        assert len(said) == 2, "each names its own"
        assert any(line.startswith(blind) for line in said)
        assert all("name a directory of a file system that all hosts with trainers have" in line for line in said)
    else:
        assert said == {"shared"}
    assert not list(tmp_path.joinpath("save").iterdir())


def test_all_ranks_hear_that_the_first_cannot_write(tmp_path: Path) -> None:
    tmp_path.joinpath("save").write_text("a file")
    start_processes(see, (str(tmp_path), "", 2), nprocs=2, start_method="fork")
    said = {tmp_path.joinpath(f"rank{rank}").read_text() for rank in range(2)}
    assert said == {f"[Errno 17] File exists: '{tmp_path}/save'"}


def test_a_single_rank_writes_nothing_to_see(tmp_path: Path) -> None:
    checkpoint_dirs.check_shared(tmp_path / "save", "--save")
    assert not list(tmp_path.iterdir())
