"""tests/ci/detect_changed_tests.py on scratch repositories of git."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_GPUS = 0
PROGRAM = Path(__file__).resolve().parents[1] / "ci" / "detect_changed_tests.py"
LONG = "# a comment that makes two versions of a file alike\n" * 20


class Repository:
    """A branch ``work`` of ``main``, which has one commit."""

    def __init__(self, root: Path) -> None:
        self.root, self.output = root / "repository", root / "output"
        self.root.mkdir()
        # No configuration of this machine's user or system has a say.
        clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        names = {f"GIT_{who}_{what}": "x@x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("GIT")}, **clean, **names}
        self.git("init", "-q", "-b", "main")
        for name in ("old", "gone", "moved", "same"):
            self.write(f"tests/test_{name}.py", f"NUM_GPUS = 8\n{LONG}# {name}\n")
        self.commit()
        self.git("checkout", "-q", "-b", "work")

    def git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.root, env=self.env, check=True, capture_output=True)

    def write(self, name: str, text: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")

    def detect(self, base: str = "main", below: str = ".", **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAM), "--base", base]
        env = {**self.env, "GITHUB_OUTPUT": str(self.output), **env}
        return subprocess.run(command, cwd=self.root / below, env=env, capture_output=True, text=True, timeout=60)

    def outputs(self) -> dict[str, Any]:
        """What GitHub would read."""
        return {
            name: json.loads(value) for name, value in (x.split("=", 1) for x in self.output.read_text().splitlines())
        }


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_added_and_changed_files_are_run_with_the_gpus_that_they_need(repository: Repository) -> None:
    repository.write("tests/test_new.py", "import torch, nothing_that_is_here\nNUM_GPUS = 4\n")
    repository.write("tests/test_old.py", "NUM_GPUS = 2\n")
    repository.write("tests/test_qwen2.5_0.5B.py", "NUM_GPUS = 1\n")
    repository.write("tests/plugin_contracts/test_hooks.py", "NUM_GPUS = 0\n")
    for other in ("tests/unit/test_x.py", "tests/helper.py", "test_x.py", "tests/plugin_contracts/deep/test_x.py"):
        repository.write(other, "")
    repository.commit()
    result = repository.detect(below="tests")  # from any folder
    assert (result.returncode, result.stderr) == (0, "")
    expected = [("plugin_contracts/test_hooks", 0), ("test_new", 4), ("test_old", 2), ("test_qwen2.5_0.5B", 1)]
    rows = [{"run": f"python tests/{name}.py", "num_gpus": gpus} for name, gpus in expected]
    assert repository.outputs() == {"matrix": {"include": rows}, "has_tests": True}
    assert result.stdout == repository.output.read_text()


def test_variants_of_a_changed_file_are_runs_of_their_own(repository: Repository) -> None:
    text = (
        'NUM_GPUS = 8\nLABELS = ("run-ci-ckpt",)\nVARIANTS = ("", "SLIME_TEST_X=1 --y")\nread("SLIME_TEST_X", "--y")\n'
    )
    repository.write("tests/test_old.py", text)
    repository.commit()
    assert repository.detect().returncode == 0
    runs = [row["run"] for row in repository.outputs()["matrix"]["include"]]
    assert runs == ["python tests/test_old.py", "env SLIME_TEST_X=1 python tests/test_old.py --y"]


def test_a_renamed_file_counts_as_added_and_a_deleted_one_not_at_all(repository: Repository) -> None:
    repository.git("rm", "-q", "tests/test_gone.py")
    repository.git("mv", "tests/test_moved.py", "tests/test_there.py")
    repository.write("tests/test_there.py", f"NUM_GPUS = 4\n{LONG}# moved\n")  # so alike that git calls it a rename
    repository.commit()
    assert repository.detect().returncode == 0
    rows = [{"run": "python tests/test_there.py", "num_gpus": 4}]
    assert repository.outputs() == {"matrix": {"include": rows}, "has_tests": True}


def test_what_the_base_has_gained_since_is_not_a_change(repository: Repository) -> None:
    repository.git("checkout", "-q", "main")
    repository.write("tests/test_same.py", "NUM_GPUS = 1\n")
    repository.commit()
    repository.git("checkout", "-q", "work")
    repository.write("docs/x.md", "x")
    repository.commit()
    result = repository.detect()
    assert result.returncode == 0
    assert repository.outputs() == {"matrix": {"include": []}, "has_tests": False}


def test_without_github_the_answer_is_printed(repository: Repository) -> None:
    result = repository.detect(GITHUB_OUTPUT="")
    assert (result.returncode, result.stdout) == (0, 'matrix={"include":[]}\nhas_tests=false\n')
    assert not repository.output.exists()


def test_each_file_that_does_not_say_what_it_needs_is_a_line(repository: Repository) -> None:
    repository.write("tests/test_bytes.py", b"NUM_GPUS = 1\n# \xff\n")
    repository.write("tests/test_none.py", "import os\n")
    repository.write("tests/test_syntax.py", "NUM_GPUS = 1\nif\n")
    repository.write("tests/test_\u00fc b.py", "NUM_GPUS = 1\n")
    repository.commit()
    result = repository.detect()
    assert (result.returncode, result.stdout) == (2, "")
    assert not repository.output.exists()
    lines = [line.removeprefix("detect_changed_tests.py: error: ") for line in result.stderr.splitlines()]
    starts = [
        "tests/test_bytes.py: not readable as Python ('utf-8' codec can't decode byte 0xff",
        "tests/test_none.py: has no NUM_GPUS; write at its top how many GPUs it needs, e.g. NUM_GPUS = 8, or 0 for",
        "tests/test_syntax.py: not readable as Python (invalid syntax (test_syntax.py, line 2)); mend it",
        "'tests/test_\u00fc b.py': a test file's name has letters, digits and ._- alone; rename it",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


@pytest.mark.parametrize("base", ["origin/main", "orphan"])
def test_a_base_that_git_cannot_compare_with_is_one_line(base: str, repository: Repository) -> None:
    repository.git("checkout", "-q", "--orphan", "orphan")
    repository.write("x", "x")
    repository.commit()
    repository.git("checkout", "-q", "work")
    result = repository.detect(base)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"detect_changed_tests.py: error: git cannot compare HEAD with '{base}' (fatal: ")
    assert line.endswith("; fetch it with its history, or give another --base")
    assert not repository.output.exists()


def test_outside_of_a_repository_it_is_one_line(repository: Repository, tmp_path: Path) -> None:
    result = repository.detect(below="..", GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("detect_changed_tests.py: error: fatal: not a git repository")
