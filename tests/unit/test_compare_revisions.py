"""tools/compare_revisions.py: what it takes for equal, and what it records of a run that knows nothing of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import shipped
from tools import compare_revisions
from tools.revisions import comparing, trees
from tools.revisions.comparing import Finding

NUM_GPUS = 0
LOSS = 0.1923767775297165
STEPS: list[dict[str, Any]] = [
    {"rollout/step": 0, "time": 1.0, "perf/rollout_time": 2.0, "rollout/raw_reward": 0.5},
    {"train/step": 0, "time": 2.0, "train/loss": LOSS, "train/grad_norm": 3.0, "train/ois": 1.0, "train/lr-pg_0": 0.1},
    {"train/step": 1, "time": 3.0, "train/loss": 0.25, "train/grad_norm": 2.0, "train/ois": 1.0, "train/lr-pg_0": 0.1},
    {"rollout/step": 0, "time": 4.0, "perf/step_time": 5.0},
]
NEEDED = ["train/loss", "train/grad_norm"]
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
SAMPLE: dict[str, Any] = {
    "prompt": "1+1=",
    "tokens": [1, 2, 3],
    "response_length": 1,
    "loss_mask": [1],
    "rollout_log_probs": [-0.5],
    "weight_versions": ["0"],
    "reward": 1.0,
    "status": "completed",
    "metadata": {"operands": [1, 1]},
    "session_id": "by chance",
    "non_generation_time": 0.125,
}
REQUESTS: list[dict[str, Any]] = [
    {"path": "/generate", "headers": [], "body": {"input_ids": [1, 2], "sampling_params": {"top_p": 1.0}}},
    {"path": "/generate", "headers": [], "body": {"input_ids": [1, 3], "sampling_params": {"top_p": 1.0}}},
]


def different(found: list[Finding]) -> dict[str, str]:
    return {finding.quantity: finding.difference for finding in found if finding.difference is not None}


def metrics(tmp_path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> dict[str, str]:
    """The differences after ``change`` of the head's lines."""
    for side in ("base", "head"):
        lines = [dict(line) for line in STEPS]
        if side == "head":
            change(lines)
        (tmp_path / side).mkdir()
        (tmp_path / side / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(comparing.metrics(tmp_path / "base", tmp_path / "head", NEEDED))
    # Each loss and norm for itself, the others together.
    assert {"steps", "other rollout/ metrics", "other train/ metrics"} <= {finding.quantity for finding in found}
    return different(found)


def test_equal_metrics_are_equal_whatever_the_times(tmp_path: Path) -> None:
    def slower(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line |= {"time": 99.0, "perf/rollout_time": 99.0}

    assert metrics(tmp_path, slower) == {}


def test_a_metric_that_differs_in_the_last_bit(tmp_path: Path) -> None:
    near = math.nextafter(LOSS, 1)
    found = metrics(tmp_path, lambda lines: lines[1].update({"train/loss": near}))
    assert found == {"train/loss": f"train/step 0, train/loss: base {LOSS}, head {near}"}
    assert str(LOSS) != str(near)


def test_of_metrics_without_a_row_of_their_own_all_that_differ_are_named(tmp_path: Path) -> None:
    found = metrics(tmp_path, lambda lines: lines[2].update({"train/ois": 2.0, "train/lr-pg_0": 0.2}))
    first = "train/step 1, train/ois: base 1.0, head 2.0"
    assert found == {"other train/ metrics": f"{first} (2 of 2 metrics: train/ois, train/lr-pg_0)"}


@pytest.mark.parametrize("value", [0, -0.0, "NaN"])
def test_numbers_are_compared_as_they_are_written(tmp_path: Path, value: object) -> None:
    found = metrics(tmp_path, lambda lines: lines[0].update({"rollout/raw_reward": value}))
    assert list(found) == ["other rollout/ metrics"]
    assert comparing.first_difference({"x": 0.0}, {"x": value}) == f"x: base 0.0, head {value!r}"
    assert comparing.first_difference({"x": value}, {"x": value}) is None


def test_a_missing_step_is_said_once_and_the_others_are_compared(tmp_path: Path) -> None:
    def end_early(lines: list[dict[str, Any]]) -> None:
        del lines[2]
        lines[1]["train/grad_norm"] = 4.0

    assert metrics(tmp_path, end_early) == {
        "steps": "train/step 1: only base has it",
        "train/grad_norm": "train/step 0, train/grad_norm: base 3.0, head 4.0",
    }


def test_a_metric_that_only_one_logs(tmp_path: Path) -> None:
    found = metrics(tmp_path, lambda lines: lines[1].update({"train/new_loss": 1.0}))
    assert found == {"train/new_loss": "train/step 0, train/new_loss: only head has it"}


def test_two_runs_that_logged_no_training_are_not_equal(tmp_path: Path) -> None:
    found = different(list(comparing.metrics(tmp_path, tmp_path, NEEDED)))
    assert found == dict.fromkeys(["steps", *NEEDED], "neither base nor head has any")


def weights(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str | None:
    """The difference after ``change`` of the head's tensors, which are in two files."""
    base, head = tmp_path / "base", tmp_path / "head"
    for directory in (base, head):
        directory.mkdir()
    save_file(WEIGHTS, base / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    change(tensors)
    for name, tensor in tensors.items():
        save_file({name: tensor}, head / f"model-{name}.safetensors")
    return comparing.weights(base, head).difference


def test_equal_weights_are_equal_in_other_files(tmp_path: Path) -> None:
    assert weights(tmp_path, lambda tensors: None) is None


def test_weights_that_differ_in_the_last_bit(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a"][1, 0] = math.nextafter(3.0, 4.0)  # of float64: float32 rounds it away
        tensors["a"][1, 2] = torch.nextafter(torch.tensor(5.0), torch.tensor(6.0))

    assert weights(tmp_path, change) == "a: base 5.0, head 5.000000476837158 at 5; 1 of 6 values differ"


def test_a_zero_of_the_other_sign_is_another_weight(tmp_path: Path) -> None:
    found = weights(tmp_path, lambda tensors: tensors["a"][0, :1].neg_())
    assert found == "a: base 0.0, head -0.0 at 0; 1 of 6 values differ"


def test_weights_that_are_no_numbers_are_equal_if_their_bits_are(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([math.nan])}
    save_file(tensors, tmp_path / "model.safetensors")
    assert comparing.weights(tmp_path, tmp_path).difference is None
    assert not torch.equal(*[load_file(tmp_path / "model.safetensors")["a"]] * 2), "the values are not equal"


def test_weights_of_another_dtype(tmp_path: Path) -> None:
    found = weights(tmp_path, lambda tensors: tensors.update(b=tensors["b"].float()))
    assert found == "b: base torch.bfloat16 [2], head torch.float32 [2]"


def test_weights_of_another_shape(tmp_path: Path) -> None:
    found = weights(tmp_path, lambda tensors: tensors.update(a=tensors["a"].reshape(3, 2)))
    assert found == "a: base torch.float32 [2, 3], head torch.float32 [3, 2]"


def test_a_missing_tensor(tmp_path: Path) -> None:
    assert weights(tmp_path, lambda tensors: tensors.pop("b")) == "b: only base has it"


def test_two_exports_without_weights_are_not_equal(tmp_path: Path) -> None:
    assert comparing.weights(tmp_path, tmp_path).difference == "neither base nor head has any"


def samples(tmp_path: Path, **changes: Any) -> dict[str, str]:
    """The differences where the head's second sample is another."""
    for side in ("base", "head"):
        (tmp_path / side).mkdir()
        second = SAMPLE | (changes if side == "head" else {})
        torch.save({"rollout_id": 0, "samples": [SAMPLE, second]}, tmp_path / side / "0.pt")
    return different(list(comparing.samples(tmp_path / "base", tmp_path / "head")))


def test_equal_samples_are_equal_whatever_their_ids_and_times(tmp_path: Path) -> None:
    assert samples(tmp_path, session_id="by chance, too", non_generation_time=0.25) == {}


@pytest.mark.parametrize(
    ("field", "value", "quantity", "difference"),
    [
        ("prompt", "1+2=", "prompts", "prompt: base '1+1=', head '1+2='"),
        ("tokens", [1, 2, 4], "tokens", "tokens[2]: base 3, head 4"),
        ("tokens", [1, 2, 3, 4], "tokens", "tokens: base has 3, head 4"),
        ("rollout_log_probs", [-0.5000000000000001], "log-probs", "rollout_log_probs[0]: base -0.5, head "),
        ("weight_versions", ["1"], "weight versions", "weight_versions[0]: base '0', head '1'"),
        ("reward", 0.5, "rewards", "reward: base 1.0, head 0.5"),
        ("metadata", {"operands": [1, 2]}, "other fields of samples", "metadata, operands[1]: base 1, head 2"),
        ("session_id", None, "other fields of samples", "session_id: base 'an id', head None"),
    ],
)
def test_a_sample_that_differs(tmp_path: Path, field: str, value: object, quantity: str, difference: str) -> None:
    found = samples(tmp_path, **{field: value})
    assert list(found) == [quantity]
    assert found[quantity].startswith(f"rollout 0, sample 1, {difference}")


def requests(tmp_path: Path, base: list[dict[str, Any]], head: list[dict[str, Any]]) -> str | None:
    for side, lines in (("base", base), ("head", head)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return comparing.requests(tmp_path / "base", tmp_path / "head").difference


def test_requests_may_be_sent_in_any_order(tmp_path: Path) -> None:
    assert requests(tmp_path, REQUESTS, REQUESTS[::-1]) is None


def test_a_request_that_asks_for_something_else(tmp_path: Path) -> None:
    other = {**REQUESTS[1], "body": {"input_ids": [1, 3], "sampling_params": {"top_p": 0.9}}}
    found = requests(tmp_path, REQUESTS, [REQUESTS[0], other])
    assert found == "request[1], body, sampling_params, top_p: base 1.0, head 0.9"


def test_a_request_less(tmp_path: Path) -> None:
    assert requests(tmp_path, REQUESTS, REQUESTS[:1]) == "request: base has 2, head 1"


def test_runs_of_which_no_request_was_seen_are_not_equal(tmp_path: Path) -> None:
    assert requests(tmp_path, [], []) == "neither base nor head has any"


CLIENTS = """
import asyncio, json, sys
import aiohttp, httpx
from aiohttp import web

async def main():
    async def answer(request):
        return web.json_response(await request.json())
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    payload = {"input_ids": [1], "rid": "abc"}
    async with aiohttp.ClientSession(headers={"Authorization": "secret"}) as session:
        text = json.dumps(payload).encode()
        made = aiohttp.payload.JsonBytesPayload(payload, lambda value: json.dumps(value).encode())
        for options in ({"json": payload}, {"data": text}, {"data": made}):
            async with session.post(f"{url}/generate", **options) as reply:
                assert await reply.json() == payload
        async with session.post(f"{url}/workers", json={"api_key": "secret"}) as reply:
            assert await reply.json() == {"api_key": "secret"}
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.post(f"{url}/v1/completions", json=payload)).json() == payload
    await runner.cleanup()

asyncio.run(main())
import sitecustomize
print(hidden)
"""


def test_requests_are_recorded_as_they_are_sent(tmp_path: Path) -> None:
    """By a program that knows nothing of it, on a host that has a sitecustomize of its own."""
    recorder, host = tmp_path / "recorder", tmp_path / "host"
    for directory in (recorder, host):
        directory.mkdir()
    shutil.copy(trees._RECORDER, recorder)
    (host / "sitecustomize.py").write_text("import builtins; builtins.hidden = 'the host has it, too'")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(recorder), str(host)])}
    command = [sys.executable, "-c", CLIENTS]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (ran.stdout, ran.returncode) == ("the host has it, too\n", 0), ran.stderr
    (file,) = recorder.glob("*.jsonl")
    assert "secret" not in file.read_text()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["path"] for line in lines] == ["/generate", "/generate", "/generate", "/v1/completions"]
    assert all(line["body"] == {"input_ids": [1], "rid": "an id"} for line in lines)
    assert all("authorization" in line["headers"] for line in lines[:3])


def test_a_table_has_a_line_for_each_quantity() -> None:
    found = [("dense", Finding("train/loss", None)), ("ppo", Finding("steps", "train/step 1: only base has it"))]
    assert compare_revisions.table(found).splitlines() == [
        "dense  train/loss  equal",
        "ppo    steps       train/step 1: only base has it",
    ]


def test_a_working_tree_is_copied_as_git_sees_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    for name, text in ((".gitignore", "ignored\n"), ("kept.py", "1"), ("gone.py", "2"), ("ignored", "3")):
        (root / name).write_text(text)
    (root / "link").symlink_to(tmp_path)

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True, timeout=60)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(trees, "ROOT", root)
    (root / "kept.py").write_text("changed")
    (root / "gone.py").unlink()
    (root / "new.py").write_text("new")
    trees.write_working_tree(copy)
    assert sorted(path.name for path in copy.iterdir()) == [".gitignore", "kept.py", "new.py"]
    assert (copy / "kept.py").read_text() == "changed"
    trees.write_commit(trees.commit_of("HEAD"), tmp_path / "first")
    assert (tmp_path / "first" / "kept.py").read_text() == "1"
    assert (tmp_path / "first" / "gone.py").read_text() == "2"


def test_the_trees_own_slime_is_imported_and_not_the_installed_one(tmp_path: Path) -> None:
    output, files = tmp_path / "base", tmp_path / "files"
    for directory in (output, files):
        directory.mkdir()
    tree = trees.Tree("base", files, output, 1.0)
    with pytest.raises(trees.CompareError, match="base: `import slime` is not that of"):
        tree.check_import()
    (files / "slime").mkdir()
    (files / "slime" / "__init__.py").touch()
    tree.check_import()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "there is no revision nowhere"),
        (["HEAD", "--head", "nowhere"], "there is no revision nowhere"),
        (["--", "-x"], "there is no revision -x"),
        (
            ["HEAD", "--keep", str(shipped.ROOT / "tools")],
            "is not an empty directory: name another, nothing was removed",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], line: str) -> None:
    command = [sys.executable, str(shipped.ROOT / "tools" / "compare_revisions.py"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("compare_revisions.py: error: ")
    assert last.endswith(line)


def test_a_failed_run_leaves_its_log_and_a_compared_one_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_revisions.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "work"))

    def compare(commits: list[str | None], options: object, work: Path) -> Iterator[tuple[str, Finding]]:
        work.mkdir()
        (work / "log").write_text("why")
        yield "dense", Finding("steps", None)
        raise trees.CompareError("base/experts/recording: status 1")

    monkeypatch.setattr(compare_revisions, "compare", compare)
    assert compare_revisions.main(["HEAD"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "compare_revisions.py: error: base/experts/recording: status 1\n"
    assert captured.out == "\ndense  steps  equal\n", "what was compared before it"
    assert (tmp_path / "work" / "log").read_text() == "why"
    for difference, status in ((None, 0), ("a: only base has it", 1)):
        monkeypatch.setattr(compare_revisions, "compare", lambda *_: [("dense", Finding("steps", difference))])  # noqa: B023
        (tmp_path / "work").mkdir(exist_ok=True)
        assert compare_revisions.main(["HEAD"]) == status
        assert not (tmp_path / "work").exists()
    assert "0 quantities are equal, 1 differ" in capsys.readouterr().out
