"""What CI reads of test files, and which of their runs go into which job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ci.registry import RegistryError, TestFile, plan, read

NUM_GPUS = 0
JOBS: dict[str, dict[str, Any]] = {
    "short": {"label": "run-ci-short", "runs": "labelled"},
    "ckpt": {
        "label": "run-ci-ckpt",
        "runs": "labelled",
        "waiting": [
            {"test_file": "tests/test_a.py", "variant": "--async-save", "needs": "--async-save"},
            {"test_file": "tests/test_b.py", "needs": "--use-opd"},
        ],
    },
    "image": {"label": "run-ci-image", "runs": "all"},
    "changed": {"label": "run-ci-changed", "runs": "changed"},
}


def declared(directory: Path, text: str) -> TestFile:
    (directory / "tests").mkdir(exist_ok=True)
    (directory / "tests" / "test_a.py").write_text(text)
    return read(directory, "tests/test_a.py")


def test_what_a_file_declares(tmp_path: Path) -> None:
    plain = declared(tmp_path, "import torch\nNUM_GPUS = 4\n")
    assert plain == TestFile("tests/test_a.py", 4, (), ("",), reads_infinite=False)
    assert list(plain.rows("1")) == [{"run": "python tests/test_a.py", "num_gpus": 4}]

    text = """
NUM_GPUS: int = 8
LABELS = ("run-ci-ckpt", "run-ci-megatron")
VARIANTS = ("", "--async-save --steps=3", "SLIME_TEST_A=1 --steps 3 SLIME_TEST_B=0")
parser.add_argument("--async-save"); parser.add_argument("--steps")
U.get_bool_env_var("SLIME_TEST_A"), os.environ["SLIME_TEST_B"]
"""
    file = declared(tmp_path, text)
    assert (file.num_gpus, file.labels) == (8, ("run-ci-ckpt", "run-ci-megatron"))
    commands = [
        "python tests/test_a.py",
        "python tests/test_a.py --async-save --steps=3",
        "env SLIME_TEST_A=1 SLIME_TEST_B=0 python tests/test_a.py --steps 3",
    ]
    assert list(file.rows("1")) == [{"run": command, "num_gpus": 8} for command in commands]


@pytest.mark.parametrize("reading", ["U.get_env_enable_infinite_run()", "os.environ['SLIME_TEST_ENABLE_INFINITE_RUN']"])
def test_only_a_file_that_reads_it_is_told_to_go_on_without_end(reading: str, tmp_path: Path) -> None:
    file = declared(tmp_path, f"NUM_GPUS = 1\n{reading}\n")
    command = "env SLIME_TEST_ENABLE_INFINITE_RUN=true python tests/test_a.py"
    assert [row["run"] for row in file.rows("true")] == [command]
    assert [row["run"] for row in file.rows()] == ["python tests/test_a.py"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\n", "has no NUM_GPUS; write at its top how many GPUs it needs, e.g. NUM_GPUS = 8, or 0 for none"),
        ("def f():\n    NUM_GPUS = 8\n", "has no NUM_GPUS"),
        ("NUM_GPUS = -1\n", "has NUM_GPUS = -1"),
        ("NUM_GPUS = True\n", "has NUM_GPUS = True"),
        ("NUM_GPUS = count()\n", "NUM_GPUS is computed, and this file is read, not run"),
        ("NUM_GPUS = 8\ndef f(:\n", "not readable as Python (invalid syntax (test_a.py, line 2)); mend it"),
        ("NUM_GPUS = 8\nLABELS = 'run-ci-short'\n", "LABELS = 'run-ci-short' is not a tuple of different strings"),
        ("NUM_GPUS = 8\nLABELS = ('a', 'a')\n", "is not a tuple of different strings"),
        ("NUM_GPUS = 8\nLABELS = ('a',)\nVARIANTS = ('--x',)\n", "VARIANTS hands it --x, which it does not read"),
        ("NUM_GPUS = 8\nLABELS = ('a',)\nVARIANTS = ('SLIME_TEST_X=1',)\n", "VARIANTS hands it SLIME_TEST_X, which"),
        (
            "NUM_GPUS = 8\nLABELS = ('a',)\nVARIANTS = ('SLIME_TEST_X',)\n",
            "VARIANTS has 'SLIME_TEST_X' without a value",
        ),
        ("NUM_GPUS = 8\nLABELS = ('a',)\nVARIANTS = ('$(id)',)\n", "VARIANTS has '$(id)'; words are of letters"),
    ],
)
def test_a_wrong_declaration_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=re.escape(said)) as error:
        declared(tmp_path, text)
    assert str(error.value).startswith("tests/test_a.py: ")
    assert "\n" not in str(error.value)


def test_a_file_without_labels_may_call_anything_variants(tmp_path: Path) -> None:
    assert declared(tmp_path, "NUM_GPUS = 0\nVARIANTS = make()\n").variants == ("",)


def test_a_name_that_would_be_several_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"^'tests/test_a b\.py': .*; rename it$"):
        read(tmp_path, "tests/test_a b.py")


def some(path: str, *labels: str, variants: tuple[str, ...] = ("",)) -> TestFile:
    return TestFile(f"tests/test_{path}.py", 8, labels, variants, reads_infinite=False)


def test_a_job_runs_the_files_of_its_label() -> None:
    files = [some("a", "run-ci-ckpt", variants=("", "--cpu")), some("b", "run-ci-ckpt", "run-ci-short"), some("c")]
    files[1:2] = [some("d", "run-ci-ckpt", "run-ci-short")]
    rows = {name: [str(row["run"]) for row in found] for name, found in plan(JOBS, files, "").items()}
    a, d = ["python tests/test_a.py", "python tests/test_a.py --cpu"], ["python tests/test_d.py"]
    assert rows == {"short": d, "ckpt": a + d, "image": a + d}


def test_an_unknown_label_names_file_and_label() -> None:
    for label in ("run-ci-shrt", "run-ci-image", "run-ci-changed"):  # the last two choose files by themselves
        said = f"tests/test_a.py: LABELS has '{label}', by which no job runs files; take of run-ci-short, run-ci-ckpt"
        with pytest.raises(RegistryError, match=f"^{re.escape(said)}$"):
            plan(JOBS, [some("a", label)], "")


def test_a_run_does_not_wait_and_run() -> None:
    assert plan(JOBS, [some("a", "run-ci-ckpt"), some("b", "run-ci-short")], "")
    said = (
        "tests/test_a.py --async-save: registered by the file for run-ci-ckpt, and in the template waiting for --async"
    )
    with pytest.raises(RegistryError, match=re.escape(said)):
        plan(JOBS, [some("a", "run-ci-ckpt", variants=("", "--async-save"))], "")
    with pytest.raises(RegistryError, match=r"^tests/test_b\.py: registered by .* waiting for --use-opd"):
        plan(JOBS, [some("b", "run-ci-ckpt")], "")
