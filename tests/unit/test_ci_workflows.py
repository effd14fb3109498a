"""The workflows of GitHub, and how they are made of a template and of what test files declare."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.workflows import FOLDER, JOBS, PROGRAM, ROOT

NUM_GPUS = 0
WORKFLOWS = sorted((ROOT / FOLDER).glob("*.yml"))


LABELLED = {job["label"]: name for name, job in JOBS.items() if job["runs"] == "labelled"}


class Checkout:
    """A copy of what the generator reads, with test files of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, root / FOLDER / "pr-test.yml"
        for folder in (FOLDER, Path("tests/ci")):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "pr-test.yml"))

    def write(self, name: str, text: str) -> None:
        (self.root / "tests" / name).write_text(text)

    def generate(self, *words: str, below: str | Path = ".") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.root / PROGRAM), *words]
        return subprocess.run(command, cwd=self.root / below, capture_output=True, text=True, timeout=60)

    def jobs(self) -> dict[str, Any]:
        return yaml.safe_load(self.made.read_text())["jobs"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def full(checkout: Checkout) -> Checkout:
    """With a file for each label."""
    for i, label in enumerate(LABELLED):
        checkout.write(f"test_{i}.py", f'NUM_GPUS = {i}\nLABELS = ("{label}",)\n')
    variants = 'LABELS = ("run-ci-megatron",)\nVARIANTS = ("", "SLIME_TEST_X=1 --y")\n"SLIME_TEST_X", "--y"\n'
    checkout.write("test_more.py", f"NUM_GPUS = 8\n{variants}U.get_env_enable_infinite_run()\n")
    assert checkout.generate().returncode == 0
    return checkout


@pytest.mark.parametrize("below", [".", FOLDER])
def test_it_is_made_from_any_folder_and_only_once(below: str | Path, checkout: Checkout) -> None:
    checkout.write("test_x.py", 'NUM_GPUS = 4\nLABELS = ("run-ci-short",)\n')
    assert checkout.generate("--check", below=below).returncode == 1
    assert not checkout.made.exists()
    name = FOLDER / "pr-test.yml"
    assert checkout.generate(below=below).stdout == f"{name}: written\n"
    text = checkout.made.read_text()
    assert text.startswith("# Do not edit: ")
    assert checkout.generate(below=below).stdout == f"{name}: up to date\n"
    assert checkout.made.read_text() == text
    assert checkout.generate("--check", below=below).returncode == 0

    checkout.write("test_x.py", 'NUM_GPUS = 8\nLABELS = ("run-ci-short",)\n')
    result = checkout.generate("--check", below=below)
    said = "pr-test.yml: not what template and test files make of it; run python .github/workflows/" + PROGRAM.name
    assert (result.returncode, result.stderr) == (1, f"{PROGRAM.name}: error: {said}\n")
    assert checkout.made.read_text() == text


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda c: c.write("test_x.py", ""), "tests/test_x.py: has no NUM_GPUS; write"),
        (lambda c: c.write("test_x.py", "NUM_GPUS = 1\nLABELS = ('run-ci-x',)\n"), "LABELS has 'run-ci-x', by which"),
        (lambda c: (c.root / FOLDER / "a.yml.j2").write_text("<% if %>\n"), "a.yml.j2:1: Expected an expression"),
        (lambda c: (c.root / FOLDER / "a.yml.j2").write_text("<< x >>\n"), "a.yml.j2: 'x' is undefined; mend it"),
    ],
)
def test_what_is_wrong_is_one_line(break_it: Callable[[Checkout], None], said: str, checkout: Checkout) -> None:
    break_it(checkout)
    result = checkout.generate()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{PROGRAM.name}: error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not checkout.made.exists()


def test_a_job_without_files_is_left_out_and_so_is_its_choice(checkout: Checkout) -> None:
    assert checkout.generate().returncode == 0
    assert set(checkout.jobs()) == {"e2e-test-changed-detect", "e2e-test-changed", "cpu-unittest", "docs"}
    checkout.write("test_x.py", 'NUM_GPUS = 4\nLABELS = ("run-ci-short",)\n')
    assert checkout.generate().returncode == 0
    assert checkout.jobs().keys() >= {"e2e-test-short", "e2e-test-image"}
    assert "e2e-test-ckpt" not in checkout.jobs()
    dispatch = yaml.safe_load(checkout.made.read_text())[True]["workflow_dispatch"]  # YAML 1.1 reads `on` so
    options = ["run-ci-short", "run-ci-image", "run-ci-changed", "run-ci-cpu-unittest", "run-ci-docs"]
    assert dispatch["inputs"]["label"]["options"] == options


