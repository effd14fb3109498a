"""What cannot be written is one line with cause, flag, place, free space and what to do; nothing half-written stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from slime.driver import process
from slime.driver.preflight import places
from slime.files import atomic_io, storage
from slime.files.hf_writer import HFWriter
from slime.files.safe_dump import save_safe
from slime.files.storage import StorageError, why_not_written, writing
from slime.observability.metrics import MetricsLogger
from slime.options.debug import derive_templates
from slime.options.errors import OptionError
from slime.weights.hf_directory import HFDirectoryWriter

NUM_GPUS = 0
FREE = r"\S+ \w+ of \S+ \w+ are free in /\S+"


@contextlib.contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow, as a full disk does, with a number of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing(number: int, file: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), file)


def torch_writer() -> RuntimeError:
    return RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def test_a_full_device_is_said_to_be_full(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=rf"^--save {tmp_path}: the disk is full; {FREE}: free some space there, or"),
        writing("--save", tmp_path),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")


TENSORS = {"a": torch.zeros(1 << 16)}
WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda directory: (directory / "x").write_bytes(bytes(1 << 17)),
    "torch": lambda directory: torch.save(TENSORS, directory / "x"),
    "safetensors": lambda directory: save_file(TENSORS, directory / "x"),
    "Hugging Face": lambda directory: HFWriter(directory, directory).add([("a", TENSORS["a"])]),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("gone", [False, True])
def test_every_library_that_writes_is_understood(name: str, gone: bool, tmp_path: Path) -> None:
    """torch's own error says neither that the disk is full nor which; that of safetensors has only the text."""
    place = tmp_path / "gone" if gone else tmp_path
    why = "a directory was removed, or cannot be made there" if gone else "a file would be larger than may be .*ulimit"
    with pytest.raises(StorageError) as raised, no_file_above(1 << 12), writing("--save-hf", place, note="x is whole"):
        WRITERS[name](place)
    line = str(raised.value)
    assert re.fullmatch(rf"--save-hf {place}: {why}.*; {FREE}: mend that, or name another directory; x is whole", line)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failing(errno.ENOSPC), "the disk is full"),
        (failing(errno.EDQUOT), "the quota of this user is used up"),
        (failing(errno.EROFS, "{place}/iter/x"), "the file system is read-only ({place}/iter/x)"),
        (failing(errno.EACCES, "{place}/iter/x"), "it may not be written to by this user ({place}/iter/x)"),
        (failing(errno.EIO), "input/output error"),
        (failing(errno.ESTALE), "stale file handle"),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "the disk is full"),
        (CheckpointException("write", {1: (failing(errno.ENOSPC), None)}), "the disk is full"),  # type: ignore[dict-item]
        (failing(errno.ENOENT, "/elsewhere/tokenizer.json"), None),
        (failing(errno.EBADF), None),
        (ValueError("a bug"), None),
    ],
)
def test_causes(error: Exception, expected: str | None, tmp_path: Path) -> None:
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.format(place=tmp_path)
    line = why_not_written(error, "--save", tmp_path)
    if expected is None:
        assert line is None
        with pytest.raises(type(error)), writing("--save", tmp_path):
            raise error
    else:
        assert line is not None
        assert expected.format(place=tmp_path) in line
        assert "\n" not in line
        with pytest.raises(StorageError, match=re.escape(line[:40])), writing("--save", tmp_path):
            raise error


@pytest.mark.parametrize("number", storage._CAUSES)
def test_an_error_with_a_file_is_of_its_own_disk(number: int, tmp_path: Path) -> None:
    assert why_not_written(failing(number, "/elsewhere/prompts.jsonl"), "--save", tmp_path) is None
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    staged_of_link = (("link", ".link.tmp/y"), ("link", ".link.replaced/y"), ("real/../link", ".link.tmp"))
    real = (("link", "real/iter/x"), ("real", "link/x"), ("link/x", "real/.x.tmp/y"), ("real/x", "link"))
    for place, file in (*real, *staged_of_link):
        line = why_not_written(failing(number, str(tmp_path / file)), "--save", tmp_path / place)
        assert line is not None
        assert line.startswith(f"--save {tmp_path / place}: {storage._CAUSES[number]}")


def after(earlier: Exception, error: Exception, *, hidden: bool) -> Exception:
    """``error``, as it is when it was raised while ``earlier`` was handled."""
    error.__context__, error.__suppress_context__ = earlier, hidden
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (failing(errno.ENOTCONN), False),  # a socket's
        (RuntimeError("Parent directory of config was changed by hook"), False),
        (RuntimeError("Parent directory /elsewhere/x does not exist."), False),
        (RuntimeError("Parent directory {place}/x does not exist."), True),
        (after(failing(errno.ENOSPC), ValueError("a bug"), hidden=True), False),
        (after(failing(errno.ENOSPC), ValueError("a bug"), hidden=False), True),
    ],
)
def test_only_errors_of_writing_there_are_told_as_such(error: Exception, told: bool, tmp_path: Path) -> None:
    if isinstance(error, RuntimeError):
        error = RuntimeError(str(error).format(place=tmp_path))
    assert (why_not_written(error, "--save", tmp_path) is not None) == told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, None])
