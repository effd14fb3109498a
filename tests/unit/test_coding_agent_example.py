"""examples/coding_agent_rl: an agent by script in real sandboxes, and its work judged in others."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.coding_agent_rl import generate as example
from examples.coding_agent_rl import make_data, swe
from slime.agent.rollout import AgentError
from slime.agent.sandbox import LocalSandbox, SandboxError, detached
from slime.data import Sample
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from tests.fake_client import FakeClient
from tests.scripted_turns import Args, Use, end_of_rollout, turn_by_turn
from tools.make_tiny_model import TOOL_CHAT_TEMPLATE

NUM_GPUS = 0
END = "<|im_end|>"
FAULT = ("sub", "+", ("a", "b"))
MEND = "sed -i 's/+/-/' calc.py"
CHEAT = "sed -i 's/self.assertEqual.*/pass/' test_calc.py; git add -A; python3 -m unittest -q test_calc"


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>{END}"


@functools.cache
def kind() -> str:
    """A jail where the host has one, else plain processes."""

    async def opened() -> None:
        async with LocalSandbox():
            return

    try:
        asyncio.run(opened())
    except SandboxError:
        return "plain"
    return "local"


@pytest.fixture
def args(
    make_args: Args,
    make_tokenizer: Callable[[str | None], Path],
    runtime: RolloutRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Namespace]:
    monkeypatch.setenv("SLIME_AGENT_SANDBOX", kind())
    monkeypatch.setenv("SLIME_AGENT_MINI_EXTRA_ARGS", "--system '' --pause 0.1")
    monkeypatch.setattr(detached, "_LAST_POLL_S", 0.2)
    args = make_args(hf_checkpoint=str(make_tokenizer(TOOL_CHAT_TEMPLATE)), rollout_max_response_len=300)
    yield args
    if "agent gateway" in runtime.services:
        runtime.services["agent gateway"][1].stop()


class Model(FakeClient):
    """Looks at the task first, and then says what the script of the task's name has."""

    def __init__(self, args: Namespace, scripts: Mapping[str, list[str]]) -> None:
        super().__init__(lambda number, ids, params: self._next(ids), seconds=0)
        self._tokenizer, self._scripts = load_tokenizer(args.hf_checkpoint), scripts

    def _next(self, prompt: list[int]) -> dict[str, Any]:
        said = self._tokenizer.decode(prompt)
        turns = said.count("<|im_start|>assistant") - 1
        if not turns:
            return self._answer(call(f"cat {swe.STATEMENT}"))
        script = next(script for name, script in self._scripts.items() if f"case {name}" in said)
        return self._answer(script[turns - 1])

    def _answer(self, text: str) -> dict[str, Any]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": meta | {"output_token_logprobs": [[-0.5, i] for i in ids]},
        }


def sample_of(name: str, **changes: Any) -> Sample:
    row = make_data.row(*FAULT)
    metadata = row["metadata"] | {"problem_statement": f"case {name}"} | changes
    return Sample(prompt=row["prompt"], label=row["label"], metadata=metadata, index=7)


def worked(args: Namespace, *samples: Sample) -> list[Sample | BaseException]:
    """The one sample that each became, at the same time; or what was raised."""

    async def one(sample: Sample) -> Sample:
        made = await example.generate(args, sample, train_sampling_params(args))
        assert isinstance(made, list)
        (part,) = made
        return part

    async def all_of() -> list[Sample | BaseException]:
        return await asyncio.gather(*map(one, samples), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(all_of(), 200))


def test_the_right_edit_is_rewarded_and_neither_none_nor_a_cheat(
    args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"public_host": "127.0.0.1", "bind": {"agent_host": "localhost"}}
    monkeypatch.setattr(example, "KNOBS", dataclasses.replace(example.KNOBS, **given))  # type: ignore[arg-type]
    scripts = {
        "mended": [call(MEND), f"done{END}"],
        "nothing": [f"done{END}"],
        "cheat": [call(CHEAT), f"done{END}"],
    }
    use(Model(args, scripts))
    found = worked(args, *map(sample_of, scripts))
    samples = [sample for sample in found if isinstance(sample, Sample)]
    assert len(samples) == 3, found
    mended, nothing, cheat = samples
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0], [sample.metadata["swe"] for sample in samples]
    assert "+    return a - b\n" in mended.metadata["swe"]["patch"]
    assert nothing.metadata["swe"]["patch"] == ""
    assert "test_calc.py" in cheat.metadata["swe"]["patch"]
    assert "+        pass\n" in cheat.metadata["swe"]["patch"]
    assert "FAILED" in cheat.metadata["swe"]["told"]
    for sample, script in zip(samples, scripts.values(), strict=True):
        assert sample.metadata["swe"]["status"] == 0
        said = [text for mask, text in turn_by_turn(args, sample) if mask]
        assert said == [call(f"cat {swe.STATEMENT}"), *script]


PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def sub(a, b):
-    return a + b
+    return a - b
"""
OUTSIDE = """diff --git a/.git/hooks/x b/.git/hooks/x
new file mode 100755
--- /dev/null
+++ b/.git/hooks/x
@@ -0,0 +1 @@
+echo
"""
F2P = "import sys\nsys.path.insert(0, '.')\nfrom calc import sub\nsys.exit(sub(7, 3) != 4)\n"
RUN_SCRIPT = 'python3 -c \'import calc, sys; print("t1", calc.sub(7, 3)); print("t2", *sys.argv[1:])\' $1'
PARSER = """import json, sys
lines = [line.split() for line in open(sys.argv[1])]
tests = [{"name": name, "status": "PASSED" if value in ("4", "test_calc.py") else "FAILED"} for name, value in lines]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""


def test_graders(tmp_path: Path) -> None:
    """Each kind, of a patch that mends and of one that does not; what does not apply, and what takes too long."""
    (tmp_path / "run.sh").write_text(RUN_SCRIPT)
    (tmp_path / "parser.py").write_text(PARSER)
    swepro = {"run_script_path": str(tmp_path / "run.sh"), "parser_script_path": str(tmp_path / "parser.py")}
    swepro |= {"selected_test_files": ["test_calc.py"], "fail_to_pass": ["t1"], "pass_to_pass": ["t2"]}  # type: ignore[dict-item]
    by_script = {"eval_cmd": None, "remote_env_info": {"f2p_script": F2P}}
    wrong = PATCH.replace("a - b", "a * b")
    cases: list[tuple[str, dict[str, Any], str, bool, str]] = [
        ("command", {}, PATCH, True, "status 0"),
        ("command, wrong", {}, wrong, False, "21 != 4"),
        ("program", by_script, PATCH, True, "status 0"),
        ("program, wrong", by_script, wrong, False, "status 1"),
        ("names", {"swepro": swepro}, PATCH, True, "2 of 2"),
        ("names, wrong", {"swepro": swepro}, wrong, False, "1 of 2 tests: ['t1']"),
        (
            "names, none asked for",
            {"swepro": swepro | {"fail_to_pass": [], "pass_to_pass": []}},
            PATCH,
            False,
            "0 of 0",
        ),
        ("does not apply", {}, PATCH.replace("a + b", "a / b"), False, "does not apply"),
        ("into .git", {}, PATCH + OUTSIDE, False, "does not apply"),
        ("too long", {"eval_cmd": "sleep 43221"}, PATCH, False, "status -1"),
    ]

    async def one(changes: dict[str, Any], patch: str) -> swe.Grade:
        async with LocalSandbox(jail=kind() == "local") as sandbox:
            return await swe.grade(sandbox, swe.task_of(sample_of("", **changes)), patch.encode(), 3.0)

    async def all_of() -> list[swe.Grade]:
        return await asyncio.gather(*(one(changes, patch) for _, changes, patch, _, _ in cases))

    for (name, _, _, solved, told), found in zip(cases, asyncio.run(all_of()), strict=True):
        assert (found.solved, told in found.told) == (solved, True), (name, found)


def test_a_patch_beside_text_of_another_encoding() -> None:
    setup = (
        "git init -q && git config user.email a@b.c && git config user.name a\n"
        "printf 'caf\\351\\nx = 1\\n' > a && git add a && git commit -q -m one"
    )
    task = swe.Task("", "/workspace/latin", "", setup=setup, eval_cmd="grep -q 'x = 2' a")

    async def worked() -> bytes:
        async with LocalSandbox(jail=kind() == "local") as sandbox:
            base = await swe.prepare(sandbox, task)
            change = f"cd {sandbox.root}/workspace/latin && sed -i 's/x = 1/x = 2/' a"
            await sandbox.exec(change, user="agent", check=True)
            return await swe.diff(sandbox, task, base)

    async def judged() -> swe.Grade:
        patch = await worked()
        assert b" caf\xe9\n-x = 1\n" in patch
        async with LocalSandbox(jail=kind() == "local") as sandbox:
            return await swe.grade(sandbox, task, patch, 20.0)

    assert asyncio.run(judged()).solved


