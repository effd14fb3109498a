"""Processes that import before there is work for them, of this file as their module."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Iterator
from multiprocessing import context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import setproctitle

from slime.processes.spares import Spares
from tests.waiting import wait_for, wait_for_ends

NUM_GPUS = 0
SPAWN = multiprocessing.get_context("spawn")


def answer(answers: Connection, **words: Any) -> None:
    """Tell who it is and what it has of its parent, then end with a status of its own."""
    setproctitle.setproctitle("one of them")
    answers.send(
        {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "title": psutil.Process().cmdline()[0],
            "variables": [os.environ.get(name) for name in ("SPARES_TEST_NEW", "SPARES_TEST_GONE")],
            "start_method": multiprocessing.get_start_method(),
            "daemon": multiprocessing.current_process().daemon,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "words": words,
        }
    )
    raise SystemExit(7)


def start(**words: Any) -> tuple[Any, dict[str, Any]]:
    """A process of this module's, and what it answers."""
    reader, writer = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=answer, args=(writer,), kwargs=words)
    process.start()
    writer.close()
    assert reader.poll(60)
    return process, reader.recv()


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spares]:
    monkeypatch.setattr(context.SpawnProcess, "_Popen", staticmethod(context.SpawnProcess._Popen))
    monkeypatch.setenv("SPARES_TEST_GONE", "1")
    made = Spares(__name__, 2)
    made.install()
    yield made
    made.dismiss()


def pids_of(spares: Spares) -> list[int]:
    return [spare._process.pid for spare in spares._waiting]


def test_what_is_spawned_is_one_of_them_and_has_what_its_parent_has_by_then(
    spares: Spares, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = pids_of(spares)
    monkeypatch.setenv("SPARES_TEST_NEW", "é\n")
    monkeypatch.delenv("SPARES_TEST_GONE")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        for pid in waiting:
            process, found = start(number=pid)
            assert process.pid == pid
            assert found == {
                "pid": pid,
                "parent": os.getpid(),
                "title": "one of them",
                "variables": ["é\n", None],
                "start_method": multiprocessing.get_start_method(),
                "daemon": False,
                "files": soft - 1,
                "words": {"number": pid},
            }
            process.join(60)
            assert process.exitcode == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    process, found = start()
    assert process.pid == found["pid"]
    assert found["pid"] not in waiting, "none is left, and another is spawned"
    process.join(60)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD"])
def test_another_environment_of_what_is_read_once_takes_another_process(
    name: str, spares: Spares, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [psutil.Process(pid) for pid in pids_of(spares)]
    monkeypatch.setenv(name, "")
    process, found = start()
    assert found["pid"] not in [spare.pid for spare in waiting]
    process.join(60)
    wait_for_ends(waiting, "those that cannot be used")


def test_they_end_when_anything_else_is_spawned(spares: Spares) -> None:
    waiting = [psutil.Process(pid) for pid in pids_of(spares)]
    process = SPAWN.Process(target=os.getpid)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    wait_for_ends(waiting, "those that are not needed")


def test_one_that_has_ended_is_replaced(spares: Spares) -> None:
    first, second = pids_of(spares)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: psutil.Process(first).status() == psutil.STATUS_ZOMBIE, "it was killed")
    process, found = start()
    assert found["pid"] not in (first, second)
    process.join(60)


def test_what_cannot_be_sent_is_told_of_as_ever(spares: Spares) -> None:
    process = SPAWN.Process(target=answer, args=(lambda: None,))
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        process.start()
