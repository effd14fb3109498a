"""What running an agent's program in a sandbox takes, whichever program it is."""

from __future__ import annotations

import json
import lzma
import os
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slime.agent.sandbox.detached import ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import Sandbox, SandboxError, place, setting

HOME = "/home/agent"
_TOOLS = "/opt/agent"
_TAG = "agent-run"
_INSTALL_S = 600
_CALL_S = 60
_LAST_BYTES = 500


@dataclass(frozen=True)
class HarnessContext:
    """What an agent's program is told, whatever its task is."""

    workdir: str
    session_id: str
    """The session's key at the gateway, and the only key that is in the sandbox."""
    adapter_url: str
    """The gateway, as the sandbox reaches it, without /v1."""
    model_label: str = "slime-actor"
    """The model's name; the gateway serves the run's model under any."""


class BaseHarness(ABC):
    """A kind of agent: how it is installed, configured and run."""

    name = ""
    extra_args_env = ""
    """The variable of this host's environment with further arguments of the program."""
    extra_envs_env = ""
    """The one with further variables of its environment, a JSON object."""

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Put the agent's program into the sandbox, unless its image has it.

        Raises:
            SandboxError: it could not be installed.
        """

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the files that the program reads, as user ``agent``."""

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the program on the prompt; its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
    ) -> int:
        """Let the agent work in ``workdir``; what it is to find there and how it is judged is the caller's.

        Returns:
            The program's exit status, or `EXIT_TIME_BUDGET_EXCEEDED`. What it printed is in
            ``WORKDIR/.harness/trajectory.jsonl``, on which a diff of the work should not look.

        Raises:
            SandboxError: the sandbox failed.
            ValueError: ``adapter_url`` is no address of a server.
        """
        if urlsplit(adapter_url).scheme not in ("http", "https") or not urlsplit(adapter_url).hostname:
            raise ValueError(f"adapter_url must be the gateway's, http://HOST:PORT (session.url), not {adapter_url!r}")
        await ensure_agent_user(sb, workdir)
        ctx = HarnessContext(workdir=workdir, session_id=session_id, adapter_url=adapter_url.rstrip("/"))
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)

    async def run_program(
        self, sb: Sandbox, ctx: HarnessContext, command: str, env: Mapping[str, str], time_budget_sec: float
    ) -> int:
        """Run the program, with what the environment adds to its arguments and variables, to its end or its time's."""
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"{command} {setting(self.extra_args_env)}".strip(),
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )

    def with_extra_envs(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables with those that the environment adds or replaces.

        Raises:
            ValueError: what it adds is no JSON object of strings.
        """
        text = setting(self.extra_envs_env, default="{}")
        try:
            more = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.extra_envs_env} is not JSON: {error}") from error
        if not isinstance(more, dict) or not all(isinstance(value, str) for value in more.values()):
            raise ValueError(f"{self.extra_envs_env} must be a JSON object of strings")
        return {**env, **more}


async def run_agent(
    sb: Sandbox, *, workdir: str, start_cmd: str, env: Mapping[str, str], time_budget_sec: float
) -> int:
    """Run an agent's command as user ``agent``, detached; its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`."""
    home, log = place(sb, HOME), _log(workdir)
    await sb.exec(f"mkdir -p {shlex.quote(f'{workdir}/.harness')}", user="agent", check=True, timeout=_CALL_S)
    paths = f"export HOME={shlex.quote(home)} PATH={place(sb, _TOOLS)}/bin:/usr/local/bin:$PATH\n"
    code, _ = await exec_and_wait(
        sb,
        cmd=paths + start_cmd,
        time_budget_sec=time_budget_sec,
        tag=_TAG,
        user="agent",
        env=env,
        workdir=workdir,
        out_file=log,
    )
    return code


def _log(workdir: str) -> str:
    return f"{workdir}/.harness/trajectory.jsonl"


def one_line(output: str) -> str:
    """The end of what a program printed, for the line of an error."""
    return " ".join(output.split())[-_LAST_BYTES:]


async def last_words(sb: Sandbox, workdir: str) -> str:
    """The end of what an agent's program printed, which tells why it had no turn; empty where it printed nothing."""
    _, text, _ = await sb.exec(f"tail -c {_LAST_BYTES} {shlex.quote(_log(workdir))}", user="agent", timeout=_CALL_S)
    return text.strip()


async def write_home(sb: Sandbox, path: str, content: str) -> None:
    """Write a file below the home of user ``agent``."""
    await sb.write_file(place(sb, f"{HOME}/{path}"), content, user="agent")


async def is_there(sb: Sandbox, program: str) -> bool:
    """Whether a program is in the sandbox already."""
    found = f"PATH={place(sb, _TOOLS)}/bin:/usr/local/bin:$PATH command -v {program}"
    return (await sb.exec(found, user="agent", timeout=_CALL_S))[0] == 0


async def install_archives(sb: Sandbox, program: str, *, variable: str, strip: int, path: str) -> None:
    """Install a program, unless it is there, from the archives of this host that the environment names.

    Args:
        variable: SLIME_AGENT_VARIABLE_NATIVE_TARBALL is an archive with the program itself, which needs nothing else;
            SLIME_AGENT_VARIABLE_TARBALL is a package of npm, installed with the Node of SLIME_AGENT_NODE_TARBALL.
        strip: how many directories of the native archive's paths to leave out.
        path: the program's in what is left.

    Raises:
        SandboxError: no archive is named, or a step failed.
    """
    if await is_there(sb, program):
        return
    check, native = f"{program} --version", f"SLIME_AGENT_{variable}_NATIVE_TARBALL"
    if setting(native):
        await install_native(sb, _file(native), program, strip, path, check)
        return
    by_npm = "SLIME_AGENT_NODE_TARBALL", f"SLIME_AGENT_{variable}_TARBALL"
    if not all(map(setting, by_npm)):
        raise SandboxError(
            f"the sandbox has no {program}: install it in its image, or name an archive of the program in {native}, "
            f"or of Node and of its package in {' and '.join(by_npm)}"
        )
    node, package = map(_file, by_npm)
    await install_npm_cli(sb, node_runtime=node, npm_package=package, check_cmd=check)


def _file(variable: str) -> Path:
    """The one that a variable names; SandboxError where it is not there."""
    path = Path(setting(variable))
    if not path.is_file():
        raise SandboxError(f"{variable}={path}: there is no such file")
    return path


async def install_npm_cli(sb: Sandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install Node and a package of npm, both from archives of this host, and run a command that checks it.

    Raises:
        SandboxError: one of the steps failed.
    """
    tools, node, package = (place(sb, path) for path in (_TOOLS, "/tmp/node.tar", "/tmp/harness-cli.tgz"))
    await sb.write_file(node, _plain_tar(node_runtime))
    await sb.write_file(package, npm_package)
    unpack = (
        f"set -e; mkdir -p {tools}/node {tools}/bin; tar xf {node} -C {tools}/node --strip-components=1; "
        f"for each in node npm npx; do ln -sf {tools}/node/bin/$each {tools}/bin/$each; done; rm {node}; "
    )
    install = (
        f"export PATH={tools}/bin:$PATH; npm install -g --prefix={tools} --no-audit --no-fund {package}; {check_cmd}"
    )
    code, output = await exec_and_wait(
        sb, cmd=unpack + install, time_budget_sec=_INSTALL_S, tag="harness-npm-install", want_output=True
    )
    if code != 0:
        raise SandboxError(f"{npm_package.name} could not be installed, status {code}: {one_line(output)}")


async def install_native(sb: Sandbox, archive: Path, name: str, strip: int, program: str, check_cmd: str) -> None:
    """Install a program from an archive of this host that needs nothing else, and run a command that checks it.

    Args:
        strip: how many directories of the archive's paths to leave out.
        program: the program's path in what is left.

    Raises:
        SandboxError: one of the steps failed.
    """
    tools, packed = place(sb, _TOOLS), place(sb, f"/tmp/{name}.tgz")
    await sb.write_file(packed, archive)
    unpack = (
        f"set -e; mkdir -p {tools}/{name} {tools}/bin; tar xzf {packed} -C {tools}/{name} --strip-components={strip}; "
        f"ln -sf {tools}/{name}/{program} {tools}/bin/{name}; rm {packed}; export PATH={tools}/bin:$PATH; {check_cmd}"
    )
    await sb.exec(unpack, check=True, timeout=_INSTALL_S)


def _plain_tar(archive: Path) -> Path:
    """An archive without .xz, which small images cannot unpack; unpacked once a host."""
    if archive.suffix != ".xz":
        return archive
    stamp = archive.stat()
    plain = Path(tempfile.gettempdir()) / f"slime-{os.getuid()}-{stamp.st_size}-{stamp.st_mtime_ns}-{archive.stem}"
    if not plain.exists():
        with tempfile.NamedTemporaryFile(dir=plain.parent, delete=False) as partial, lzma.open(archive) as packed:
            shutil.copyfileobj(packed, partial)
        os.replace(partial.name, plain)
    return plain
