"""Submit a job to the Ray whose job server RAY_ADDRESS names, as `ray job submit` does; scripts/launch.sh calls this.

RAY_ADDRESS=http://10.0.0.1:8265 python tools/submit_job.py -- python3 train.py ...

What the server answers instead of taking the job is one line, not a traceback, and files get no colours.
"""

from __future__ import annotations

import os
import sys

_NO_AGENT = "No available agent"
_HINT = (
    ": its dashboard agent, the last part of a Ray to start, is not there yet, or could not start; dashboard_agent.log "
    "among its logs says why, and where a port is taken `ray start --head --dashboard-agent-listen-port PORT` helps"
)


def main(argv: list[str] | None = None) -> None:
    """Ends the process, with status 0 where the job succeeded and 1 where it failed or was not taken."""
    from ray.scripts.scripts import cli

    colour = ["--log-color", "auto" if sys.stdout.isatty() else "false"]
    try:
        cli(["job", "submit", *colour, *(sys.argv[1:] if argv is None else argv)], prog_name="ray")
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-1].rstrip(".")  # of a traceback of the server's, what matters
        hint = _HINT if _NO_AGENT in why else ""
        sys.exit(f"launch: error: RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: the job server answered: {why}{hint}")


if __name__ == "__main__":
    main()
