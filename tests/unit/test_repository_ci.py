"""What the whole repository keeps to for CI: each test file is run by something, and workflows and pages follow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
import yaml

from slime.options.flags.unavailable import NOT_YET, UNAVAILABLE_VALUES, WITHOUT_EFFECT
from tests.ci.registry import read_all
from tests.workflows import FOLDER, JOBS, PROGRAM, ROOT

NUM_GPUS = 0
FILES = read_all(ROOT)


def test_every_test_file_is_run_by_something() -> None:
    """`scripts/test.sh` and `scripts/test-gpu.sh` run whole folders; any other file runs by a label."""
    (named,) = re.findall(r"^directories=\((.+)\)$", (ROOT / "scripts" / "test.sh").read_text(), re.MULTILINE)
    folders = [*named.split(), "tests/gpu"]
    assert len(folders) == 5
    assert "tests/gpu" in (ROOT / "scripts" / "test-gpu.sh").read_text()
    assert len(FILES) > 200
    stray = [file.path for file in FILES if not (file.labels or file.path.startswith(tuple(f"{f}/" for f in folders)))]
    assert not stray, "give them LABELS (docs/ci.md), or move them into a folder that scripts/test.sh runs"


def test_files_need_gpus_where_their_folder_has_them() -> None:
    for file in FILES:
        assert (file.num_gpus > 0) == file.path.startswith("tests/gpu/") or file.labels, file.path


def test_a_case_says_only_that_it_needs_more_gpus_than_its_file() -> None:
    """`tests/gpu/conftest.py` marks the others by ``NUM_GPUS``."""
    marked = 0
    for file in FILES:
        for node in ast.walk(ast.parse((ROOT / file.path).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "gpus":
                marked += 1
                assert ast.literal_eval(node.args[0]) > file.num_gpus, f"{file.path}:{node.lineno}"
    assert marked


def test_the_committed_workflow_is_what_template_and_test_files_make_of_it() -> None:
    """Else run python .github/workflows/generate_github_workflows.py, and commit its result."""
    result = subprocess.run([sys.executable, PROGRAM, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("page", ["ci.md", "zh/ci.md"])
def test_the_page_lists_every_label_with_its_job_and_what_waits(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = re.findall(r"^\| `(run-ci-[\w-]+)` \| `([\w-]+)` \|", text, re.MULTILINE)
    assert dict(rows) == {job["label"]: name for name, job in JOBS.items()}
    assert len(rows) == len(JOBS)
    waiting = re.findall(r"^\| `(tests/\S+\.py).*`(run-ci-\w+)`\S \| `(--[\w -]+)` \|$", text, re.MULTILINE)
    in_template = [
        (run["test_file"], job["label"], run["needs"]) for job in JOBS.values() for run in job.get("waiting", ())
    ]
    assert waiting == in_template


def test_what_a_run_waits_for_is_not_there_yet() -> None:
    """Else register it in the test file, and take it out of 'waiting'."""
    absent = {flag for flags in NOT_YET.values() for flag in flags.split()} | set(WITHOUT_EFFECT)
    absent |= {" ".join(pair) for pair in UNAVAILABLE_VALUES}
    if "moe_enable_deepep=False," in (ROOT / "slime/backends/megatron/model.py").read_text():
        absent.add("--moe-enable-deepep")
    needs = {waiting["needs"] for job in JOBS.values() for waiting in job.get("waiting", ())}
    assert needs <= absent


def test_hooks_have_the_versions_of_the_development_requirements() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    pinned = set((ROOT / "requirements" / "dev.txt").read_text().splitlines())
    found = [package for hook in hooks for package in hook["additional_dependencies"]]
    assert len(found) == len(hooks) >= 8
    assert [package for package in found if package not in pinned] == []
    workflow = (ROOT / FOLDER / "pre-commit.yml").read_text()
    assert "pip install \"$(grep '^pre-commit==' requirements/dev.txt)\"" in workflow
