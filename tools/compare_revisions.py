#!/usr/bin/env python3
"""Show that a change of the code changes no number: run two revisions on the same data, and compare to the bit.

    python3 tools/compare_revisions.py main
    python3 tools/compare_revisions.py HEAD~3 --head HEAD

Both revisions generate and record rollouts of tiny models on CPU slots, by real engines: prompts, requests, tokens,
log-probs, rewards and weight versions are compared. Then both train on what BASE recorded, from the same weights: every
metric of every step but times, and the weights after the last one. Ports, times, and ids by chance are left out.

Exit status: 0 all is equal, 1 something differs, 2 not all could be compared.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.files.storage import reported, writing  # noqa: E402
from slime.processes.signals import signals_as_exceptions  # noqa: E402
from tools.revisions import comparing  # noqa: E402
from tools.revisions.cases import CASES, MODELS, Case  # noqa: E402
from tools.revisions.comparing import Finding  # noqa: E402
from tools.revisions.trees import CompareError, Tree, commit_of, write_commit, write_working_tree  # noqa: E402


def compare(commits: Sequence[str | None], options: argparse.Namespace, work: Path) -> Iterator[tuple[str, Finding]]:
    """All findings, each with the name of its case.

    Args:
        commits: base and head; None is the working tree.

    Raises:
        CompareError: a revision without train.py, or a run that failed.
    """
    trees = [
        make_tree(side, commit, work, options.launch_timeout)
        for side, commit in zip(("base", "head"), commits, strict=True)
    ]
    models, data = make_inputs(work)
    for name in options.cases:
        for finding in findings(name, CASES[name], trees, models, data):
            yield name, finding


def make_tree(side: str, commit: str | None, work: Path, limit_s: float) -> Tree:
    """The files of a revision, in ``work``."""
    files, output = work / f"tree-{side}", work / side
    output.mkdir(parents=True)
    write_working_tree(files) if commit is None else write_commit(commit, files)
    shown = commit or "the working tree"
    if not (files / "train.py").is_file():
        raise CompareError(f"{side}, {shown}: there is no train.py in it")
    tree = Tree(side, files, output, limit_s)
    tree.check_import()
    print(f"{side}: {shown}", flush=True)
    return tree


def make_inputs(work: Path) -> tuple[Path, Path]:
    """Models and prompts, the same for both."""
    models, data = work / "models", work / "data"
    made = [("make_tiny_model", models / name, flags) for name, flags in MODELS.items()]
    for tool, target, flags in [*made, ("make_arithmetic_data", data, ("--seed", "1"))]:
        command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), str(target), *flags]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise CompareError(f"{tool}.py: {ran.stderr.strip()}")
    return models, data


def findings(name: str, case: Case, trees: Sequence[Tree], models: Path, data: Path) -> Iterator[Finding]:
    """Of one case: its recordings, and trainings on the first of them."""
    flags = case.flags(models, data)
    base, head = (tree.output / name for tree in trees)
    for tree in trees:
        directory = tree.output / name
        tree.train(
            directory / "recording",
            [*flags, *case.recording(directory / "rollouts")],
            recorder=directory / "requests",
        )
    yield from comparing.samples(base / "rollouts", head / "rollouts")
    yield comparing.requests(base / "requests", head / "requests")
    yield from _metrics("recording", base, head, needed=["rollout/raw_reward"])
    for tree in trees:
        directory = tree.output / name
        tree.train(directory / "training", [*flags, *case.replay(base / "rollouts", directory / "hf")])
    yield from _metrics("training", base, head, needed=["train/loss", "train/grad_norm"])
    yield comparing.weights(base / "hf", head / "hf")


def _metrics(run: str, base: Path, head: Path, needed: Sequence[str]) -> Iterator[Finding]:
    for finding in comparing.metrics(base / run, head / run, needed):
        yield Finding(f"{run}: {finding.quantity}", finding.difference)


@contextmanager
def removed_unless_kept(keep: Path | None) -> Iterator[Path]:
    """A directory for everything. One that nobody named is removed; after a failed run it stays, with the run's log."""
    if keep is not None:
        with writing("--keep", keep):
            keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    work = Path(tempfile.mkdtemp(prefix="compare-revisions-"))
    try:
        yield work
    except CompareError:
        raise
    except BaseException:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


def table(found: list[tuple[str, Finding]]) -> str:
    """A line each: case, quantity, and the first difference."""
    rows = [(case, finding.quantity, finding.difference or "equal") for case, finding in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"{case:<{widths[0]}}  {quantity:<{widths[1]}}  {how}" for case, quantity, how in rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a revision, as git names it: main, HEAD~3, a commit")
    parser.add_argument("--head", metavar="REV", help="another; default: the working tree, new files included")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="new directory for all that is written, which stays")
    parser.add_argument("--launch-timeout", type=float, default=900.0, help="seconds for one run; default: %(default)g")
    options = parser.parse_args(argv)
    options.cases = list(dict.fromkeys(options.cases))
    keep: Path | None = options.keep
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        parser.error(f"--keep {keep} is not an empty directory: name another, nothing was removed")
    return options


@signals_as_exceptions()
def main(argv: list[str] | None = None) -> int:
    """Exit status 1 at a difference."""
    options = parse(argv)
    program = Path(__file__).name
    found: list[tuple[str, Finding]] = []
    error = None
    try:
        commits = commit_of(options.base), None if options.head is None else commit_of(options.head)
        with reported(program), removed_unless_kept(options.keep) as work:
            for finding in compare(commits, options, work):
                found.append(finding)  # one by one: those before a run that fails are shown, too
    except CompareError as failure:
        error = failure
    if found:
        print(f"\n{table(found)}")
    if error is not None:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    different = sum(finding.difference is not None for _, finding in found)
    print(f"\n{len(found) - different} quantities are equal, {different} differ")
    if different and options.keep is None:
        print("--keep DIR keeps what the runs have written")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
