"""The workflows of GitHub: where they are, and the jobs that the template has."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from tests.ci.registry import Row, plan

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(".github/workflows")
PROGRAM = FOLDER / "generate_github_workflows.py"


def template_jobs() -> dict[str, dict[str, Any]]:
    """The table of jobs in the template."""
    jobs: dict[str, dict[str, Any]] = {}

    def keep(table: dict[str, dict[str, Any]], infinite: str) -> dict[str, list[Row]]:
        jobs.update(table)
        return plan(table, [], infinite)

    environment = runpy.run_path(str(ROOT / PROGRAM))["environment"]()
    environment.get_template("pr-test.yml.j2").render(plan=keep)
    return jobs


JOBS = template_jobs()
