"""Sandboxes of services against fakes of their packages, whose calls are made as e2b 2.63, daytona 0.226, modal 1.6 and
Docker's client take them. None of these has been run against the service itself."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ContainerLimits,
    DaytonaSandbox,
    DockerSandbox,
    E2BSandbox,
    LocalSandbox,
    ModalSandbox,
    Sandbox,
    SandboxError,
    make_sandbox,
)
from slime.agent.sandbox.service import ServiceSandbox, by_bash
from slime.utils.errors import BadInputError

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.sandbox.service._FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("E2B_API_KEY", "key")
    for name in [name for name in os.environ if name.startswith(("SLIME_AGENT_", "SWE_"))]:
        monkeypatch.delenv(name)


class Machine:
    """What is behind a fake: answers commands by rule, keeps files, fails as told, and notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.files: dict[str, bytes] = {}
        self.fails: list[Exception] = []
        self.answer = (0, "out", "err")

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fails and call[0] not in ("create", "end"):
            raise self.fails.pop(0)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in names.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def machine() -> Machine:
    return Machine()


class SandboxException(Exception): ...


class TimeoutException(SandboxException): ...


class SandboxNotRunningException(TimeoutException): ...


class SandboxUnreachableException(TimeoutException): ...


class FileNotFoundException(SandboxException): ...


class CommandExitException(SandboxException):
    def __init__(self, code: int, out: str, err: str) -> None:
        super().__init__(f"Command exited with code {code}")
        self.exit_code, self.stdout, self.stderr = code, out, err


class ReadTimeout(Exception): ...


