"""A tiny Hugging Face model, and one engine behind one router for all the tests that only need a live one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang.engine import Engine
from slime.backends.sglang.router import Router
from slime.utils.http_client import Http
from slime.weights import EngineAddress
from tests.integration.tiny import KEYS, Service, engine_args, write_tiny_model
from tests.proxy import RecordingProxy


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    run_dir = tmp_path_factory.mktemp("run")
    args = engine_args(
        tiny_model_dir, run_dir, sglang_cli=["--max-total-tokens", "8192", "--enable-deterministic-inference"]
    )
    engine = Engine(args, 0, "127.0.0.1", KEYS, run_dir / "engine_0.log", None)
    router = Router(args, "127.0.0.1", KEYS, run_dir / "router.log")
    proxy = RecordingProxy()
    patch = pytest.MonkeyPatch()
    secrets = {"WANDB_API_KEY": "key-of-the-host", "HF_TOKEN": "token-of-the-host"}
    for name, value in (proxy.variables | secrets).items():
        patch.setenv(name, value)
    try:
        engine.prepare()  # as where trainers start first
        engine.start()
        router.start()
        router.add(engine.url)
        router.wait_registered([engine.url], timeout=60)
        address = EngineAddress(engine.url, 1, *KEYS)
        patch.undo()
        http = Http(60.0)
        http.add_api_keys(router.api_keys())
        with http.active():
            yield Service(args, engine, router, address, engine.control(timeout=60), proxy)
    finally:
        patch.undo()
        proxy.close()
        router.stop()
        engine.stop()
