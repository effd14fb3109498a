#!/usr/bin/env python3
"""Read rollouts in a browser: prompts, responses token by token, masks, log-probs, weight versions, rewards.

    python3 tools/view_samples.py outputs/run/rollout_data --hf-checkpoint MODEL_DIR

serves one page to this machine and prints its address. It takes files of --save-debug-rollout-data, a directory of
them, or the directory of --dump-details, of which it shows the trainer's log-probs beside the engine's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.files.model_directory import model_directory  # noqa: E402
from slime.rollout.tokenizer import load_tokenizer  # noqa: E402
from tools.samples.library import Library  # noqa: E402
from tools.web.server import run_tool, serve  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="saved rollouts, or a directory of them")
    parser.add_argument("--hf-checkpoint", help="the model's directory: its tokenizer gives the tokens' text")
    parser.add_argument(
        "--train-data", type=Path, nargs="+", default=[], metavar="PATH", help="the trainer's data of them"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    return parser.parse_args(argv)


def _tokenizer_directory(checkpoint: str) -> str:
    """A directory with a tokenizer, which needs no model's configuration; of a hub id the download's."""
    return checkpoint if Path(checkpoint).is_dir() else model_directory(checkpoint, with_weights=False)


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C; 2 where something that was given cannot be used."""
    options = parse(argv)
    return run_tool("view_samples.py", lambda: _serve(options))


def _serve(options: argparse.Namespace) -> None:
    tokenizer = options.hf_checkpoint and load_tokenizer(_tokenizer_directory(options.hf_checkpoint))
    library = Library(options.paths, options.train_data, lambda: tokenizer)
    names = list(library.files())
    library.rollout(names[-1])  # which the page opens first
    serve(options.host, options.port, library, f"{len(names)} rollout{'s' * (len(names) != 1)}")


if __name__ == "__main__":
    sys.exit(main())