@pytest.fixture
def e2b(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    class AsyncSandbox:
        sandbox_id = "box-1"

        def __init__(self) -> None:
            self.commands = SimpleNamespace(run=self.run)
            self.files = SimpleNamespace(write=self.write, read=self.read)

        @classmethod
        async def create(cls, template: str | None = None, timeout: int | None = None, metadata: Any = None) -> Any:
            machine.note("create", template, timeout, metadata)
            return cls()

        async def run(self, cmd: str, envs: Any = None, user: str = "", timeout: float = 60) -> Any:
            machine.note("run", cmd, user, envs, timeout)
            code, out, err = machine.answer
            if code:
                raise CommandExitException(code, out, err)
            return SimpleNamespace(exit_code=0, stdout=out, stderr=err)

        async def write(
            self, path: str, data: Any, user: str = "", request_timeout: float = 0, use_octet_stream: bool = False
        ) -> None:
            machine.note("write", path, user)
            machine.files[path] = data.read() if isinstance(data, io.IOBase) else data

        async def read(self, path: str, format: str = "text", user: str = "") -> bytearray:
            machine.note("read", path, user)
            if path not in machine.files:
                raise FileNotFoundException(path)
            return bytearray(machine.files[path])

        async def kill(self) -> None:
            machine.note("end")

    install(
        monkeypatch,
        "e2b",
        AsyncSandbox=AsyncSandbox,
        CommandExitException=CommandExitException,
        TimeoutException=TimeoutException,
        FileNotFoundException=FileNotFoundException,
    )
    return machine


class DaytonaError(Exception): ...


class DaytonaNotFoundError(DaytonaError): ...


class DaytonaTimeoutError(DaytonaError): ...


class DaytonaProcessExecutionTimeoutError(DaytonaTimeoutError): ...


class DaytonaConnectionError(DaytonaError): ...


@pytest.fixture
def daytona(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    class Box:
        id = "box-2"

        def __init__(self) -> None:
            self.process = SimpleNamespace(exec=self.exec)
            self.fs = SimpleNamespace(upload_file=self.upload_file, download_file=self.download_file)

        async def exec(self, command: str, cwd: Any = None, env: Any = None, timeout: int | None = None) -> Any:
            machine.note("run", command, env, timeout)
            code, out, err = machine.answer
            mark = command.split("printf %s ")[1].split(";")[0]
            return SimpleNamespace(exit_code=code, result=f"{out}{mark}{err}")

        async def upload_file(self, file: Any, remote_path: str, timeout: int = 0) -> None:
            machine.note("write", remote_path)
            machine.files[remote_path] = Path(file).read_bytes() if isinstance(file, str) else file

        async def download_file(self, *args: str) -> bytes:
            machine.note("read", *args)
            if args[0] not in machine.files:
                raise DaytonaNotFoundError
            return machine.files[args[0]]

    class AsyncDaytona:
        async def create(self, params: Any, *, timeout: float = 60) -> Box:
            machine.note("create", params)
            return Box()

        async def delete(self, box: Box) -> None:
            machine.note("end", box.id)

        async def close(self) -> None:
            machine.note("closed")

    install(
        monkeypatch,
        "daytona",
        AsyncDaytona=AsyncDaytona,
        CreateSandboxFromImageParams=lambda **options: ("image", options),
        CreateSandboxFromSnapshotParams=lambda **options: ("snapshot", options),
        DaytonaNotFoundError=DaytonaNotFoundError,
    )
    return machine


class ServiceError(Exception): ...


class SandboxFilesystemNotFoundError(Exception): ...


def aio(function: Callable[..., Any]) -> Any:
    """As modal's functions are: the asynchronous one is an attribute."""
    return SimpleNamespace(aio=function)


@pytest.fixture
def modal(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    async def value(of: Any) -> Any:
        return of

    class Box:
        object_id = "box-3"

        def __init__(self) -> None:
            self.exec, self.terminate = aio(self._exec), aio(self._terminate)
            self.filesystem = SimpleNamespace(
                write_bytes=aio(self._write), copy_from_local=aio(self._copy), read_bytes=aio(self._read)
            )

        async def _exec(self, *args: str, env: Any = None, timeout: int | None = None) -> Any:
            machine.note("run", *args, env, timeout)
            code, out, err = machine.answer
            outputs = {
                name: SimpleNamespace(read=aio(lambda of=of: value(of)))
                for name, of in (("stdout", out), ("stderr", err))
            }
            return SimpleNamespace(**outputs, wait=aio(lambda: value(code)))

        async def _terminate(self) -> None:
            machine.note("end")

        async def _write(self, data: bytes, remote_path: str) -> None:
            machine.note("write", remote_path)
            machine.files[remote_path] = data

        async def _copy(self, local_path: str, remote_path: str) -> None:
            await self._write(Path(local_path).read_bytes(), remote_path)

        async def _read(self, remote_path: str) -> bytes:
            machine.note("read", remote_path)
            if remote_path not in machine.files:
                raise SandboxFilesystemNotFoundError
            return machine.files[remote_path]

    async def create(*args: str, app: Any, image: Any, timeout: int) -> Box:
        machine.note("create", args, app, image, timeout)
        return Box()

    async def lookup(name: str, *, create_if_missing: bool) -> str:
        return f"app {name}"

    install(
        monkeypatch,
        "modal",
        App=SimpleNamespace(lookup=aio(lookup)),
        Image=SimpleNamespace(from_registry=lambda tag: f"image {tag}"),
        Sandbox=SimpleNamespace(create=aio(create)),
    )
    install(monkeypatch, "modal.exception", SandboxFilesystemNotFoundError=SandboxFilesystemNotFoundError)
    return machine


DOCKER = """#!/usr/bin/env python3
import json, os, sys
argv = sys.argv[1:]
folder = os.path.dirname(os.path.abspath(__file__))
with open(f"{folder}/calls", "a") as calls:
    calls.write(json.dumps({"argv": argv, "env": dict(os.environ)}) + "\\n")
if argv[0] == "run" and argv[-2] == "missing":
    words = "Unable to find image\\ndocker: pull access denied.\\n\\nRun 'docker run --help' for more information"
    sys.exit(print(words, file=sys.stderr) or 125)
if argv[0] == "exec":
    names = [argv[i + 1] for i, each in enumerate(argv) if each == "--env"]
    env = {n.split("=")[0]: n.split("=", 1)[1] if "=" in n else os.environ[n] for n in names}
    os.execvpe("bash", argv[argv.index("bash"):], {"PATH": "/usr/bin:/bin"} | env)
"""


@pytest.fixture
def docker(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A client whose containers are this host; what it was called with is in the file ``calls``."""
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def docker_calls(docker: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (docker / "calls").read_text().splitlines()]


MAKERS: dict[str, Callable[[str], ServiceSandbox]] = {
    "e2b": E2BSandbox,
    "daytona": DaytonaSandbox,
    "modal": ModalSandbox,
}


@pytest.fixture(params=sorted(MAKERS))
def service(request: pytest.FixtureRequest) -> tuple[Callable[[str], ServiceSandbox], Machine]:
    return MAKERS[request.param], request.getfixturevalue(request.param)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


Service = tuple[Callable[[str], ServiceSandbox], Machine]


def test_a_sandbox_of_a_service(service: Service, tmp_path: Path) -> None:
    make, machine = service
    (tmp_path / "host").write_bytes(b"of the host")

    async def use() -> None:
        async with make("image:1") as sandbox:
            assert isinstance(sandbox, Sandbox)
            assert sandbox.sandbox_id.startswith("box-")
            assert await sandbox.exec("ls", env={"A": "1"}, timeout=7) == (0, "out", "err")
            machine.answer = (3, "o", "it broke")
            assert await sandbox.exec("ls") == (3, "o", "it broke")
            with pytest.raises(SandboxError, match=r"box-\d: 'ls' failed with status 3: it broke"):
                await sandbox.exec("ls", check=True)
            machine.answer = (0, "", "")
            for content, expected in (("中文", "中文"), (b"bytes", "bytes"), (tmp_path / "host", "of the host")):
                await sandbox.write_file("/w/f", content)
                assert await sandbox.read_file("/w/f") == expected
            assert await sandbox.read_file("/w/none") == ""
            await sandbox.write_file("/w/g", "x", user="agent")
        with pytest.raises(SandboxError, match="not open"):
            await make("image:1").exec("ls")

    run(use())
    assert {"A": "1"} in machine.named("run")[0]
    assert 7 in machine.named("run")[0]
    assert len(machine.named("end")) == 1


def test_calls_are_made_again_after_errors_of_the_way_there(service: Service) -> None:
    make, machine = service

    async def use() -> None:
        async with make("image") as sandbox:
            machine.fails = [ReadTimeout("cut"), ConnectionResetError("cut")]
            assert (await sandbox.exec("ls"))[0] == 0
            machine.fails = [ReadTimeout("cut")] * 3
            with pytest.raises(SandboxError, match=r"box-\d: 'ls': ReadTimeout: cut"):
                await sandbox.exec("ls")
            assert len(machine.named("run")) == 6
            machine.fails = [ReadTimeout("cut")]
            with pytest.raises(SandboxError, match="ReadTimeout"):
                await sandbox.exec("make a mess", idempotent=False)
            machine.fails = [ValueError("what was asked is wrong")]
            with pytest.raises(SandboxError, match="what was asked is wrong"):
                await sandbox.exec("ls")
            assert len(machine.named("run")) == 8
            machine.fails = [ReadTimeout("cut")]
            await sandbox.read_file("/w/none")
            assert len(machine.named("read")) == 2

    run(use())


@pytest.mark.parametrize(
    ("kind", "error", "again"),
    [
        ("e2b", SandboxException("h2 stream was reset"), True),
        ("e2b", SandboxException("sandbox does not exist"), False),
        ("e2b", SandboxUnreachableException("502"), True),
        ("e2b", SandboxNotRunningException("gone"), False),
        ("daytona", DaytonaConnectionError("reset"), True),
        ("daytona", DaytonaError("no such thing"), False),
        ("modal", ServiceError("unavailable"), True),
    ],
)
def test_each_packages_own_errors(kind: str, error: Exception, again: bool, request: pytest.FixtureRequest) -> None:
    machine: Machine = request.getfixturevalue(kind)

    async def use() -> int:
        async with MAKERS[kind]("image") as sandbox:
            machine.fails = [error]
            return (await sandbox.exec("ls"))[0]

    if again:
        assert run(use()) == 0
    else:
        with pytest.raises(SandboxError):
            run(use())
    assert len(machine.named("run")) == 1 + again
    assert machine.named("end")


@pytest.mark.parametrize(
    ("kind", "error"),
    [("e2b", TimeoutException("deadline")), ("daytona", DaytonaProcessExecutionTimeoutError("slow")), ("modal", None)],
)
def test_a_command_that_takes_too_long(kind: str, error: Exception | None, request: pytest.FixtureRequest) -> None:
    machine: Machine = request.getfixturevalue(kind)
    machine.answer = (EXIT_TIME_BUDGET_EXCEEDED if error is None else 0, "", "")

    async def use() -> tuple[int, str, str]:
        async with MAKERS[kind]("image") as sandbox:
            machine.fails = [error] if error else []
            return await sandbox.exec("sleep 9", timeout=2)

    code, _, err = run(use())
    assert code == EXIT_TIME_BUDGET_EXCEEDED
    assert "ran longer than 2 s" in err
    assert len(machine.named("run")) == 1


def test_starts_and_ends_that_fail(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = service

    async def use() -> None:
        sandbox = make("image")
        sandbox._start = failing  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match=r"no sandbox of 'image': ValueError: quota"):
            await sandbox.__aenter__()
        await sandbox.__aexit__(None, None, None)
        sandbox = make("image")
        await sandbox.__aenter__()
        sandbox._stop = failing  # type: ignore[method-assign]
        await sandbox.__aexit__(None, None, None)

    async def failing() -> Any:
        raise ValueError("quota")

    run(use())
    assert "may live on for 3600 s: ValueError: quota" in caplog.text


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_missing_package_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(SandboxError) as raised:
        run(MAKERS[kind]("image").__aenter__())
    assert str(raised.value) == f"this kind of sandbox needs the package {kind}: pip install {kind}"


def test_settings_of_e2b(e2b: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start(**options: Any) -> Any:
        async with E2BSandbox("image:1", **options):
            return e2b.named("create")[-1]

    assert run(start()) == ("image:1", 3600, {})
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "60")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "img")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_METADATA_JSON", '{"team": 7}')
    assert run(start()) == (None, 60, {"team": "7", "img": "image:1"})
    assert run(start(timeout=5, metadata={"a": "b"}, image_metadata_key="k")) == (None, 5, {"a": "b", "k": "image:1"})
    (tmp_path / "metadata").write_text('{"from": "file"}')
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_METADATA_FILE", str(tmp_path / "metadata"))
    assert run(start())[2] == {"from": "file", "img": "image:1"}
    for text in ("[]", "{"):
        (tmp_path / "metadata").write_text(text)
        with pytest.raises(SandboxError, match="the metadata of"):
            E2BSandbox("image")
    monkeypatch.delenv("SLIME_AGENT_SANDBOX_METADATA_FILE")
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(SandboxError, match="E2B_API_KEY is not set"):
        run(start())


@pytest.mark.parametrize("text", ["0", "many", "-1"])
def test_numbers_of_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", text)
    with pytest.raises(SandboxError, match=f"SLIME_AGENT_SANDBOX_RPC_RETRIES={text} must be"):
        ModalSandbox("image")


def test_how_daytona_starts(daytona: Machine) -> None:
    async def start(image: str) -> None:
        async with DaytonaSandbox(image, lifetime_sec=90):
            pass

    run(start("python:3.12"))
    run(start("snapshot:mine"))
    options = {"os_user": "root", "ephemeral": True, "ttl_minutes": 2, "auto_stop_interval": 2}
    assert [params for (params,) in daytona.named("create")] == [
        ("image", {"image": "python:3.12", **options}),
        ("snapshot", {"snapshot": "mine", **options}),
    ]
    assert len(daytona.named("closed")) == 2


def test_how_modal_starts(modal: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_AGENT_MODAL_APP", "mine")

    async def start() -> None:
        async with ModalSandbox("python:3.12", lifetime_sec=90):
            pass

    run(start())
    assert modal.named("create") == [(("sleep", "infinity"), "app mine", "image python:3.12", 90)]


def test_a_user_where_everything_is_roots() -> None:
    assert by_bash("echo 'a b'", "root") == """bash -c 'echo '"'"'a b'"'"''"""
    assert by_bash("true", "agent").startswith("runuser -u agent -- env HOME=")


def test_docker(docker: Path, tmp_path: Path) -> None:
    async def use() -> None:
        async with DockerSandbox("image", limits=ContainerLimits(memory_mb=100, network="none")) as sandbox:
            assert await sandbox.exec("echo $A$PATH; echo e >&2; exit 3", env={"A": "1", "PATH": "/bin:/usr/bin"}) == (
                3,
                "1/bin:/usr/bin\n",
                "e\n",
            )
            code, _, err = await sandbox.exec("sleep 60", timeout=1)
            assert (code, err) == (EXIT_TIME_BUDGET_EXCEEDED, "\n[ended: it ran longer than 1 s]")
            assert (await sandbox.exec("exit 124", timeout=50))[0] == 124
            there = f"{tmp_path}/new/file of mine"
            (tmp_path / "host").write_bytes(b"h" * 200_000)
            for content in ("中文", b"bytes", tmp_path / "host"):
                await sandbox.write_file(there, content, user="agent")
            assert await sandbox.read_file(there) == "h" * 200_000
            assert await sandbox.read_file(f"{there}-not") == ""
            with pytest.raises(SandboxError, match="could not be written"):
                await sandbox.write_file(f"{there}/below", "")

    run(use())
    started, *_, ended = docker_calls(docker)
    name = ended["argv"][-1]
    assert ended["argv"] == ["rm", "--force", name]
    assert started["argv"][:6] == ["run", "--detach", "--rm", "--init", "--name", name]
    assert started["argv"][-4:] == ["--entrypoint", "sleep", "image", "3600"]
    assert {"--memory", "100m", "--pids-limit", "no-new-privileges", "none"} <= set(started["argv"])
    assert "--add-host" not in started["argv"]


def test_dockers_client_gets_no_key_of_the_run(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-of-the-host")

    async def use() -> str:
        async with DockerSandbox("image") as sandbox:
            return (await sandbox.exec("env", env={"SESSION": "key-of-the-session"}))[1]

    assert "SESSION=key-of-the-session" in run(use())
    assert "secret-of-the-host" not in (docker / "calls").read_text()
    assert not any("key-of-the-session" in " ".join(call["argv"]) for call in docker_calls(docker))
    assert "host.docker.internal:host-gateway" in docker_calls(docker)[0]["argv"]


def test_an_image_or_a_docker_that_is_missing(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"'missing': Unable to find image docker: pull access denied\.$"):
        run(DockerSandbox("missing").__aenter__())
    monkeypatch.setenv("SLIME_AGENT_DOCKER", "no-such-docker")
    with pytest.raises(SandboxError, match="there is no program 'no-such-docker' on PATH"):
        run(DockerSandbox("image").__aenter__())


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("", LocalSandbox),
        ("plain", LocalSandbox),
        ("docker", DockerSandbox),
        ("e2b", E2BSandbox),
        ("modal", ModalSandbox),
    ],
)
def test_choosing(kind: str, made: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_sandbox("image", kind=kind)) is made
    monkeypatch.setenv("SLIME_AGENT_SANDBOX", kind or "local")
    assert type(make_sandbox("image", reach="http://127.0.0.1:80")) is made


@pytest.mark.parametrize("variable", ["SLIME_AGENT_SANDBOX", "SLIME_AGENT_SANDBOX_BACKEND"])
def test_choosing_a_class_of_ones_own(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_boxes.py").write_text("class Box:\n    def __init__(self, image):\n        self.image = image\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(variable, "own_boxes.Box")
    made: Any = make_sandbox("registry/swe:1")
    assert (type(made).__name__, made.image) == ("Box", "registry/swe:1")
    monkeypatch.setenv(variable, "own_boxes.Bax")
    with pytest.raises(BadInputError, match=r"SLIME_AGENT_SANDBOX own_boxes\.Bax: .*Box"):
        make_sandbox("registry/swe:1")


def test_choosing_wrongly() -> None:
    with pytest.raises(SandboxError, match="must be one of local, plain, docker, e2b, daytona, modal"):
        make_sandbox(kind="nowhere")
    with pytest.raises(SandboxError, match="a sandbox of docker needs an image"):
        make_sandbox(kind="docker")
