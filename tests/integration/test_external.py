"""Servers that somebody else has started: a run checks them, brings them its weights, sends them requests, and goes on
without one that is lost; others join and leave in mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from slime.backends.sglang.engine import Engine
from slime.backends.sglang.external import KEY_VARIABLES
from slime.files.control_file import control_file, read_control_file
from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.test_membership import versions_of
from tests.integration.tiny import KEYS, engine_args, log_probs_of
from tests.integration.tiny_run import flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_FLAGS = ["--max-total-tokens", "8192", "--enable-deterministic-inference"]
_FLAGS += ["--uvicorn-access-log-exclude-prefixes", "/health"]  # requests are counted here
_DISTRIBUTED, _GENERATED = "/update_weights_from_distributed", '"POST /generate HTTP/1.1" 200'


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("external"))


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[Engine]:
    """One that asks for keys, and has been told nothing of any run."""
    args = engine_args(workspace / "model", workspace, sglang_cli=_FLAGS)
    engine = Engine(args, 0, "127.0.0.1", KEYS, workspace / "server.log", None, name="server")
    engine.start()
    yield engine
    engine.stop()


def calls(server: Engine) -> str:
    return Path(server._log_path).read_text()


def test_a_run_without_engines_of_its_own_trains_by_a_server_that_runs_already(
    workspace: Path, server: Engine, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    line = flags(
        workspace,
        run_dir,
        colocate=None,
        num_rollout=2,
        lr="1e-2",
        rollout_external_engine_addrs=[server.url.removeprefix("http://")],
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
        check_weight_update_equal=True,
    )
    keys = dict(zip(KEY_VARIABLES, KEYS, strict=True))
    with TrainProcess(line, tmp_path / "log", env=keys) as process:
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left(ignore=[str(workspace / "model")])
    assert server.poll() is None
    assert server.control(30.0).weight_version() == "2"
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert [versions_of(run_dir, rollout_id) for rollout_id in range(2)] == [{"0"}, {"1"}]
    assert calls(server).count(_GENERATED) == 32 + 3  # samples, and the probe of each push
    assert series(run_dir, "rollout/engines_alive") == [1, 1]
    for path in (tmp_path / "log", *run_dir.rglob("*")):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert not [key for key in KEYS if key in text], path


def test_a_server_that_shares_no_disk_pulls_the_newest_version(workspace: Path, server: Engine, tmp_path: Path) -> None:
    run_dir, copies = tmp_path / "run", tmp_path / "copies"
    line = flags(
        workspace,
        run_dir,
        colocate=None,
        rollout_num_gpus=1,
        num_rollout=500,
        update_weight_transport="disk",
        lr="1e-2",
    )
    with TrainProcess(line, tmp_path / "log") as process:
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > 1, RUN_S, "two steps")
        url, key = read_control_file(run_dir)
        pull = [sys.executable, str(ROOT / "tools/pull_versions.py"), url, server.url, "--to", str(copies), "--once"]
        secrets = dict(zip(("SLIME_CONTROL_KEY", *KEY_VARIABLES), (key, *KEYS), strict=True))
        done = subprocess.run(
            [*pull, "--poll", "1"], capture_output=True, text=True, timeout=RUN_S, env={**os.environ, **secrets}
        )
        assert done.returncode == 0, done.stderr
        process.kill(signal.SIGINT)
        assert process.wait(RUN_S) == 128 + signal.SIGINT, process.tail()
        process.assert_no_process_left(ignore=[str(workspace / "model")])
    (copy,) = copies.iterdir()
    version = server.control(30.0).weight_version()
    assert copy.name.startswith(f"weight_v{int(version):06d}-")
    assert server.control(30.0).model_info()["model_path"] == str(copy)
    assert int(version) > 0
    assert f"version {version}: " in done.stdout
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    reply = requests.post(
        f"{server.url}/generate", json=body, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60
    ).json()
    found = reply["meta_info"]["output_token_logprobs"]
    expected = log_probs_of(
        AutoModelForCausalLM.from_pretrained(copy).eval(), body["input_ids"], [token for _, token, _ in found]
    )
    torch.testing.assert_close(torch.tensor([log_prob for log_prob, *_ in found]), expected, atol=1e-4, rtol=0)


def await_requests(process: TrainProcess, server: Engine) -> None:
    """Until it has answered some more."""
    before = calls(server).count(_GENERATED)
    process.wait_until(lambda: calls(server).count(_GENERATED) > before + 8, RUN_S, "requests")


def change(run_dir: Path, *words: str) -> str:
    """What `tools/engines.py` prints."""
    command = [sys.executable, str(ROOT / "tools/engines.py"), str(run_dir), *words, "--timeout", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_joins_a_colocated_run_leaves_joins_again_and_is_lost(
    workspace: Path, server: Engine, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    samples = str(run_dir / "samples_{rollout_id}.pt")
    line = flags(workspace, run_dir, num_rollout=500, router_policy="round_robin", save_debug_rollout_data=samples)
    before = calls(server).count(_GENERATED)
    keys = dict(zip(KEY_VARIABLES, KEYS, strict=True))
    with TrainProcess(line, tmp_path / "log", env=keys) as process:
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > 0, RUN_S, "a step")
        wrong = [sys.executable, str(ROOT / "tools/engines.py"), str(run_dir), "add", "127.0.0.1:9"]
        refused = subprocess.run(wrong, capture_output=True, text=True, timeout=RUN_S)
        assert (refused.returncode, "Connection refused" in refused.stderr) == (1, True), refused.stderr
        for name in ("engine 1", "engine 2"):
            assert f"{name} serves" in change(run_dir, "add", server.url)
            assert f"{name}  {server.url}" in change(run_dir, "list")
            await_requests(process, server)
            if name == "engine 1":
                change(run_dir, "remove", "1")
                assert name not in change(run_dir, "list")
        version = int(server.control(30.0).weight_version())
        server.stop()
        process.wait_until(lambda: "is lost" in (tmp_path / "log").read_text(), RUN_S, "its loss")
        steps = len(series(run_dir, "train/loss"))
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > steps + 2, RUN_S, "more steps")
        process.kill(signal.SIGINT)
        assert process.wait(RUN_S) == 128 + signal.SIGINT, process.tail()
        process.assert_no_process_left()
    assert not control_file(run_dir).exists()
    assert calls(server).count(_DISTRIBUTED) > 4
    assert before < calls(server).count(_GENERATED)
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    for rollout_id in range(version):
        assert versions_of(run_dir, rollout_id) == {str(rollout_id)}
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    lost = [(each["kind"], each["subject"]) for each in told if each["kind"] != "push_failed"]
    assert lost == [("engine_died", "engine 2")], "perhaps in the midst of a push, which is begun again then"
