"""The log of a process: what is in it, what standard error still shows, and what is struck out."""

from __future__ import annotations

import errno
import io
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.observability import logs
from slime.observability.logs import LineFile

NUM_GPUS = 0
ours = logging.getLogger("slime.test_logs")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error, of a process whose root logger shows WARNING and above, as that of an actor."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    before = logging.root.level
    logging.root.setLevel(logging.WARNING)
    yield stream
    logging.root.setLevel(before)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Begin the log of a trainer whose options are these; its file."""

    def function(**options: object) -> Path:
        logs.begin(Namespace(run_dir=str(tmp_path), **options), "trainer_0")
        return tmp_path / "logs" / "trainer_0.log"

    yield function
    logs._secrets.clear()


def test_the_file_has_info_and_standard_error_what_it_had(shown: io.StringIO, begin: Callable[..., Path]) -> None:
    file = begin()
    ours.debug("debug")
    ours.info("info %d", 1)
    ours.warning("warning")
    first, *lines = [line.split(" ", 2)[2] for line in file.read_text().splitlines()]
    assert first == f"slime.observability.logs INFO trainer_0: process {os.getpid()} on {socket.gethostname()}"
    assert lines == [
        "slime.test_logs INFO info 1",
        "slime.test_logs WARNING warning",
    ]
    assert shown.getvalue() == "warning\n"


def test_without_handlers_a_warning_is_a_line_of_standard_error(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is in a driver, which sets up no logging."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)  # so that it is put back
    begin()
    ours.info("info")
    ours.warning("warning")
    assert capsys.readouterr().err == "warning\n"


def test_a_request_of_a_users_client_is_no_line(shown: io.StringIO, begin: Callable[..., Path]) -> None:
    file = begin()
    logging.getLogger("httpx").info("HTTP Request: POST ...")
    ours.info("last")
    assert "HTTP" not in file.read_text()


def test_a_logger_with_a_level_of_its_own_is_shown_as_before(shown: io.StringIO, begin: Callable[..., Path]) -> None:
    begin()
    users = logging.getLogger("a_users_module")
    try:
        users.setLevel(logging.INFO)
        users.getChild("part").info("shown")
    finally:
        users.setLevel(logging.NOTSET)
    users.info("not shown")
    assert shown.getvalue() == "shown\n"


def test_short_values_stay_and_nested_ones_go(shown: io.StringIO, begin: Callable[..., Path]) -> None:
    file = begin(x_token=1, judge={"api_key": "sk-0123456789", "of": {"other_token": "sk-0123456789-longer"}})
    ours.info("1 sk-0123456789-longer")
    assert file.read_text().endswith("INFO 1 <redacted>\n")


def test_a_large_file_makes_room_for_another(
    shown: io.StringIO, begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = begin()
    monkeypatch.setattr(logs, "_MOST_BYTES", 1)
    for text in ("first", "second", "third"):
        ours.info(text)
    assert [path.read_text().split()[-1] for path in (Path(f"{file}.1"), file)] == ["second", "third"]


def test_secrets_are_struck_out(
    shown: io.StringIO, begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-environment")
    file = begin(wandb_key="of-the-options", train_env_vars={"STORE_TOKEN": "of-the-ranks"}, seed=7)
    logs.hide(("of-the-run", None))
    ours.info("of-the-environment of-the-options of-the-ranks of-the-run 7 http://user:pass@host/?api_key=x Bearer abc")
    try:
        raise ValueError("of-the-run")
    except ValueError:
        ours.exception("failed")
    text = file.read_text()
    assert (
        "<redacted> <redacted> <redacted> <redacted> 7 http://<redacted>@host/?api_key=<redacted> Bearer <redac" in text
    )
    assert "ValueError: <redacted>" in text
    assert "of-the" not in text


def test_a_resumed_run_appends(shown: io.StringIO, begin: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer_0.log").write_text("earlier\n")
    file = begin()
    ours.info("later")
    lines = file.read_text().splitlines()
    assert lines[0] == "earlier"
    assert lines[-1].endswith("later")


def test_a_full_disk_warns_once(
    shown: io.StringIO, begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LineFile, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = begin()
    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        ours.info("lost")
        ours.info("lost too")
    ours.info("there")
    (warning,) = shown.getvalue().splitlines()
    assert f"--run-dir {file}: the disk is full" in warning
    assert file.read_text().endswith("there\n")
    assert "lost" not in file.read_text()


def test_a_second_run_of_a_process_has_a_log_of_its_own(shown: io.StringIO, tmp_path: Path) -> None:
    for name in ("first", "second"):
        logs.begin(Namespace(run_dir=str(tmp_path / name)), "driver")
        ours.info(name)
    texts = [(tmp_path / name / "logs" / "driver.log").read_text() for name in ("first", "second")]
    assert [text.splitlines()[-1].split()[-1] for text in texts] == ["first", "second"]
