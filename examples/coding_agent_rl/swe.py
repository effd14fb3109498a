"""Tasks of software engineering: a repository with a fault, what an agent has changed there, and whether it is mended.

Nothing here knows of a model or an agent. A row's metadata has ``workdir`` (the repository in the sandbox), a grader,
and what else `task_of` reads; ``remote_env_info`` may have the same under the names of its own.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.agent.sandbox import Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import place
from slime.data import Sample

STATEMENT = "PROBLEM_STATEMENT.md"
_SETUP_S = 600
_GIT_S = 120
_TOLD = 500
_OWN = "/workspace/.slime"
"""For files of ours, where no image has any."""


@dataclass(frozen=True)
class Task:
    """What a row asks for.

    Attributes:
        image: of the sandboxes; a local one takes none.
        workdir: the repository, an absolute path in the sandbox.
        statement: what the agent is to do.
        setup: a script that makes the repository what it is, in the agent's sandbox and in the grader's.
        swepro: SWE-bench Pro's grader; it goes before the others.
        eval_cmd: a shell command, whose status 0 means solved.
        f2p_script: a Python program, likewise.
        test_files: paths in the repository that are as they were when the work is judged.
    """

    image: str
    workdir: str
    statement: str
    setup: str = ""
    swepro: Mapping[str, Any] = field(default_factory=dict)
    eval_cmd: str = ""
    f2p_script: str = ""
    test_files: Sequence[str] = ()


@dataclass(frozen=True)
class Grade:
    """Whether the work solves the task, and what was seen of that."""

    solved: bool
    told: str


def task_of(sample: Sample) -> Task:
    """The task of a sample's row.

    Raises:
        ValueError: it has no place or no grader.
    """
    row = sample.metadata
    remote: Mapping[str, Any] = row.get("remote_env_info") or {}
    swepro = row.get("swepro") or {}
    workdir = row.get("workdir") or remote.get("workdir") or ""
    if not workdir.startswith("/"):
        raise ValueError(f"metadata.workdir of sample {sample.index} must be an absolute path, not {workdir!r}")
    task = Task(
        image=row.get("image") or remote.get("image_url") or "",
        workdir=workdir,
        statement=row.get("problem_statement") or _text(sample.prompt),
        setup=_script(row.get("pre_commands") or remote.get("pre_commands")),
        swepro=swepro,
        eval_cmd=row.get("eval_cmd") or "",
        f2p_script=remote.get("f2p_script") or "",
        test_files=[*(row.get("test_files") or ()), *(swepro.get("selected_test_files") or ())],
    )
    if not (task.swepro or task.eval_cmd or task.f2p_script):
        raise ValueError(f"metadata of sample {sample.index} has none of swepro, eval_cmd, remote_env_info.f2p_script")
    return task


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def _script(commands: Any) -> str:
    if not isinstance(commands, str):
        commands = "\n".join(commands or ())
    elif "\n" not in commands:
        commands = commands.replace("\\n", "\n")  # as data sets have it that were escaped twice
    return f"set -e\n{commands}" if commands else ""


async def prepare(sb: Sandbox, task: Task) -> str:
    """Have the repository ready; the tree (of git) of its files as they are then, of which images may have changed some
    since the last commit. Its index stays as it is.

    Raises:
        SandboxError: a script failed, or there is no repository.
    """
    await ensure_agent_user(sb, _at(sb, task))
    before = task.swepro.get("before_repo_set_cmd")
    for number, script in enumerate((task.setup, f"set -e\n{before}" if before else "")):
        if script:
            await _run_script(sb, task, f"setup-{number}", script)
    index = shlex.quote(place(sb, "/tmp/.slime.index"))
    command = (
        f'cd {shlex.quote(_at(sb, task))} && cp "$(git rev-parse --git-path index)" {index} && '
        f"export GIT_INDEX_FILE={index} && git add -A && git write-tree"
    )
    return (await sb.exec(command, user="agent", timeout=_GIT_S, check=True))[1].strip()


async def state(sb: Sandbox, task: Task) -> None:
    """Write what is to be done into a file of the repository, which no diff has.

    Raises:
        SandboxError: it could not be written.
    """
    await sb.write_file(f"{_at(sb, task)}/{STATEMENT}", task.statement, user="agent")


async def diff(sb: Sandbox, task: Task, base: str) -> bytes:
    """What was changed since the tree ``base``, staged or committed or not, as a patch; not what git ignores.

    Raises:
        SandboxError: git failed.
    """
    there, patch = shlex.quote(_at(sb, task)), shlex.quote(place(sb, "/tmp/.slime.patch"))
    command = (
        f"cd {there} && git add -N . && git diff {base} --binary --no-color --no-ext-diff --no-renames "
        f"-- . ':(exclude){STATEMENT}' ':(exclude).harness' > {patch} && "
        f"base64 -w 0 {patch} > {patch}.64"  # sandboxes read text, and files may have another encoding
    )
    await sb.exec(command, user="agent", timeout=_GIT_S, check=True)
    return base64.b64decode(await sb.read_file(place(sb, "/tmp/.slime.patch.64"), user="agent"))


async def grade(sb: Sandbox, task: Task, patch: bytes, timeout: float) -> Grade:
    """Judge a patch in a sandbox that nobody has worked in; files of tests stay as they were.

    Raises:
        SandboxError: the sandbox failed, or the repository could not be made ready.
    """
    await prepare(sb, task)
    path = place(sb, f"{_OWN}/work.patch")
    await sb.write_file(path, patch)
    kept = "".join(f" --exclude={shlex.quote(name)}" for name in task.test_files)
    there = shlex.quote(_at(sb, task))
    # Only git's own: it writes nothing outside of the repository, and nothing below .git.
    tries = (f"git apply{way} --whitespace=nowarn{kept} {path}" for way in (" --3way", ""))
    code, out, err = await sb.exec(f"cd {there} && {{ {' || '.join(tries)}; }}", user="agent", timeout=_GIT_S)
    if code != 0:
        return Grade(False, f"the patch does not apply: {(err or out).strip()[-_TOLD:]}")
    if task.swepro:
        return await _grade_by_names(sb, task, timeout)
    command = task.eval_cmd
    if not command:
        program = place(sb, f"{_OWN}/f2p.py")
        await sb.write_file(program, task.f2p_script)
        command = f"$(command -v python || command -v python3) {program}"
    code, output = await _tests(sb, task, command, timeout)
    return Grade(code == 0, f"status {code}: {output.strip()[-_TOLD:]}")


async def _tests(sb: Sandbox, task: Task, command: str, timeout: float) -> tuple[int, str]:
    return await exec_and_wait(
        sb,
        cmd=command,
        time_budget_sec=timeout,
        tag="swe-tests",
        user="agent",
        workdir=_at(sb, task),
        want_output=True,
    )


async def _grade_by_names(sb: Sandbox, task: Task, timeout: float) -> Grade:
    """SWE-bench Pro's way: its script runs tests, its parser tells which have passed."""
    own, swepro = place(sb, _OWN), task.swepro
    for name, key in (("run_script.sh", "run_script_path"), ("parser.py", "parser_script_path")):
        await sb.write_file(f"{own}/{name}", Path(swepro[key]))
    logs = place(sb, "/tmp/swe-tests")
    files = shlex.quote(",".join(swepro.get("selected_test_files") or ()))
    command = f"mkdir -p {logs}; bash {own}/run_script.sh {files} > {logs}/out 2> {logs}/err"
    await _tests(sb, task, command, timeout)
    result = f"{own}/result.json"
    await sb.exec(f"python3 {own}/parser.py {logs}/out {logs}/err {result}", timeout=_GIT_S)
    passed = _passed(await sb.read_file(result))
    wanted = {*(swepro.get("fail_to_pass") or ()), *(swepro.get("pass_to_pass") or ())}
    missing = sorted(wanted - passed)
    return Grade(bool(wanted) and not missing, f"{len(wanted) - len(missing)} of {len(wanted)} tests: {missing[:3]}")


def _passed(text: str) -> set[str]:
    try:
        return {test["name"] for test in json.loads(text)["tests"] if test["status"] == "PASSED"}
    except (ValueError, LookupError, TypeError):
        return set()


async def _run_script(sb: Sandbox, task: Task, name: str, script: str) -> None:
    path = place(sb, f"{_OWN}/{name}.sh")
    await sb.write_file(path, script)
    command = f"cd {shlex.quote(_at(sb, task))} && bash {path}"
    await sb.exec(command, user="agent", timeout=_SETUP_S, check=True)


def _at(sb: Sandbox, task: Task) -> str:
    return place(sb, task.workdir)
