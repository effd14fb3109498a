"""Large prompt files, read in several processes: the same rows in the same order, and a death is one line."""

from __future__ import annotations

import itertools
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.data.rows import dataset, row_workers
from slime.data.rows.dataset import load_prompts, train_prompt_spec
from slime.data.rows.prompt_rows import Encoding, RowEncoder
from slime.data.rows.reading import RawRow, open_rows

NUM_GPUS = 0

Args = Callable[..., Namespace]


@pytest.fixture
def args(rollout_args: Args, write_jsonl: Callable[..., str]) -> Namespace:
    rows = [
        {"prompt": [{"role": "user", "content": f"é {i} " * (i % 9)}], "label": i, "metadata": {"i": i}}
        for i in range(3500)
    ]
    for bad in (5, 1023, 1024, 3499):
        rows[bad] = {"label": bad}
    return rollout_args(
        prompt_data=write_jsonl(rows), apply_chat_template=True, skip_bad_rows=True, rollout_max_prompt_len=60
    )


def test_processes_read_what_one_reads(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = train_prompt_spec(args)
    alone = load_prompts(spec)
    monkeypatch.setattr(dataset, "num_workers", lambda path: 2)
    together = load_prompts(spec)
    assert [vars(sample) for sample in together] == [vars(sample) for sample in alone]
    skipped = [line for line in caplog.messages if line.startswith("skipped")]
    assert skipped == 2 * skipped[:4]
    assert (together.num_bad, together.num_too_long, together.digest) == (4, alone.num_too_long, alone.digest)
    assert together.prompt_lengths == alone.prompt_lengths


def test_processes_print_nothing(args: Namespace, capfd: pytest.CaptureFixture[str]) -> None:
    spec = train_prompt_spec(args)
    file = open_rows(spec.path)
    batch = list(itertools.islice(file.raw_rows(), 100))
    capfd.readouterr()
    assert len(list(row_workers.encodings(spec, file, RowEncoder(spec, file), [batch, batch], 2))) == 2
    assert capfd.readouterr() == ("", "")


def test_the_death_of_a_process_is_told(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = train_prompt_spec(args)
    file = open_rows(spec.path)
    started: list[int] = []
    popen = row_workers.subprocess.Popen

    def recording(*arguments: object, **options: object) -> object:
        process = popen(*arguments, **options)  # type: ignore[call-overload]
        started.append(process.pid)
        return process

    monkeypatch.setattr(row_workers.subprocess, "Popen", recording)

    def batches() -> Iterator[list[RawRow]]:
        rows = file.raw_rows()
        yield list(itertools.islice(rows, 100))
        os.kill(started[0], signal.SIGKILL)
        while batch := list(itertools.islice(rows, 100)):
            yield batch

    with pytest.raises(row_workers.WorkerError, match=r"a process that reads rows .* died \(exit status -9"):
        list(row_workers.encodings(spec, file, RowEncoder(spec, file), batches(), 2))
    for pid in started:
        assert not Path(f"/proc/{pid}").exists(), "none is left"


def test_small_files_need_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    for size, cores, workers in (
        (1 << 20, 8, 0),
        (31 << 20, 8, 0),
        (40 << 20, 8, 2),
        (1 << 30, 1, 0),
        (1 << 40, 64, 8),
    ):
        with path.open("wb") as file:
            file.truncate(size)
        monkeypatch.setattr(row_workers.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert row_workers.num_workers(path) == workers


def test_a_slice_is_read_in_as_many_processes_as_it_is_worth(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def encodings(*arguments: Any) -> Iterator[Encoding]:
        started.append(arguments[-1])
        return row_workers.encodings(*arguments[:-1], 0)

    monkeypatch.setattr(dataset, "encodings", encodings)
    monkeypatch.setattr(dataset, "num_workers", lambda path: 8)
    size = Path(args.prompt_data).stat().st_size
    labels = [sample.label for sample in load_prompts(train_prompt_spec(args))]
    for start, stop, fewest, workers in ((0, 10, size, 0), (-9, None, size, 0), (1, None, size // 2, 8)):
        monkeypatch.setattr(dataset, "FEWEST_BYTES", fewest)
        bounds = f"@[{start}:{'' if stop is None else stop}]"
        found = load_prompts(replace(train_prompt_spec(args), path=args.prompt_data + bounds))
        assert started[-1] == workers, bounds
        assert [sample.label for sample in found] == [label for label in labels if label in range(3500)[start:stop]]
    assert started[0] == 8, "of a whole file by its size"
