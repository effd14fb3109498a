"""Harbor: tasks with an instruction, a machine and a test; an agent of the model's plays them, and the test rewards it.

HARBOR_TASKS names a directory of task directories; without it small ones are made. HARBOR_ENVIRONMENT is Harbor's name
of a kind of machine (`docker`, `daytona`, ...); without it tasks run in slime's own jail of this host's programs, where
no image is built: tasks whose Dockerfile installs something need another.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import random
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HARBOR_TELEMETRY", "0")  # nothing of a run is told to others
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # and nothing is fetched

import openai
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

sys.path.append(str(Path(__file__).resolve().parents[2]))

from slime.agent.sandbox.local import LocalSandbox, SandboxLimits

_TURNS, _DONE, _RIGHT = 4, "done", 0.5
_CONFIG = """[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 600.0
[environment]
workdir = "/app"
network_mode = "no-network"
"""
_TEST = 'if [ "$(cat /app/a)" = {answer} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


class Jail(BaseEnvironment):
    """A machine of Harbor's that is a sandbox of slime's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sandbox = LocalSandbox(SandboxLimits(memory_mb=512, disk_mb=64))

    @staticmethod
    def type() -> str:
        """Its name in Harbor's records."""
        return "slime-jail"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """There is no network in it."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        """An empty one, with the directories that Harbor expects."""
        await self._sandbox.__aenter__()
        await self._sandbox.exec("mkdir -p /app /tests /logs/agent /logs/verifier /logs/artifacts", check=True)

    async def stop(self, delete: bool) -> None:
        """It is gone, whether or not it was to be deleted."""
        await self._sandbox.__aexit__(None, None, None)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command, as root or as the jail's other user."""
        place = cwd or self.task_env_config.workdir or "/"
        code, out, err = await self._sandbox.exec(
            f"cd {shlex.quote(place)} && {{ {command}\n}}",
            user="agent" if self._resolve_user(user) not in (None, 0, "0", "root") else "root",
            env=self._merge_env(env),
            timeout=timeout_sec or 120,
        )
        return ExecResult(stdout=out, stderr=err, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """A file."""
        await self._sandbox.write_file(target_path, Path(source_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Files below a directory."""
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir).as_posix()}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """A file."""
        with tempfile.TemporaryDirectory() as directory:
            await self._fetch(source_path, Path(directory))
            Path(target_path).write_bytes((Path(directory) / Path(source_path).name).read_bytes())

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """What is below a directory."""
        await self._fetch(f"{source_dir}/.", Path(target_dir))

    async def _fetch(self, source: str, target: Path) -> None:
        directory, name = source.rsplit("/", 1)
        packed = f"tar -C {shlex.quote(directory or '/')} -cf - {shlex.quote(name)} | base64 -w 0"
        _, out, _ = await self._sandbox.exec(packed, check=True)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(out))) as archive:
            archive.extractall(target, filter="data")


class Shell(BaseAgent):
    """The model's answers are commands, until it says that it is done."""

    def __init__(self, *args: Any, address: str, asked: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._address, self._asked = address, asked

    @staticmethod
    def name() -> str:
        """Its name in Harbor's records."""
        return "shell"

    def version(self) -> str:
        """Of this agent."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: the loop runs here."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Turns with the model at the address that the trial was given."""
        messages: list[Any] = [{"role": "user", "content": instruction.strip()}]
        async with openai.AsyncOpenAI(base_url=self._address, api_key="any", max_retries=0) as client:
            for _ in range(_TURNS):
                reply = await client.chat.completions.create(messages=messages, **self._asked)
                command = (reply.choices[0].message.content or "").strip()
                if command == _DONE:
                    return
                ran = await environment.exec(command, timeout_sec=10)
                seen = f"{ran.stdout or ''}{ran.stderr or ''}"[-2000:].strip() or str(ran.return_code)
                messages += [{"role": "assistant", "content": command}, {"role": "user", "content": seen}]


def tasks(output: Path) -> list[dict[str, Any]]:
    """A row for each task directory."""
    given = os.environ.get("HARBOR_TASKS")
    directory = Path(given) if given else _make(output.absolute() / "harbor")
    return [
        {"prompt": file.read_text(), "label": "", "metadata": {"task": str(file.parent.absolute())}}
        for file in sorted(directory.glob("*/instruction.md"))
    ]


def _make(directory: Path) -> Path:
    """Tasks to write the largest of three digits to a file."""
    for digits in itertools.combinations("0123456789", 3):
        mixed = random.Random("".join(digits)).sample(digits, 3)
        files = {
            "instruction.md": f"max {' '.join(mixed)}",
            "task.toml": _CONFIG,
            "environment/Dockerfile": "FROM debian:stable-slim\nWORKDIR /app\n",
            "tests/test.sh": _TEST.format(answer=max(digits)),
        }
        for name, text in files.items():
            path = directory / "".join(digits) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return directory


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A task, solved or, too often, not."""
    digits = rng.sample("0123456789", 3)
    answer = max(digits) if rng.random() < _RIGHT else rng.choice(digits)
    said = [f"max {' '.join(digits)}", f"echo {answer} > a", "0", _DONE]
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)]


async def run(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """One trial; its reward is the test's."""
    machine = os.environ.get("HARBOR_ENVIRONMENT")
    shell = AgentConfig(
        import_path="with_harbor:Shell",
        model_name=request_kwargs["model"],
        skip_model_parsing=True,
        kwargs={"address": base_url, "asked": request_kwargs},
        override_timeout_sec=request_kwargs["timeout"],  # the task's counts the time in which weights are pushed, too
    )
    with tempfile.TemporaryDirectory() as trials:
        config = TrialConfig(
            task=TaskConfig(path=Path(metadata["task"])),
            trials_dir=Path(trials),
            agent=shell,
            environment=EnvironmentConfig(**({"type": machine} if machine else {"import_path": "with_harbor:Jail"})),
        )
        result = await (await Trial.create(config)).run()
    rewards = result.verifier_result.rewards if result.verifier_result else None
    if result.exception_info is not None or not rewards:
        raise RuntimeError(str(result.exception_info or "the task's test gave no reward"))
    return {"reward": sum(rewards.values())}
