"""Harnesses in a real local sandbox: the programs of others as scripts that note what they are given, ours for real."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import tarfile
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import CLAUDE_CODE, CODEX, HARNESSES, MINI, MINI_SWE, BaseHarness, ClaudeCodeHarness
from slime.agent.harness.common import HOME, _plain_tar
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, LocalSandbox, SandboxError, SandboxLimits

NUM_GPUS = 0
PROMPT = 'fix it; don\'t "stop" $HOME `now`\nat all'
NOTES = """#!/bin/bash
python3 - "$@" <<'END'
import json, os, sys
json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid()}, open("noted", "w"))
END
echo '{"type": "result"}'
exit ${EXIT:-0}
"""
LIMITS = SandboxLimits(memory_mb=1024, disk_mb=256)

Use = Callable[[LocalSandbox], Awaitable[None]]


def opener(jail: bool) -> Callable[..., None]:
    def run(use: Use, **changes: Any) -> None:
        async def opened() -> None:
            async with LocalSandbox(LIMITS, jail=jail, **changes) as sandbox:
                await use(sandbox)

        asyncio.run(asyncio.wait_for(opened(), 200))

    return run


@functools.cache
def has_jail() -> bool:
    async def nothing(sandbox: LocalSandbox) -> None:
        return None

    try:
        opener(True)(nothing)
    except SandboxError:
        return False
    return True


@pytest.fixture
def inside() -> Callable[..., None]:
    """In a jail where the host has one, else in plain processes."""
    return opener(has_jail())


@pytest.fixture(params=[True, False], ids=["jail", "plain"])
def each_inside(request: pytest.FixtureRequest) -> Callable[..., None]:
    if request.param and not has_jail():
        pytest.skip("this host has no jail")
    return opener(request.param)


async def noted(sandbox: LocalSandbox, harness: BaseHarness, program: str, seconds: float = 60) -> tuple[int, Any]:
    """What the program was given when the harness ran it."""
    await sandbox.write_file(f"{sandbox.root}/opt/agent/bin/{program}", NOTES)
    await sandbox.exec(f"chmod 755 {sandbox.root}/opt/agent/bin/{program}", check=True)
    await harness.install_cli(sandbox)
    workdir = f"{sandbox.root}/workspace/repo of mine"
    code = await harness.run(
        sandbox,
        workdir=workdir,
        session_id="session-1",
        adapter_url="http://gateway:18001/",
        time_budget_sec=seconds,
        prompt=PROMPT,
    )
    assert '{"type": "result"}' in await sandbox.read_file(f"{workdir}/.harness/trajectory.jsonl", user="agent")
    found = json.loads(await sandbox.read_file(f"{workdir}/noted", user="agent"))
    assert found["cwd"] == workdir
    assert found["env"]["HOME"] == f"{sandbox.root}/home/agent"
    return code, found


def test_claude_code(each_inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--max-turns 7")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"EXIT": "3", "DISABLE_AUTOUPDATER": "1"}')

    async def use(sandbox: LocalSandbox) -> None:
        code, found = await noted(sandbox, CLAUDE_CODE, "claude")
        assert code == 3
        assert found["argv"] == [
            *("-p", PROMPT, "--permission-mode", "bypassPermissions", "--output-format", "stream-json", "--verbose"),
            *("--max-turns", "7"),
        ]
        expected = {
            "ANTHROPIC_BASE_URL": "http://gateway:18001",
            "ANTHROPIC_AUTH_TOKEN": "session-1",
            "ANTHROPIC_MODEL": "slime-actor",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "API_TIMEOUT_MS": "60000",
        }
        assert expected.items() <= found["env"].items()
        for path in (".claude.json", ".claude/settings.json"):
            settings = json.loads(await sandbox.read_file(f"{sandbox.root}{HOME}/{path}", user="agent"))
            assert settings == {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}

    each_inside(use)


@pytest.mark.parametrize("api", ["", "chat"])
def test_codex(inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    monkeypatch.setenv("SLIME_AGENT_CODEX_WIRE_API", api)
    monkeypatch.setenv("SLIME_AGENT_CODEX_EXTRA_ARGS", "-c 'model_reasoning_effort=\"low\"'")

    async def use(sandbox: LocalSandbox) -> None:
        code, found = await noted(sandbox, CODEX, "codex")
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
        flags += ["-c", "model_providers.slime.stream_idle_timeout_ms=60000"]
        assert (code, found["argv"]) == (0, ["exec", *flags, PROMPT, "-c", 'model_reasoning_effort="low"'])
        expected = {"OPENAI_API_KEY": "session-1", "OPENAI_BASE_URL": "http://gateway:18001/v1"}
        assert expected.items() <= found["env"].items()
        config = tomllib.loads(await sandbox.read_file(f"{sandbox.root}{HOME}/.codex/config.toml", user="agent"))
        assert (config["model"], config["model_provider"]) == ("slime-actor", "slime")
        provider = config["model_providers"]["slime"]
        assert (provider["base_url"], provider["env_key"]) == ("http://gateway:18001/v1", "OPENAI_API_KEY")
        assert provider["wire_api"] == (api or "responses")

    inside(use)


def test_mini_swe_agent(inside: Callable[..., None]) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        code, found = await noted(sandbox, MINI_SWE, "mini")
        home = f"{sandbox.root}/home/agent"
        log = f"{sandbox.root}/workspace/repo of mine/.harness/mini-swe.traj.json"
        limit = "model.model_kwargs.timeout=60"
        files = ["-c", "mini.yaml", "-c", f"{home}/mini-swe.yaml", "-c", limit, "-o", log]
        assert (code, found["argv"]) == (0, ["-y", "--exit-immediately", *files, "-t", PROMPT])
        expected = {"OPENAI_API_KEY": "session-1", "OPENAI_API_BASE": "http://gateway:18001/v1"}
        assert (expected | {"MSWEA_CONFIGURED": "true"}).items() <= found["env"].items()
        config = yaml.safe_load(await sandbox.read_file(f"{home}/mini-swe.yaml", user="agent"))
        assert config["model"] == {"model_name": "openai/slime-actor", "cost_tracking": "ignore_errors"}

    inside(use)


def test_the_agent_is_its_own_user_and_ends_with_its_time(
    inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        if not sandbox.root and not sandbox.single_user:
            assert (await noted(sandbox, CLAUDE_CODE, "claude"))[1]["uid"] == 1000
        await sandbox.write_file(f"{sandbox.root}/opt/agent/bin/claude", "#!/bin/bash\nsleep 43230\n")
        arguments = {"workdir": f"{sandbox.root}/workspace/b", "session_id": "s", "adapter_url": "http://g:1"}
        await sandbox.exec(f"chmod 755 {sandbox.root}/opt/agent/bin/claude")
        code = await CLAUDE_CODE.run(sandbox, time_budget_sec=1, prompt="p", **arguments)
        assert code == EXIT_TIME_BUDGET_EXCEEDED
        assert (await sandbox.exec("pgrep -f '[s]leep 43230'"))[0] == 1

    inside(use)


def archive(path: Path, kind: str, files: dict[str, str]) -> Path:
    with tarfile.open(path, f"w:{kind}") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content.encode()))
    return path


NPM = """#!/bin/bash
[ "$1 $2" = "install -g" ] || exit 9
for each; do case $each in --prefix=*) to=${each#--prefix=};; *.tgz) package=$each;; esac; done
mkdir -p $to/bin && tar xzf $package -C $to/bin --strip-components=1
"""


@pytest.mark.parametrize("harness", [CLAUDE_CODE, CODEX], ids=lambda harness: harness.name)
@pytest.mark.parametrize("native", [False, True])
def test_installing_from_archives(
    inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harness: BaseHarness, native: bool
) -> None:
    """Node as .tar.xz and a package of npm, or one archive with the program itself."""
    program = "claude" if harness is CLAUDE_CODE else "codex"
    variable = {"claude": "CC", "codex": "CODEX"}[program]
    script = "#!/bin/bash\necho version 1\n"
    node = archive(
        tmp_path / "node.tar.xz", "xz", {f"node-22/bin/{n}": script for n in ("node", "npx")} | {"node-22/bin/npm": NPM}
    )
    package = archive(tmp_path / "cli.tgz", "gz", {f"package/{program}": script})
    inner = "package/claude" if program == "claude" else "package/vendor/linux/bin/codex"
    whole = archive(tmp_path / "native.tgz", "gz", {inner: script})
    if native:
        monkeypatch.setenv(f"SLIME_AGENT_{variable}_NATIVE_TARBALL", str(whole))
    else:
        monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(node))
        monkeypatch.setenv(f"SLIME_AGENT_{variable}_TARBALL", str(package))

    async def use(sandbox: LocalSandbox) -> None:
        # What the host has of it is not asked for.
        monkeypatch.setattr("slime.agent.harness.common.is_there", lambda *_: asyncio.sleep(0, False))
        await harness.install_cli(sandbox)
        path = f"{sandbox.root}/opt/agent/bin"
        assert (await sandbox.exec(f"PATH={path}:$PATH; {program}", user="agent"))[:2] == (0, "version 1\n")

    inside(use)


def test_what_cannot_be_installed(inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slime.agent.harness.common.is_there", lambda *_: asyncio.sleep(0, False))

    async def use(sandbox: LocalSandbox) -> None:
        none, native = str(tmp_path / "none"), "SLIME_AGENT_CC_NATIVE_TARBALL"
        for variable in ("SLIME_AGENT_NODE_TARBALL", "SLIME_AGENT_CC_TARBALL"):
            with pytest.raises(
                SandboxError, match=rf"no claude: .* in {native}, or .* in SLIME_AGENT_NODE_TARBALL and .*CC_TARBALL"
            ):
                await CLAUDE_CODE.install_cli(sandbox)
            monkeypatch.setenv(variable, none)
        with pytest.raises(SandboxError, match=r"SLIME_AGENT_NODE_TARBALL=.*: there is no such file"):
            await CLAUDE_CODE.install_cli(sandbox)
        monkeypatch.setenv(native, none)
        with pytest.raises(SandboxError, match=f"{native}=.*: there is no such file"):
            await CLAUDE_CODE.install_cli(sandbox)
        monkeypatch.delenv(native)
        broken = archive(
            tmp_path / "node.tar.gz", "gz", {"node-22/bin/npm": "#!/bin/bash\necho E404; echo so; exit 1\n"}
        )
        for variable in ("SLIME_AGENT_NODE_TARBALL", "SLIME_AGENT_CC_TARBALL"):
            monkeypatch.setenv(variable, str(broken))
        with pytest.raises(SandboxError, match=r"node.tar.gz could not be installed, status 1: E404 so$"):
            await CLAUDE_CODE.install_cli(sandbox)

    inside(use)


def test_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    packed = archive(tmp_path / "node.tar.xz", "xz", {"a": "b"})
    plain = _plain_tar(packed)
    assert tarfile.open(plain).getnames() == ["a"]  # noqa: SIM115
    assert _plain_tar(packed) == plain
    assert _plain_tar(plain) == plain
    plain.unlink()


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}'])
def test_further_variables_are_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", text)
    with pytest.raises(ValueError, match="SLIME_AGENT_CC_EXTRA_ENVS"):
        CLAUDE_CODE.with_extra_envs({})


@pytest.mark.parametrize("url", ["gateway:18001", "junk", "", "http://"])
def test_an_address_that_is_none_is_told_before_anything_runs(url: str) -> None:
    sandbox, asked = LocalSandbox(), {"session_id": "s", "time_budget_sec": 9, "prompt": "do"}
    with pytest.raises(ValueError, match="adapter_url must be the gateway's, http://HOST:PORT"):
        asyncio.run(CLAUDE_CODE.run(sandbox, workdir="/workspace", adapter_url=url, **asked))


def test_names() -> None:
    assert set(HARNESSES) == {"claude_code", "codex", "mini", "mini_swe_agent"}
    assert isinstance(CLAUDE_CODE, ClaudeCodeHarness)


def test_our_own_agent_works_in_a_jail(each_inside: Callable[..., None]) -> None:
    """The whole way: the program in the sandbox, its calls to the one address it can reach, its work on a file."""
    keys: list[str] = []

    async def chat(request: web.Request) -> web.Response:
        keys.append(request.headers["Authorization"])
        turn = len((await request.json())["messages"])
        function = {"name": "bash", "arguments": json.dumps({"command": "pwd; id -un; echo 42 > answer"})}
        calls = [{"id": "1", "type": "function", "function": function}] if turn == 2 else None
        message = {"role": "assistant", "content": "ok", "tool_calls": calls}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    server = run_app_in_thread(app, "127.0.0.1", 0)
    try:

        async def use(sandbox: LocalSandbox) -> None:
            await MINI.install_cli(sandbox)
            code = await MINI.run(
                sandbox,
                workdir=f"{sandbox.root}/workspace",
                session_id="session-2",
                adapter_url=server.url,
                time_budget_sec=100,
                prompt=PROMPT,
            )
            log = await sandbox.read_file(f"{sandbox.root}/workspace/.harness/trajectory.jsonl", user="agent")
            assert code == 0, log
            assert await sandbox.read_file(f"{sandbox.root}/workspace/answer", user="agent") == "42\n"
            messages = [json.loads(line) for line in log.splitlines()]
            assert messages[1] == {"role": "user", "content": PROMPT}
            assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
            assert f"{sandbox.root}/workspace\n" in messages[3]["content"]

        each_inside(use, reach=server.url)
    finally:
        server.stop()
    assert keys == ["Bearer session-2"] * 2
