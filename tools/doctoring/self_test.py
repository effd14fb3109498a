"""A whole run in small: one push to a real engine, one rollout, one step, by train.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.doctoring.findings import Finding, Setting, fine, stops

_SHOWN = 3
_MODEL_S = 120.0
_STOP_S = 60.0
_FLAGS = {
    "input-key": "prompt",
    "label-key": "label",
    "rm-type": "random",
    "num-rollout": "1",
    "rollout-batch-size": "2",
    "n-samples-per-prompt": "2",
    "rollout-max-response-len": "4",
    "max-tokens-per-gpu": "256",
    "actor-num-gpus-per-node": "1",
    "lr": "1e-4",
    # A GPU's share is the cache of so many tokens of so small a model that the list of its places does not fit.
    "sglang-max-total-tokens": "65536",
}
_SWITCHES = ("colocate", "apply-chat-template", "use-dynamic-batch-size")


def run_in_small(setting: Setting) -> Iterator[Finding]:
    """A model of random weights is made, served, asked, trained for a step and pushed again."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as place:
        directory = Path(place)
        made = [sys.executable, "tools/make_tiny_model.py", str(directory / "model"), "--num-layers", "2"]
        status, said = _ended(made, directory / "model.log", _MODEL_S, setting)
        if status == 0:
            status, said = _ended(_command(directory, setting), directory / "run.log", setting.self_test_s, setting)
        if status != 0:
            why = f"ended with status {status}" if status is not None else f"took longer than {setting.self_test_s:g} s"
            yield stops(f"the self-test {why}: {' / '.join(said[-_SHOWN:]) or 'nothing was printed'}")
            return
        found = _metrics(directory / "run" / "metrics.jsonl")
    pushes = [line["perf/update_weights_time"] for line in found if "perf/update_weights_time" in line]
    probes = [line["rollout/push_probe_abs_diff"] for line in found if "rollout/push_probe_abs_diff" in line]
    if len(pushes) < 2 or not any("train/loss" in line for line in found):
        yield stops(f"the self-test trained nothing: it logged {len(pushes)} pushes and no loss")
        return
    probe = f", engine and trainer differ by {max(probes):.1g}" if probes else ""
    seconds = ", ".join(f"{each:.1f}" for each in pushes)
    yield fine(f"a run in small took {time.monotonic() - began:.0f} s: {len(pushes)} pushes ({seconds} s){probe}")


def _command(directory: Path, setting: Setting) -> list[str]:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "label": str(2 * i)} for i in range(4)]
    (directory / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    places = {"hf-checkpoint": "model", "ref-load": "model", "prompt-data": "data.jsonl", "run-dir": "run"}
    values = _FLAGS | {flag: str(directory / name) for flag, name in places.items()}
    switches = [*_SWITCHES, *([] if setting.has_gpus else ["fp32"])]
    line = [sys.executable, "train.py", *(f"--{flag}" for flag in switches)]
    return line + [word for flag, value in values.items() for word in (f"--{flag}", value)]


def _ended(words: list[str], log: Path, limit: float, setting: Setting) -> tuple[int | None, list[str]]:
    """The exit status, None where the limit has ended it, and the lines that it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        process = subprocess.Popen(
            words, cwd=setting.root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: int | None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # also by Ctrl-C; train.py then ends its servers and Ray
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(_STOP_S)
    return status, [line for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
