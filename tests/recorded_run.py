"""The directory of a run as its processes write it, made in a moment: for tests of what reads one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

START = 1_700_000_000.0
STEP_S = 10.0
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202e"
LENGTHS = {"mean": 40.0, "max": 90.0, "min": 3.0}
SPIKE = 7, 1000.0
"""The step whose loss stands out of all, and that loss."""


def metric_lines(steps: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Four lines a step: 6 s of rollout, 2 s of training, 1 s of a push, 10 s in all; each 5th step an evaluation."""
    for step in steps:
        now = START + step * STEP_S
        lengths = {f"rollout/response_len/{what}": value for what, value in LENGTHS.items()}
        rollout = {"rollout/raw_reward": 0.5 + 0.4 * math.tanh(step / 20), "rollout/weight_staleness_mean": 1.0}
        times = {"perf/rollout_time": 8.0, "perf/wait_for_rollout_time": 6.0, "perf/rollout_ahead_time": 0.0}
        yield {"rollout/step": step, "time": now + 6} | rollout | lengths | times
        loss = SPIKE[1] if step == SPIKE[0] else 1 / (step + 1)
        train = {"train/loss": loss, "train/grad_norm": "NaN" if step == 3 else 2.0, "perf/train_time": 2.0}
        yield {"train/step": step, "time": now + 8} | train
        yield {"rollout/step": step, "time": now + 9, "perf/update_weights_time": 1.0}
        if step % 5 == 4:
            yield {"eval/step": step + 1, "time": now + 9.5, "eval/sums": step / 100, "perf/wait_for_eval_time": 0.5}
        yield {"rollout/step": step, "time": now + 10, "perf/step_time": 10.0}


def spans(rollout: int, samples: int = 4) -> Iterator[dict[str, Any]]:
    """Those of a step of `metric_lines`; for half of the rollout only rewards are waited for."""
    now, first = START + rollout * STEP_S, rollout * 1000

    def line(role: str, name: str, at: float, seconds: float, own: int, **fields: Any) -> dict[str, Any]:
        head = {"name": name, "start": now + at, "seconds": seconds, "id": first + own, "role": role}
        return head | {"rollout": rollout} | fields

    for sample in range(samples):
        later, of_sample = sample / 100, {"sample": rollout * samples + sample}
        inner, outer = {**of_sample, "parent": first + 10 + sample}, {**of_sample, "parent": first + 1}
        yield line("rollout_manager", "rollout/request", 0.1 + later, 1.9, 100 + sample, completion_tokens=40, **inner)
        yield line("rollout_manager", "rollout/generating", 0.1 + later, 1.9, 10 + sample, **outer)
        yield line("rollout_manager", "rollout/rewarding", 2.0 + later, 3.8, 200 + sample, **outer)
    yield line("rollout_manager", "rollout/samples", 0.0, 5.9, 1)
    yield line("driver", "driver/wait_for_rollout", 0.0, 6.0, 2)
    memory = {"host": 1.5 + rollout / 100, "used": 40.0, "peak": 30.0 + rollout % 3, "total": 80.0}
    yield line("trainer_0", "train/actor_train", 6.1, 1.8, 4, parent=first + 3, memory_gib=memory)
    yield line("trainer_0", "train/rollout", 6.0, 2.0, 3)
    yield line("driver", "driver/train", 6.0, 2.0, 5)
    yield line("driver", "driver/push_weights", 8.0, 1.0, 6, version=rollout + 1)


def append(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Lines of JSON, at the file's end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as output:
        output.writelines(json.dumps(line) + "\n" for line in lines)


def write_metrics(run_dir: Path, steps: Iterable[int]) -> None:
    append(run_dir / "metrics.jsonl", metric_lines(steps))


def write_trace(run_dir: Path, rollouts: Iterable[int]) -> None:
    for rollout in rollouts:
        for role in ("driver", "rollout_manager", "trainer_0"):
            append(run_dir / "trace" / f"{role}.jsonl", (line for line in spans(rollout) if line["role"] == role))


def write_run(run_dir: Path, steps: int = 20) -> Path:
    """All of it: metrics, trace, options, a fault, logs with warnings, one of which says what a model wrote."""
    write_metrics(run_dir, range(steps))
    write_trace(run_dir, range(steps))
    (run_dir / "config.yaml").write_text(f"versions: {{}}\nrollout:\n  num_rollout: {steps}\n  hf_checkpoint: none\n")
    fault = {"time": START + 5, "role": "rollout_manager", "kind": "engine_died", "subject": "engine 0", "phase": ""}
    append(run_dir / "events.jsonl", [{**fault, "cause": HOSTILE, "action": "it is started again", "seconds": 1.5}])
    logs = run_dir / "logs"
    logs.mkdir()
    (logs / "driver.log").write_text(
        "2026-11-27 00:00:01,000 slime.driver INFO all is well\n"
        f"2026-11-27 00:00:02,000 slime.driver WARNING {HOSTILE}\n"
        "Traceback (most recent call last):\n  ValueError: no\n"
        "2026-11-27 00:00:03,000 slime.driver INFO WARNING is a word here too, far behind\n"
    )
    (logs / "engine_0.log").write_text("[2026-11-27 00:00:01] WARNING:  Invalid HTTP request received.\n" * 3)
    router = "\x1b[2m2026-11-27 00:00:04\x1b[0m \x1b[31mERROR\x1b[0m router: a worker is gone\n"
    (logs / "router.log").write_text(router)
    return run_dir


def write_verdict(run_dir: Path) -> None:
    sentence = {"sentence": f"The reward grows. {HOSTILE}", "keys": ["rollout/raw_reward"]}
    (run_dir / "verdict.json").write_text(json.dumps({"verdict": "yes", "sentences": [sentence]}))
