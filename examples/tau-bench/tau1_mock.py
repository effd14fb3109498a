"""Write tau-bench's tasks as rows that `generate_with_tau.py` takes, a file a split: DIR/ENV_SPLIT_tasks.jsonl.

Needs the package tau_bench, and no model: nobody is played.

    python3 examples/tau-bench/tau1_mock.py --local_dir outputs/tau-bench/data
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

try:
    from tau_bench.envs import get_env
except ModuleNotFoundError as error:
    raise SystemExit(
        f"tau1_mock.py: error: {error}; the package tau_bench is needed: examples/tau-bench/README.md says how"
    ) from None

from slime.files.storage import reported, write_text

SPLITS = ("train", "test", "dev")


def rows(env: str, split: str) -> list[dict[str, Any]]:
    """A row for each task of a split."""
    tasks = get_env(env_name=env, user_strategy="human", user_model="none", task_split=split).tasks
    return [
        {"index": index, "metadata": {"task_split": split, "task": task.model_dump()}}
        for index, task in enumerate(tasks)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", type=Path, required=True, help="directory to write; files are replaced")
    parser.add_argument("--env", default="retail", help="retail or airline")
    parser.add_argument("--splits", nargs="+", default=SPLITS, help="tau-bench's airline has only test")
    args = parser.parse_args()
    with reported("tau1_mock.py"):
        for split in args.splits:
            lines = "".join(json.dumps(row) + "\n" for row in rows(args.env, split))
            write_text("--local_dir", args.local_dir / f"{args.env}_{split}_tasks.jsonl", lines)


if __name__ == "__main__":
    main()
