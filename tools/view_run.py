#!/usr/bin/env python3
"""See a run in a browser: curves, where each step's time goes, lanes of processes, memory, rewards, faults.

    python3 tools/view_run.py RUN_DIR
    python3 tools/view_run.py RUN_DIR --follow --compare OTHER_RUN

serves one page to this machine and prints its address, which has a token. It works on any machine that sees the run's
directory (--run-dir), and needs no more than Python; torch to read the rollouts that a run has saved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.viewing.run import RunSite
from tools.web.server import run_tool, serve


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, with metrics.jsonl in it")
    parser.add_argument("--follow", action="store_true", help="the run goes on: read what it adds")
    parser.add_argument("--compare", type=Path, metavar="OTHER_RUN", help="draw the curves of this run's directory too")
    parser.add_argument(
        "--rollouts",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="saved rollouts, or a directory of them; default: where the run's options say",
    )
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="the model, for tokens' text; default: the run's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C; 2 where something that was given cannot be used."""
    options = parse(argv)
    return run_tool("view_run.py", lambda: _serve(options))


def _serve(options: argparse.Namespace) -> None:
    site = RunSite(
        options.run_dir,
        other=options.compare,
        follow=options.follow,
        dumps=options.rollouts,
        checkpoint=options.hf_checkpoint,
    )
    serve(options.host, options.port, site, str(options.run_dir))


if __name__ == "__main__":
    sys.exit(main())
