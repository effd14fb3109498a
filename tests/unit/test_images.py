"""docker/build.sh: the docker commands of each target. What the Dockerfiles install: test_install.py."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TAGS = {
    "release-primary": ["slimerl/slime:latest", "slimerl/slime:latest-cu129", f"slimerl/slime:{VERSION}-cu129"],
    "release-cu13": ["slimerl/slime:latest-cu130", f"slimerl/slime:{VERSION}-cu130"],
    "debug": ["slimerl/slime-test:latest"],
    "cpu": ["slimerl/slime:latest-cpu", f"slimerl/slime:{VERSION}-cpu"],
}
CUDA = {"release-primary": "12.9", "release-cu13": "13.0", "debug": "12.9"}


def build(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """docker/build.sh with nothing on PATH but what it needs, and what else is in ``path``."""
    command = ["bash", str(ROOT / "docker" / "build.sh"), *arguments]
    variables = {"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def commands(printed: str) -> list[list[str]]:
    return [shlex.split(line) for line in printed.splitlines()]


@pytest.mark.parametrize("target", sorted(TAGS))
def test_a_target_is_built_with_its_tags_from_a_file_that_takes_its_arguments(target: str) -> None:
    result = build("--print", target, SLIME_PYTHON="3.11")
    assert result.returncode == 0, result.stderr
    (words,) = commands(result.stdout)
    assert (words[:2], words[-1]) == (["docker", "build"], ".")
    pairs = list(zip(words[2:-1:2], words[3:-1:2], strict=True))
    assert [value for option, value in pairs if option == "--tag"] == TAGS[target]
    given = dict(value.split("=") for option, value in pairs if option == "--build-arg")
    assert given == {"PYTHON": "3.11"} | ({"CUDA": CUDA[target]} if target in CUDA else {})
    (file,) = [value for option, value in pairs if option == "--file"]
    text = (ROOT / file).read_text()
    assert set(given) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert target not in CUDA or f" AS cuda-{CUDA[target]}\n" in text


def test_mirrors_are_passed_on() -> None:
    (words,) = commands(build("--print", "debug", SLIME_TORCH_INDEX="https://a/b c").stdout)
    assert "SLIME_TORCH_INDEX=https://a/b c" in words


def test_docker_is_called_as_printed_and_every_tag_is_pushed(tmp_path: Path) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/bash\nprintf "%q " docker "$@" >>{tmp_path}/calls\necho >>{tmp_path}/calls\n')
    docker.chmod(0o755)
    assert build("--push", "release-primary", path=docker.parent).returncode == 0
    called = commands((tmp_path / "calls").read_text())
    assert called == commands(build("--push", "--print", "release-primary").stdout)
    assert called[1:] == [["docker", "push", tag] for tag in TAGS["release-primary"]]


def test_nothing_is_pushed_after_a_build_that_failed(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/bash\necho "$1" >>{tmp_path}/calls\nexit 17\n')
    docker.chmod(0o755)
    assert build("--push", "cpu", path=tmp_path).returncode == 17
    assert (tmp_path / "calls").read_text() == "build\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "build.sh: error: the target must be one of release-primary, release-cu13, debug, cpu, not ''"),
        (["cuda"], {}, "build.sh: error: the target must be one of release-primary"),
        (["cpu", "debug"], {}, "build.sh: error: one target at a time, not 'cpu' and 'debug'"),
        (["cpu", "--pull"], {}, "build.sh: error: unknown option '--pull'; usage: "),
        (["cpu"], {"SLIME_PYTHON": "3.10"}, "error: SLIME_PYTHON must be 3.11 or 3.12, not '3.10'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], environment: dict[str, str], message: str) -> None:
    result = build("--print", *arguments, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(message)


def test_a_host_without_docker_is_told_so(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    result = build("cpu", PATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "build.sh: error: no docker on PATH; install Docker, or see the commands with --print\n"