@pytest.mark.parametrize("edit", ["", "git add -A && ", "git add -A && git commit -q -m mine && "])
def test_what_the_image_has_changed_is_no_part_of_a_patch(edit: str) -> None:
    setup = (
        "git init -q && git config user.email a@b.c && git config user.name a && echo one > a && git add a && "
        "git commit -q -m one && echo image >> a && echo lock > lock"
    )
    task = swe.Task("", "/workspace/image", "", setup=setup, eval_cmd="grep -q two a && grep -q image a && test -f new")

    async def worked() -> tuple[bytes, bytes]:
        async with LocalSandbox(jail=kind() == "local") as sandbox:
            base = await swe.prepare(sandbox, task)
            nothing = await swe.diff(sandbox, task, base)
            change = f"cd {sandbox.root}/workspace/image && echo two >> a && echo new > new && {edit}true"
            await sandbox.exec(change, user="agent", check=True)
            return nothing, await swe.diff(sandbox, task, base)

    async def judged() -> swe.Grade:
        nothing, patch = await worked()
        assert nothing == b""
        assert b"+two" in patch
        assert b"+image" not in patch
        assert b"lock" not in patch
        async with LocalSandbox(jail=kind() == "local") as sandbox:
            return await swe.grade(sandbox, task, patch, 20.0)

    grade = asyncio.run(judged())
    assert grade.solved, grade.told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workdir": "repo"}, "must be an absolute path, not 'repo'"),
        ({"eval_cmd": ""}, "has none of swepro, eval_cmd, remote_env_info.f2p_script"),
    ],
)
def test_rows_that_are_no_tasks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swe.task_of(sample_of("", **changes))


def test_a_row_of_the_other_form() -> None:
    remote = {"image_url": "i", "workdir": "/w", "pre_commands": "a\\nb", "f2p_script": "s"}
    task = swe.task_of(Sample(prompt=[{"role": "user", "content": "q"}], metadata={"remote_env_info": remote}))
    assert task == swe.Task("i", "/w", "q", setup="set -e\na\nb", swepro={}, f2p_script="s", test_files=[])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SWE_AGENT", "vim", "SWE_AGENT=vim must be one of claude_code, codex, mini, mini_swe_agent"),
        ("SWE_EVAL_PROTOCOL", "swebench", "must be scaleswe"),
        ("ADAPTER_BIND_HOST", "0.0.0.0", "ADAPTER_BIND_HOST=0.0.0.0 is every interface: name"),
        ("SWE_EVAL_TIMEOUT_SEC", "soon", "SWE_EVAL_TIMEOUT_SEC=soon must be a number"),
    ],
)
def test_knobs_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        example.read_knobs()


def test_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SWE_AGENT": "codex",
        "SWE_AGENT_TIME_BUDGET_SEC": "30",
        "SWE_EVAL_TIMEOUT_SEC": "20",
        "ADAPTER_BIND_HOST": "10.0.0.5",
        "ADAPTER_PORT": "18001",
        "ADAPTER_PUBLIC_HOST": "gateway",
    }.items():
        monkeypatch.setenv(name, value)
    knobs = example.read_knobs()
    assert (knobs.harness.name, knobs.guard_s, knobs.public_host) == ("codex", 230, "gateway")
    assert knobs.bind == {"agent_host": "10.0.0.5", "agent_port": 18001}


def test_what_takes_too_long_or_says_nothing_is_an_error(
    args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a failure of the model's, to be rewarded with 0."""
    use(Model(args, {}))
    monkeypatch.setattr(example, "KNOBS", dataclasses.replace(example.KNOBS, guard_s=0.2))
    (found,) = worked(args, sample_of("x"))
    assert isinstance(found, AgentError)
    assert "sample 7 took longer than SWE_ROLLOUT_GUARD_SEC=0.2" in str(found)
    monkeypatch.setattr(example, "KNOBS", dataclasses.replace(example.KNOBS, guard_s=100))
    monkeypatch.setenv("SLIME_AGENT_MINI_EXTRA_ARGS", "--nobody-knows")
    (found,) = worked(args, sample_of("x"))
    assert isinstance(found, AgentError)
    assert "mini ended with status 2 and no turn, on sample 7: " in str(found)
    assert str(found).endswith("unrecognized arguments: --nobody-knows")


def test_work_that_the_rollouts_end_cuts_is_begun_anew(
    args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of_rollout(monkeypatch)
    use(Model(args, {}))
    sample = sample_of("x")
    assert worked(args, sample) == [sample]
    assert sample.status is Sample.Status.ABORTED


def test_the_script_tells_the_agent_what_a_tiny_model_has_room_for(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nenv > $OUTPUT_DIR/env\n")
    (tmp_path / "python").chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "OUTPUT_DIR": str(tmp_path)}
    subprocess.run(["bash", example.__file__.replace("generate.py", "run.sh")], env=given, check=True, timeout=60)
    told = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert shlex.split(told["SLIME_AGENT_MINI_EXTRA_ARGS"])[:2] == ["--system", ""]
    assert told["SWE_CC_PROMPT"] == make_data.PROMPT
