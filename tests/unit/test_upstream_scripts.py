"""The command lines of upstream's launch scripts, as they are but for paths: which pass, and why others do not."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import write_model
from tests.releases import gone_flags
from tests.small_rollout import CHATML, write_tokenizer
from tools.fuzzing.forked_dry_runs import OK, REFUSED, Outcome, dry_run

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SCRIPTS = json.loads((DATA / "upstream_scripts.json").read_text())
"""Of each: driver, the configuration of its model, words, what its refusal says ("" where it passes), and the files of
its example that lie beside it, which are this repository's."""
ROW = dict.fromkeys(("prompt", "input", "question"), "1+1") | {"label": "2", "reward_model": {"ground_truth": "2"}}
IN_CI = 8

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def outcome(entry: dict[str, Any], directory: Path) -> Outcome:
    """What becomes of a script's words with a model of its configuration and one row of data."""
    model = directory / "model"
    write_model(model, json.loads((DATA / "configs" / entry["config"] / "config.json").read_text()))
    write_tokenizer(model, CHATML)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = directory / "rows.jsonl"
    rows.write_text((json.dumps(ROW | {"messages": messages}) + "\n") * 4)
    for name, ours in entry.get("beside", {}).items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(re.sub(r"(?<=path: )\S+\.jsonl", str(rows), (ROOT / ours).read_text()))
    places = {"$MODEL": str(model), "$SAVE": str(directory / "save"), "$DATA": str(rows), "$DIR": str(directory)}
    words = entry["argv"]
    for name, place in places.items():
        words = words.replace(name, place)
    return dry_run(shlex.split(words), directory, asynchronous=entry["driver"] == "train_async.py")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry["script"], marks=() if number < IN_CI else pytest.mark.full)
        for number, entry in enumerate(sorted(SCRIPTS, key=lambda entry: bool(entry["refused"])))
    ],
)
def test_script(entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        found = outcome(entry, tmp_path)
    except ValueError as error:  # of a family that is not here
        found = Outcome(REFUSED, str(error))
    dropped = gone_flags() & set(entry["argv"].split())
    assert found.kind == (REFUSED if entry["refused"] or dropped else OK), found.text[-2000:]
    assert entry["refused"] in found.text or dropped