def test_jobs_run_the_files_of_their_label_in_their_image(full: Checkout) -> None:
    jobs = full.jobs()
    rows = {name: jobs[name]["strategy"]["matrix"]["include"] for name in (*LABELLED.values(), "e2e-test-image")}
    infinite = "SLIME_TEST_ENABLE_INFINITE_RUN=${{ inputs.infinite_run || false }}"
    more = [
        {"run": f"env {infinite} python tests/test_more.py", "num_gpus": 8},
        {"run": f"env SLIME_TEST_X=1 {infinite} python tests/test_more.py --y", "num_gpus": 8},
    ]
    for i, (label, name) in enumerate(LABELLED.items()):
        own = [{"run": f"python tests/test_{i}.py", "num_gpus": i}]
        assert rows[name] == own + (more if label == "run-ci-megatron" else [])
        assert f"inputs.label == '{label}' || contains(" in jobs[name]["if"]
    assert len(rows["e2e-test-image"]) == len(LABELLED) + len(more)
    images = {name: job["container"]["image"] for name, job in jobs.items() if "container" in job}
    assert images.pop("e2e-test-image") == "slimerl/slime-test:latest"
    assert images == dict.fromkeys([*LABELLED.values(), "e2e-test-changed"], "slimerl/slime:latest")
    assert all(jobs[name]["runs-on"] == "self-hosted" for name in images)


@pytest.mark.parametrize("count", [0, 2])
def test_a_gpu_job_runs_what_its_matrix_says(count: int, full: Checkout) -> None:
    """Its last step, with a file that writes what it was given, on GPUs that no host has."""
    full.write(
        "test_0.py",
        "import os, sys\nprint(*map(os.environ.get, ['SLIME_TEST_X', 'CUDA_VISIBLE_DEVICES']), *sys.argv)\n",
    )
    install, step = full.jobs()["e2e-test-short"]["steps"][-2:]
    assert install["run"] == "pip install -e . --no-deps"
    assert "SLIME_TEST" not in str(step["env"])
    gpus = ["9990", "9991", "9992"]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    env |= {"NUM_GPUS": str(count), "RUN": "env SLIME_TEST_X=1 python tests/test_0.py --y z=*"}
    command = ["bash", "-eo", "pipefail", "-c", step["run"]]
    result = subprocess.run(command, cwd=full.root, env=env, capture_output=True, text=True, timeout=60)
    for gpu in gpus:
        Path(f"/dev/shm/custom_gpu_lock_{gpu}.lock").unlink(missing_ok=True)
    assert result.returncode == 0, result.stderr
    given = ",".join(gpus[: count or None])
    assert result.stdout.splitlines()[-1] == f"1 {given} tests/test_0.py --y z=*"
    assert ("Acquired GPUs" in result.stdout + result.stderr) == (count > 0)


def check_workflow(path: Path) -> None:
    """What every workflow here keeps to, beyond GitHub's schema."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "privileged" not in text
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        assert job.get("strategy", {"fail-fast": False})["fail-fast"] is False, name
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses), name
        assert all(step.get("with", {}).get("persist-credentials", True) is False for step in job["steps"][:1]), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_keep_to_the_rules(workflow: Path) -> None:
    check_workflow(workflow)


def test_every_kind_of_job_keeps_to_the_rules(full: Checkout) -> None:
    check_workflow(full.made)


def test_workflows_are_valid(full: Checkout) -> None:
    """By the schema that check-jsonschema ships."""
    broken = full.root / "broken.yml"
    broken.write_text(full.made.read_text().replace("runs-on:", "run-on:"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    result = subprocess.run([*command, *WORKFLOWS, full.made], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    result = subprocess.run([*command, broken], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "e2e-test-short" in result.stdout


def test_always_the_cpu_tests_and_the_site_and_they_alone(full: Checkout) -> None:
    jobs = full.jobs()
    names = [name for name, job in JOBS.items() if job.get("always")]
    assert names == ["cpu-unittest", "docs"]
    for name in names:
        label = JOBS[name]["label"]
        assert jobs[name]["if"] == f"github.event_name != 'workflow_dispatch' || inputs.label == '{label}'"
    matrix = jobs["cpu-unittest"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12"]
    count = len(matrix["shard"])
    assert matrix["shard"] == list(range(1, count + 1))
    assert count > 1
    assert jobs["cpu-unittest"]["steps"][-1]["run"] == f"bash scripts/test.sh --shard ${{{{ matrix.shard }}}}/{count}"
    build, upload = jobs["docs"]["steps"][-2:]
    assert build["run"] == "bash scripts/docs.sh build"
    site = re.findall(r"^site=(\S+)$", (ROOT / "scripts" / "docs.sh").read_text(), re.MULTILINE)
    assert [upload["with"]["path"]] == site
