"""What tests share: command lines; of the rollout side a byte-level tokenizer, options and a client; of
conversions tiny models."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from slime.entry.arguments import parse_args
from slime.observability import events, trace
from slime.rollout import runtime as runtime_module
from slime.rollout.engine import state
from slime.rollout.runtime import RolloutRuntime
from slime.utils import http_client
from tests.command_line import Fails, Parse, command, failure, write_model, write_rows
from tests.fake_client import FakeClient
from tests.small_rollout import CHATML, small_rollout, write_tokenizer


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A conversion in this process sets it: the next test reads what a program tells by default."""
    yield
    logging.getLogger("slime").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test begins to write of a run, the next one does not go on with."""
    monkeypatch.setattr(events, "_log", None)
    monkeypatch.setattr(trace, "_trace", None)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """The events of a run whose directory is the test's, so far."""
    events.begin(str(tmp_path), "driver")
    return lambda: [json.loads(line) for line in (tmp_path / events.FILE).read_text().splitlines()]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutRuntime]:
    """The test's own, and its context's; with the bounds of the options that the test makes last."""
    for module in (runtime_module, http_client):  # a manager's, if the test makes one
        monkeypatch.setattr(module, "_of_process", None)
    runtime = RolloutRuntime(Namespace(request_timeout=60.0, sglang_server_concurrency=8, num_engines=1))
    with runtime.active():
        yield runtime
    for loop in list(runtime.http._sessions):
        if loop.is_running():  # that of rollouts, which outlives the test
            asyncio.run_coroutine_threadsafe(runtime.http.close(), loop).result(60)


@pytest.fixture
def launch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, offline, with the files that `tests.command_line.command` names."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # which has read the variable before
    return tmp_path


@pytest.fixture
def parse() -> Parse:
    """Options of a command line."""
    return lambda words="", without="": parse_args(command(words, without))


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """The one line that a command line fails with."""
    return lambda words="", without="": failure(capsys, words, without)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """Writes a tokenizer with the given chat template and returns its directory; every byte is one token."""

    def make(chat_template: str | None) -> Path:
        directory = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(directory, chat_template)
        return directory

    return make


@pytest.fixture(scope="session")
def tokenizer_dir(make_tokenizer: Callable[[str | None], Path]) -> Path:
    """A directory with a ChatML tokenizer."""
    return make_tokenizer(CHATML)


@pytest.fixture
def rollout_args(tokenizer_dir: Path, runtime: RolloutRuntime) -> Callable[..., Namespace]:
    """Makes options at their defaults, but for keyword arguments and what makes a small, quick rollout."""

    def make(**changes: Any) -> Namespace:
        args = small_rollout(tokenizer_dir, **changes)
        runtime._per_engine, runtime._num_planned = args.sglang_server_concurrency, args.num_engines
        return args

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (or raw lines) to a file and returns its path."""

    def write(rows: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def make_args(rollout_args: Callable[..., Namespace], write_jsonl: Callable[..., str]) -> Callable[..., Namespace]:
    """Makes options of a rollout over prompts of 1, 2, 3, ... letters, labelled with their length."""

    def make(num_prompts: int = 12, **changes: Any) -> Namespace:
        rows = [{"prompt": "x" * (i + 1), "label": str(i + 1)} for i in range(num_prompts)]
        return rollout_args(**{"prompt_data": write_jsonl(rows), "rm_type": "f1", **changes})

    return make


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClient], FakeClient]:
    """Lets rollouts take a client in place of their own."""

    def use_client(client: FakeClient) -> FakeClient:
        monkeypatch.setattr(state, "make_client", client.make)
        return client

    return use_client


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> the directory of a tiny model, with a file of a tokenizer."""
    from tests.parallel import tiny  # only here: it takes seconds

    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        if not (root / kind).exists():
            tiny.model(kind).save_pretrained(root / kind)
            (root / kind / "tokenizer.json").write_text("{}")
        return root / kind

    return get