def test_what_torch_does_not_tell_is_tried(number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's error that came of another: the disk may have room again by now, and the line must not lie."""

    def temporary(dir: Path) -> Any:
        raise failing(number or errno.EBADF)

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", temporary)
    error = CheckpointException("write", {3: (torch_writer(), None)})  # type: ignore[dict-item]
    line = why_not_written(error, "--save", tmp_path)
    assert line is not None
    causes = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota", None: "torch could not write a file there"}
    assert causes[number] in line
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    assert ("most likely" in str(why_not_written(error, "--save", tmp_path))) == (number is None)


def test_no_file_is_left_half_written(tmp_path: Path) -> None:
    with no_file_above(1 << 12):
        with pytest.raises(StorageError, match=r"--save-debug-rollout-data .*ulimit"):
            save_safe(tmp_path / "deep" / "7.pt", {"tensor": TENSORS["a"]}, "--save-debug-rollout-data")
        with pytest.raises(OSError, match="large"):
            atomic_io.write_file(tmp_path / "deep" / "x", lambda path: path.write_bytes(bytes(1 << 16)))
    assert not list((tmp_path / "deep").iterdir())


def test_weights_on_disk_name_their_flag(tmp_path: Path) -> None:
    args = Namespace(run_dir=str(tmp_path / "run"), update_weight_disk_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    writer = HFDirectoryWriter(args, "weight_v1")
    with pytest.raises(StorageError, match=r"^--update-weight-disk-dir .*weight_v1: a file would"), no_file_above(99):
        writer.add([("a", TENSORS["a"])])
    writer.discard()
    assert not list(tmp_path.rglob("weight_v1*"))
    (tmp_path / "run").touch()
    args.update_weight_disk_dir = None
    with pytest.raises(StorageError, match=r"^--run-dir .*is in the place of one"):
        HFDirectoryWriter(args, "x")


def test_a_directory_has_a_name_that_leaves_room_for_what_is_written_beside_it(tmp_path: Path) -> None:
    longest = 255 - len(atomic_io.replaced(tmp_path / "x").name) + 1
    assert not storage.why_no_directory(tmp_path / ("x" * longest))
    assert "too long" in storage.why_no_directory(tmp_path / ("x" * (longest + 1)))
    with atomic_io.written_directory(tmp_path / ("x" * longest)):
        pass


def test_what_cannot_be_put_back_does_not_hide_why_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_back(final: Path) -> None:
        raise failing(errno.ESTALE)

    monkeypatch.setattr(atomic_io, "put_back", put_back)
    with pytest.raises(ValueError, match="why"), atomic_io.written_directory(tmp_path / "x"):
        raise ValueError("why")
    assert not list(tmp_path.iterdir())


# ---- metrics


def logger(run_dir: Path, **changes: Any) -> MetricsLogger:
    return MetricsLogger(Namespace(run_dir=str(run_dir), use_tensorboard=False, use_wandb=False, **changes))


def test_a_run_goes_on_without_metrics_and_with_them_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = logger(tmp_path)
    metrics.log({"a": 1.0}, "step", 0)
    with no_file_above((tmp_path / "metrics.jsonl").stat().st_size + 10):
        for step in (1, 2):
            metrics.log({"a": 1.0}, "step", step)
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"warning: --run-dir {tmp_path}/metrics.jsonl: a file would .*{FREE}.*; the run goes on", warning)
    metrics.log({"a": 1.0}, "step", 3)
    assert capsys.readouterr().err == "", "on a disk that is nearly full, every other line fits"
    metrics.close()
    assert "metrics.jsonl: 2 lines of metrics are lost" in capsys.readouterr().err
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 3], "no half line"


def test_a_tracker_that_fails_ends_neither_the_run_nor_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        place = ("--tb-project-name", "/there")

        def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
            raise failing(errno.ENOSPC)

        def close(self) -> None:
            raise RuntimeError("closed twice")

    metrics = logger(tmp_path)
    metrics._sinks.insert(0, Broken())
    for step in range(3):
        metrics.log({"a": 1.0}, "step", step)
    metrics.close()
    warning, end = capsys.readouterr().err.splitlines()
    assert "--tb-project-name /there: the disk is full" in warning
    assert "lines of metrics are lost" in end
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for check in ("check_patches", "check_remaining"):
        monkeypatch.setattr(process, check, lambda *_: "")
    (tmp_path / "file").touch()

    def train(args: Namespace) -> None:
        logger(tmp_path / "file" / "run")

    with pytest.raises(SystemExit) as ended:
        process.run_driver(train, Namespace(dry_run=False))
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: --run-dir {tmp_path}/file/run/metrics.jsonl: something that is not a directory is in" in line
    assert re.search(FREE, line)


# ---- dumps


def debug_args(template: str, **changes: Any) -> Namespace:
    names = ("save_hf", "save_lora", "load_debug_rollout_data", "save_debug_train_data", "dump_details", "load", "save")
    values = dict.fromkeys(names) | {"save_debug_rollout_data": template, "start_rollout_id": None, "ckpt_step": None}
    return Namespace(**values | changes)


