"""Each version stands in one place, under requirements/, and whatever repeats one agrees with it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)$", re.MULTILINE)
NAMED = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(?:\[[^\]]*\])?[=~]=([0-9][^\s\"']*)")
SPOKEN = re.compile(r"(?i)\b(sglang-router|sglang|torch|megatron-core|ray|transformers)[ =]+(\d+\.\d[\w.+]*\w)")
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)-.*")
"""Packages of CUDA's own; those of its two releases have names of their own, or versions."""


def pins(file: str) -> dict[str, str]:
    """Versions of a file of requirements, by normalised name."""
    found = PIN.findall((ROOT / "requirements" / file).read_text())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def variable(name: str, **environment: str) -> str:
    """A variable of requirements/pins.sh, as scripts get it."""
    program = f'source requirements/pins.sh; printf "%s" "${name}"'
    command = ["bash", "-euc", program]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def files_that_install() -> list[Path]:
    """Dockerfiles, shell scripts and workflows."""
    found = [ROOT / "build_conda.sh", *ROOT.glob("docker/*"), *ROOT.glob("scripts/**/*.sh"), *ROOT.glob(".ci/*")]
    return [*found, *ROOT.glob("examples/**/*.sh"), *ROOT.glob(".github/**/*.y*ml*"), *ROOT.glob(".github/**/*.sh")]


def test_the_two_sets_for_cuda_differ_in_what_is_cudas_own() -> None:
    later, earlier = pins("constraints-cuda.txt"), pins("constraints-cuda-12.9.txt")
    only_arm = {"av", "decord2"}  # what SGLang asks for on aarch64, for which there is one set
    assert {name for name in later.keys() - earlier.keys() if not CUDA_PACKAGE.fullmatch(name)} == only_arm
    assert {name for name in earlier.keys() - later.keys() if not re.fullmatch(r"nvidia-.*-cu12", name)} == set()
    for name in later.keys() & earlier.keys():
        if name in ("cuda-bindings", "cuda-python", "cuda-toolkit"):
            assert (earlier[name][:5], later[name][:3]) == ("12.9.", "13."), name
        else:
            assert earlier[name].removesuffix("+cu129") == later[name], name
    built_for_it = {name for name, version in earlier.items() if version.endswith("+cu129")}
    assert {"torch", "torchvision", "torchaudio", "sglang-kernel", "sgl-deep-gemm"} <= built_for_it


@pytest.mark.parametrize("cuda", ["12.9", "13.0"])
def test_base_images_are_of_the_pinned_toolkit(cuda: str) -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    toolkit = variable("SLIME_CUDA_TOOLKIT", SLIME_CUDA=cuda)
    assert toolkit.startswith(f"{cuda}.")
    assert f"\nFROM nvidia/cuda:{toolkit}-devel-ubuntu24.04 AS cuda-{cuda}\n" in text


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cpu"])
def test_images_default_to_the_pinned_python_and_cuda(file: str) -> None:
    defaults = re.findall(r"^ARG (PYTHON|CUDA)=(.*)$", (ROOT / "docker" / file).read_text(), re.MULTILINE)
    expected = {"PYTHON": variable("SLIME_PYTHON"), "CUDA": variable("SLIME_CUDA")}
    assert defaults
    assert dict(defaults) == {name: expected[name] for name, _ in defaults}


def test_the_package_indexs_cuda_is_the_default() -> None:
    """`scripts/install.sh cuda` installs it, which is what torch of the package index is built for."""
    assert pins("constraints-cuda.txt")["cuda-toolkit"] == variable("SLIME_CUDA_TOOLKIT")
    assert pins("constraints-cuda-12.9.txt")["cuda-toolkit"] == variable("SLIME_CUDA_TOOLKIT", SLIME_CUDA="12.9")


@pytest.mark.parametrize(("name", "value"), [("SLIME_CUDA", "12"), ("SLIME_PYTHON", "3.13"), ("SLIME_CUDA", "13.0.2")])
def test_a_version_that_is_not_offered_is_one_line(name: str, value: str) -> None:
    command = ["bash", "-euc", "source requirements/pins.sh; echo on"]
    result = subprocess.run(command, cwd=ROOT, env={name: value}, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"error: {name} must be .* or .*, not '{value}'\n", result.stderr)


def test_what_installs_names_no_version_of_a_package() -> None:
    known = pins("constraints-cuda.txt") | pins("constraints-cuda-12.9.txt") | pins("constraints-cpu.txt")
    assert len(files_that_install()) > 40
    found = []
    for file in files_that_install():
        for name, version in NAMED.findall(file.read_text()):
            if re.sub(r"[-_.]+", "-", name).lower() in known:
                found.append(f"{file.relative_to(ROOT)}: {name} {version}")
    assert not found, f"read these versions from requirements/: {found}"


@pytest.mark.parametrize("page", ["docs/install.md", "docker/README.md", "docs/zh/docker.md"])
def test_pages_on_installing_name_the_pinned_versions(page: str) -> None:
    named = SPOKEN.findall((ROOT / page).read_text())
    files = ("constraints-cpu.txt", "constraints-cuda.txt", "constraints-cuda-12.9.txt", "new/constraints-cpu.txt")
    known = [pins(file) for file in files]
    wrong = []
    for name, version in named:
        expected = {versions[name.lower()] for versions in known if name.lower() in versions}
        # "torch 2.11" is said of a range, and "2.13.0+cpu" of one build.
        if not any(f"{pin}.".startswith(f"{version.split('+')[0]}.") or pin == version for pin in expected):
            wrong.append(f"{name} {version}, pinned {sorted(expected)}")
    assert not wrong
    assert named or page != "docs/install.md"
