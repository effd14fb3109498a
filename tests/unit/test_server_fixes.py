"""What every process of a server mends of SGLang before it begins: slime/backends/sglang/launch.py calls it all."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from slime.backends.sglang import fixes
from slime.backends.sglang.cpu import stand_ins
from slime.processes.heartbeat import DIRECTORY_VARIABLE
from slime.processes.server_process import FLOAT8_VARIABLE, GENERATE_KEY_VARIABLE
from slime.utils.patching import ALLOW_VARIABLE, version_of

NUM_GPUS = 0

PROCESS = """
import slime.backends.sglang.launch  # as in a scheduler, which runs the module again, but not its main
import json, logging, sys
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.scheduler import Scheduler, load_plugins
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.utils.weight_checker import WeightChecker

def mended(function):
    return function.__module__ == "slime.backends.sglang.fixes"

load_plugins()  # as a scheduler's process does first
import multiprocessing, signal, threading
from slime.backends.sglang.cpu import stand_ins
from sglang.srt.entrypoints import engine
engine._set_envs_and_config = lambda _: multiprocessing.set_start_method("spawn", force=True)
stand_ins.fork_processes()
signal.signal(signal.SIGQUIT, lambda *_: None)

def tell(pipe):
    default = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    pipe.send([multiprocessing.get_start_method(), default, "inherited" in globals()])

def begin():
    engine._set_envs_and_config(None)
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=tell, args=(there,))
    child.start()
    told = here.recv()
    child.join()
    return multiprocessing.get_start_method(), told

inherited = True
alone = begin() == ("fork", ["spawn", True, True])
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
engine._set_envs_and_config(None)
with_others = multiprocessing.get_start_method() == "spawn"
done.set()

logged = logging.getLogRecordFactory()("name", logging.INFO, "path", 1, "api_key=a-key", (), None)
print(json.dumps({
    "sleep_when_all_do": mended(weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation),
    "route_by_present_weights": mended(Glm4MoeGate.forward),
    "find_experts_in_turn": mended(FusedMoE.make_expert_params_mapping),
    "keep_cache_scales": mended(weight_updater._export_static_state),
    "beat_in_loops": getattr(Scheduler.process_input_requests, "marks_turns", False),
    "record_loads": "load_record" in WeightChecker.handle.__code__.co_filename,
    "fork_processes": alone and with_others,
    "strike_keys_from_log": logged.getMessage() == "api_key=***",
}))
"""


def test_every_process_of_a_server_has_the_fixes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "n_routed_experts": 4}))
    command = [sys.executable, "-c", PROCESS, "--model-path", str(tmp_path), "--enable-memory-saver"]
    beats = tmp_path / "beats"
    beats.mkdir()
    environment = os.environ | {FLOAT8_VARIABLE: "1", GENERATE_KEY_VARIABLE: "a-key", DIRECTORY_VARIABLE: str(beats)}
    proven = version_of("sglang") == "0.5.17"
    environment[ALLOW_VARIABLE] = "0" if proven else "1"  # two of them are not for later releases
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr
    mended = json.loads(ran.stdout.splitlines()[-1])
    without = set() if proven else {"sleep_when_all_do", "keep_cache_scales", "route_by_present_weights"}
    assert {name for name, done in mended.items() if not done} == without
    counts = sorted(int.from_bytes(numbers.read_bytes()[:8], sys.byteorder) for numbers in beats.iterdir())
    assert len(counts) == 2, "its fork beats for itself"
    assert counts[-1] > 1, "a beat a second"


def test_processes_that_a_server_spawns_read_its_models_config() -> None:
    fixes.register_configs()
    config = AutoConfig.for_model("mimo", hidden_size=48)
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer).hidden_size)"
    ran = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(config), capture_output=True, timeout=300)
    assert ran.stdout.split() == [b"48"], ran.stderr


@pytest.mark.parametrize("loads", [True, False])
def test_operators_that_torchvision_declares_itself_are_not_declared_again(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would end the process; beside another build of torch its extension does not load."""
    loaded: list[str] = []
    declared: list[str] = []

    def load(path: str) -> None:
        loaded.append(path)
        if not loads:
            raise OSError("libcudart.so.13: cannot open shared object file")

    extension = tmp_path / "_C.so"
    extension.touch()
    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(stand_ins, "_torchvision_library", None)
    monkeypatch.setattr(stand_ins, "_torchvision", lambda: tmp_path)
    monkeypatch.setattr(torch.library.Library, "define", lambda self, schema: declared.append(schema.split("(")[0]))
    stand_ins.declare_torchvision_operators()
    assert loaded == [str(extension)]
    assert declared == ([] if loads else ["nms", "qnms"])


@pytest.mark.parametrize(
    ("path", "status", "is_worth"),
    [
        ("/generate", 200, False),
        ("/health?x=1", 200, False),
        ("/generate", 400, True),
        ("/health", 503, True),
        ("/health_generate", 200, True),
        ("/flush_cache", 200, True),
    ],
)
def test_the_log_has_no_line_of_each_answer(path: str, status: int, is_worth: bool) -> None:
    line = ("127.0.0.1:5000", "POST", path, "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', line, None)
    assert fixes.is_worth_a_line(record) == is_worth


def test_a_line_of_another_kind_stays() -> None:
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "redacted", None, None)
    assert fixes.is_worth_a_line(record)