@pytest.mark.parametrize("name", ["003.pt", "eval_3.pt"])
def test_dumps_of_another_run_are_not_written_over(name: str, tmp_path: Path) -> None:
    template = f"{tmp_path}/a[b]/{{rollout_id:03d}}.pt"
    (tmp_path / "a[b]").mkdir()
    for other in ("notes.pt", "3.txt", "x3.pt"):
        (tmp_path / "a[b]" / other).touch()
    derive_templates(debug_args(template))
    (tmp_path / "a[b]" / name).touch()
    with pytest.raises(OptionError, match=rf"^--save-debug-rollout-data: .*{name} is there, 1 of an earlier run that"):
        derive_templates(debug_args(template))
    derive_templates(debug_args(template, start_rollout_id=4))
    with pytest.raises(OptionError, match="would be overwritten"):
        derive_templates(debug_args(template, start_rollout_id=3))


def test_dumps_of_details_name_their_own_flag_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    dumps = tmp_path / "train_data"
    dumps.mkdir()
    (dumps / "0_12.pt").touch()
    args = debug_args("x", save_debug_rollout_data=None, dump_details=str(tmp_path))
    with pytest.raises(OptionError, match=r"^--dump-details: .*0_12.pt is there"):
        derive_templates(Namespace(**vars(args)))
    checkpoints = tmp_path / "saves"
    (checkpoints / "iter_0000000").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("0")
    derive_templates(Namespace(**vars(args) | {"load": str(checkpoints)}))
    shutil.rmtree(checkpoints)


def test_a_number_may_stand_in_several_places_of_a_dump(tmp_path: Path) -> None:
    template = f"{tmp_path}/{{rollout_id}}/d_{{rollout_id:03d}}.pt"
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "d_004.pt").touch()
    derive_templates(debug_args(template))
    (tmp_path / "3" / "d_003.pt").touch()
    with pytest.raises(OptionError, match=r"d_003.pt is there, 1 of an earlier run"):
        derive_templates(debug_args(template))


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew_by_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "dumps" / "rollout_data").mkdir(parents=True)
    (tmp_path / "dumps" / "rollout_data" / "0.pt").touch()
    saves, other = tmp_path / "saves", tmp_path / "other"
    values = {"save_debug_rollout_data": None, "dump_details": str(tmp_path / "dumps"), "load": str(saves)}
    with pytest.raises(OptionError, match="is there, 1 of an earlier run"):  # nothing has run to there
        derive_templates(debug_args("x", **values, save=str(saves)))
    saves.mkdir()
    other.mkdir()
    derive_templates(debug_args("x", **values, save=f"{saves}/"))
    with pytest.raises(OptionError, match="is there, 1 of an earlier run"):
        derive_templates(debug_args("x", **values, save=str(other)))


# ---- room


def room_args(tmp_path: Path, **changes: Any) -> Namespace:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(1000, 20), "b": torch.zeros(5)}, tmp_path / "model" / "model.safetensors")
    values = {"hf_checkpoint": str(tmp_path / "model"), "save": str(tmp_path / "saves" / "x"), "save_hf": None}
    values |= {"placement": "colocate", "random_weights": False, "lora_rank": None, "num_rollout": 10}
    values |= {"start_rollout_id": None, "save_interval": 3, "use_critic": False, "critic_save": None}
    values |= {"params_dtype": "bfloat16", "optimizer": "adam", "sgd_momentum": 0.9, "save_lora": None}
    return Namespace(**values | changes)


def test_checkpoints_that_will_not_fit_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, nbytes = room_args(tmp_path), 20005 * (2 + 3 * 4)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: usage._replace(free=4 * nbytes - 1))
    (warning,) = places.room_warnings(args)  # after rollouts 3, 6, 9 and the last
    assert warning.startswith(
        f"--save {tmp_path}/saves/x: the run will save 4 of about 274 KiB each, and 1.07 MiB are "
    )
    args.start_rollout_id = 3
    assert places.room_warnings(args) == []
    args.save_hf, args.save = str(tmp_path / "hf"), None
    assert places.room_warnings(args) == [], "one place, written over and over"
    args.save_hf, args.start_rollout_id = str(tmp_path / "hf_{rollout_id}"), 0
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: usage._replace(free=4 * 20005 * 2 - 1))
    assert len(places.room_warnings(args)) == 1
    args.random_weights = True
    assert places.room_warnings(args) == []


@pytest.mark.parametrize(
    ("dtype", "optimizer", "momentum", "each"),
    [("float32", "adam", 0.9, 16), ("bfloat16", "sgd", 0.9, 10), ("bfloat16", "sgd", 0.0, 6)],
)
def test_size_of_a_checkpoint(dtype: str, optimizer: str, momentum: float, each: int) -> None:
    args = Namespace(params_dtype=dtype, optimizer=optimizer, sgd_momentum=momentum)
    assert places.checkpoint_bytes(args, 10) == 10 * each
