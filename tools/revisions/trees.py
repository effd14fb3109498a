"""The two trees whose train.py is run: files of a commit, or of the working tree as they are now."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.quickstart import ROOT
from tools.validation.launches import Launcher

_RECORDER = Path(__file__).resolve().with_name("recorder") / "sitecustomize.py"
_GIT_S = 120
_PYTHON_S = 120


class CompareError(Exception):
    """Something could not be compared; the message says why."""


def commit_of(revision: str) -> str:
    """The full name of a commit.

    Raises:
        CompareError: there is none of this name.
    """
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", expected=(0, 1))
    if not found:
        raise CompareError(f"there is no revision {revision}")
    return found.strip()


def write_commit(commit: str, target: Path) -> None:
    """The files of a commit. Unlike a worktree it leaves nothing in the repository if this process is killed."""
    archive = target.with_suffix(".tar")
    _git("archive", "--output", str(archive), commit)
    with tarfile.open(archive) as file:
        file.extractall(target, filter="tar")
    archive.unlink()


def write_working_tree(target: Path) -> None:
    """A copy of the files that git tracks or would track: the original may change while runs are under way."""
    for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source = ROOT / name
        if name and source.is_file():  # no link to a directory, and no file that is deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def _git(*words: str, expected: Sequence[int] = (0,)) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=_GIT_S)
    except OSError as error:
        raise CompareError(f"git is needed: {error}") from error
    if ran.returncode not in expected:
        raise CompareError(f"git {words[0]}: {ran.stderr.strip() or f'status {ran.returncode}'}")
    return ran.stdout


@dataclass(frozen=True)
class Tree:
    """Files of a revision, and where its runs write.

    Attributes:
        side: ``base`` or ``head``.
        files: where train.py is.
        output: of its runs.
        limit_s: for one run.
    """

    side: str
    files: Path
    output: Path
    limit_s: float

    def check_import(self) -> None:
        """See that ``import slime`` takes this tree's, also where an installed one is another.

        Raises:
            CompareError: it does not.
        """
        command = [sys.executable, "-P", "-c", "import slime; print(slime.__file__)"]
        environment = self._environment([])
        ran = subprocess.run(
            command, env=environment, cwd=self.output, capture_output=True, text=True, timeout=_PYTHON_S
        )
        lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
        if ran.returncode or not Path(lines[-1]).resolve().is_relative_to(self.files.resolve()):
            raise CompareError(f"{self.side}: `import slime` is not that of {self.files}: {lines[-1]}")

    def train(self, directory: Path, flags: list[str], recorder: Path | None = None) -> None:
        """A run of this tree's train.py.

        Args:
            directory: of the run; its place beside `output` is its name.
            recorder: a directory for the run's generation requests.

        Raises:
            CompareError: it came to no good end.
        """
        first = []
        if recorder is not None:
            recorder.mkdir(parents=True)
            shutil.copy(_RECORDER, recorder)
            first = [recorder]
        launcher = Launcher(self.output.parent, self.limit_s, tree=self.files, environment=self._environment(first))
        run = launcher.train(str(directory.relative_to(self.output.parent)), flags)
        if not run.ok:
            raise CompareError(f"{run.name}: {run.why()}; see {run.log}")

    def _environment(self, first: list[Path]) -> dict[str, str]:
        """This process's, with the tree first on Python's path and no GPU: what is compared runs on CPU slots."""
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [*map(str, [*first, self.files]), *filter(None, others)]
        own = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        own["HF_HUB_OFFLINE"] = "1"
        return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
