"""Damaged data files: refused in lines that name file and row, and with --skip-bad-rows the good rows survive."""

from __future__ import annotations

import random
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from slime.data.rows.dataset import load_prompts, train_prompt_spec
from slime.utils.errors import BadInputError
from tests.unit.damaged_files import Damaged, damaged_files

NUM_GPUS = 0


def problem_of(case: Damaged, args: Namespace) -> str | None:
    """What is wrong with the outcome of one file; None where it is as it should be."""
    spec = train_prompt_spec(args)
    refused: list[str] = []
    try:
        labels = [str(sample.label) for sample in load_prompts(spec)]
    except BadInputError as error:
        refused = str(error).splitlines()
    if case.bad == []:
        return f"refused: {refused}" if refused else None if labels == case.kept else f"read as {labels}"
    if not refused:
        return f"not refused: {labels}"
    if any(not line.startswith("--prompt-data") or len(line) > 1000 for line in refused):
        return f"unclear: {refused}"
    if case.bad is None:
        return None if len(refused) == 1 and str(case.path) in refused[0] else f"refused by {refused}"
    named = [int(number) for line in refused for number in re.findall(r", (?:line|row) (\d+): ", line)]
    all_alike = len(case.bad) > 1 and refused[0].endswith(f" (the same in all {len(case.bad)} rows)")
    if named != case.bad[: 1 if all_alike else 5] or not all(str(case.path) in line for line in refused[: len(named)]):
        return f"blamed {named}: {refused}"
    args.skip_bad_rows = True
    try:
        dataset = load_prompts(train_prompt_spec(args))
    except BadInputError as error:
        return None if not case.kept and "no row is left" in str(error) else str(error)
    left = [str(sample.label) for sample in dataset]
    return None if (left, dataset.num_bad) == (case.kept, len(case.bad)) else f"left {left}, {dataset.num_bad} bad"


def test_damaged_files(rollout_args: Callable[..., Namespace], tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    found, kinds = [], set()
    for case in damaged_files(tmp_path, seed):
        kinds.add(case.kind)
        problem = problem_of(case, rollout_args(prompt_data=str(case.path), rm_type="math"))
        if problem is not None:
            found.append(f"{case.kind}: {problem:.600}")
    assert not found, f"seed {seed}:\n" + "\n".join(found)
    assert len(kinds) >= 90
