"""events.jsonl: a line a fault, of whichever process tells of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slime.observability import events

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def _no_log_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_log", None)
    monkeypatch.setattr(events, "_version", events._version)


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / events.FILE).read_text().splitlines()]


def test_a_line_says_what_when_and_what_was_done(tmp_path: Path) -> None:
    before = time.time()
    events.add("engine_died", "engine 0", phase="rollout 3", cause="of no run", action="nothing")
    events.begin(str(tmp_path), "driver")
    cause = "engine 0 ended with status 137 (signal 9)\nlast lines of the log"
    events.add("engine_died", "engine 0", phase="rollout 3", cause=cause, action="start it again", version="3")
    events.begin(str(tmp_path), "rollout_manager")
    told = {"phase": "rollout 3", "cause": "", "action": "started again", "seconds": 4.56789}
    events.add("router_died", "router", **told)  # type: ignore[arg-type]
    events.at_version("4")
    events.add("router_back", "router", **told)  # type: ignore[arg-type]
    first, second, third = lines(tmp_path)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()  # type: ignore[operator]
    assert first == {
        **{"role": "driver", "kind": "engine_died", "subject": "engine 0", "phase": "rollout 3", "version": "3"},
        **{"cause": "engine 0 ended with status 137 (signal 9)", "action": "start it again", "seconds": None},
    }
    assert second == {
        **{"role": "rollout_manager", "kind": "router_died", "subject": "router", "phase": "rollout 3"},
        **{"version": "none yet", "cause": "", "action": "started again", "seconds": 4.568},
    }
    assert (third["kind"], third["version"]) == ("router_back", "4")


def test_only_known_kinds_are_told(tmp_path: Path) -> None:
    events.begin(str(tmp_path), "driver")
    with pytest.raises(AssertionError, match="engine_dies"):
        events.add("engine_dies", "engine 0", phase="", cause="", action="")
    assert not (tmp_path / events.FILE).exists()
