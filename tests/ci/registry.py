"""What a test file says of itself at its top, read and never imported, and what CI's jobs run by it.

    NUM_GPUS = 8                         # GPUs that the file needs; 0: none
    LABELS = ("run-ci-megatron",)        # labels of a pull request that run it
    VARIANTS = ("", "SLIME_TEST_USE_FP8_ROLLOUT=1", "--async-save")

Each variant of a file with labels is a run of its own, "" the plain one, which is also the default. A word that begins
with SLIME_TEST_ is a variable of that run's environment, any other an argument of the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORD = re.compile(r"[\w.:=/,+-]+", re.ASCII)
_SWITCH = "SLIME_TEST_"
_INFINITE = "SLIME_TEST_ENABLE_INFINITE_RUN"
_READS_INFINITE = {_INFINITE, "get_env_enable_infinite_run"}

Row = dict[str, str | int]
"""One run in a job's matrix: its command (``run``, words without quotes) and ``num_gpus``."""


class RegistryError(Exception):
    """One line: which file is wrong, in what, and what to do."""


@dataclass(frozen=True)
class TestFile:
    """What a test file declares."""

    __test__ = False  # no class of tests, whatever its name tells pytest

    path: str
    """From the repository's root, with forward slashes."""
    num_gpus: int
    labels: tuple[str, ...]
    variants: tuple[str, ...]
    reads_infinite: bool
    """Whether it reads that a manual run is to go on without end."""

    def rows(self, infinite: str = "") -> Iterator[Row]:
        """One for each variant; ``infinite`` is what a file that reads whether to go on without end is told."""
        for variant in self.variants:
            words = variant.split()
            switches = [word for word in words if word.startswith(_SWITCH)]
            arguments = [word for word in words if not word.startswith(_SWITCH)]
            if infinite and self.reads_infinite:
                switches.append(f"{_INFINITE}={infinite}")
            command = ["env", *switches] if switches else []
            yield {"run": " ".join([*command, "python", self.path, *arguments]), "num_gpus": self.num_gpus}


def read(root: Path, path: str) -> TestFile:
    """What the file at ``path`` below ``root`` declares.

    Raises:
        RegistryError: it is not Python, lacks ``NUM_GPUS``, or declares something of another kind.
    """
    if not _WORD.fullmatch(path):
        raise RegistryError(f"{path!r}: a test file's name has letters, digits and ._- alone; rename it")
    try:
        tree = ast.parse((root / path).read_text(encoding="utf-8"), filename=path)
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: bytes that are no UTF-8, or a NUL
        raise RegistryError(f"{path}: not readable as Python ({error}); mend it") from None
    assigned = dict(_assignments(tree))
    count = _literal(path, "NUM_GPUS", assigned)
    if type(count) is not int or count < 0:
        said = "has no NUM_GPUS" if count is None else f"has NUM_GPUS = {count!r}"
        raise RegistryError(
            f"{path}: {said}; write at its top how many GPUs it needs, e.g. NUM_GPUS = 8, or 0 for none"
        )
    labels = _strings(path, "LABELS", assigned)
    variants = (_strings(path, "VARIANTS", assigned) if labels else ()) or ("",)
    used = set(_names_used(tree, without=assigned.get("VARIANTS")))
    _check_variants(path, variants, used)
    return TestFile(path, count, labels, variants, bool(_READS_INFINITE & used))


def read_all(root: Path) -> list[TestFile]:
    """What every ``test_*.py`` below ``root``/tests declares, by path.

    Raises:
        RegistryError: as of `read`, for the first such file.
    """
    return [read(root, file.relative_to(root).as_posix()) for file in sorted((root / "tests").rglob("test_*.py"))]


def plan(jobs: Mapping[str, Mapping[str, Any]], files: Sequence[TestFile], infinite: str) -> dict[str, list[Row]]:
    """Name of each job of the template that runs registered files -> the rows of its matrix.

    A job ``runs`` the files that have its ``label`` ("labelled"), or that have any ("all"); other jobs are left out.
    ``infinite`` is as of `TestFile.rows`.

    Raises:
        RegistryError: a label by which no job runs files, or a run that is registered and said to wait for a feature.
    """
    by_label = [job["label"] for job in jobs.values() if job["runs"] == "labelled"]
    for file in files:
        for label in (label for label in file.labels if label not in by_label):
            known = ", ".join(by_label)
            raise RegistryError(f"{file.path}: LABELS has {label!r}, by which no job runs files; take of {known}")
    rows: dict[str, list[Row]] = {}
    for name, job in jobs.items():
        own = [file for file in files if (job["label"] in file.labels if job["runs"] == "labelled" else file.labels)]
        if job["runs"] in ("labelled", "all"):
            rows[name] = [row for file in own for row in file.rows(infinite)]
        for waiting in job.get("waiting", ()):
            path, variant = waiting["test_file"], waiting.get("variant", "")
            if any(file.path == path and variant in file.variants for file in own):
                run = f"{path} {variant}".rstrip()
                raise RegistryError(
                    f"{run}: registered by the file for {job['label']}, and in the template waiting for "
                    f"{waiting['needs']}; take it out of one"
                )
    return rows


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _literal(path: str, name: str, assigned: Mapping[str, ast.expr]) -> Any:
    try:
        return ast.literal_eval(assigned[name]) if name in assigned else None
    except ValueError:
        raise RegistryError(
            f"{path}: {name} is computed, and this file is read, not run; write its value out"
        ) from None


def _strings(path: str, name: str, assigned: Mapping[str, ast.expr]) -> tuple[str, ...]:
    value = _literal(path, name, assigned) if name in assigned else ()
    are_strings = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if not are_strings or len(set(value)) < len(value):
        raise RegistryError(
            f'{path}: {name} = {value!r} is not a tuple of different strings; write ("a",) or ("a", "b")'
        )
    return value


def _names_used(tree: ast.Module, without: ast.expr | None) -> Iterator[str]:
    """Strings and names of a file, but not those inside ``without``."""
    skipped = set() if without is None else set(ast.walk(without))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _check_variants(path: str, variants: Sequence[str], used: set[str]) -> None:
    for word in (word for variant in variants for word in variant.split()):
        name, is_assignment, _ = word.partition("=")
        if not _WORD.fullmatch(word):
            raise RegistryError(f"{path}: VARIANTS has {word!r}; words are of letters, digits and .:=/,+-_ alone")
        if word.startswith(_SWITCH) and not is_assignment:
            raise RegistryError(f"{path}: VARIANTS has {word!r} without a value; write e.g. {word}=1")
        if word.startswith((_SWITCH, "-")) and name not in used:
            raise RegistryError(f"{path}: VARIANTS hands it {name}, which it does not read; drop that variant")
