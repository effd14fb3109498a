"""Convert a torch_dist checkpoint, as train.py saves them, to a Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py --input-dir CKPT/iter_0000100 --output-dir OUT --origin-hf-dir MODEL

The layout that the checkpoint was saved under does not matter. The weights keep the type that they were saved in. The
output is written as .OUT.tmp and renamed when it is whole. Memory: 0.25 GiB, and of every thread about three times the
largest thing it reads: a parameter, or the experts of one layer that one rank of a training run saved together.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.convert import running, torch_dist_to_hf  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input-dir", type=Path, required=True, help="iter_xxx, or the directory above, of which the latest is taken"
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face directory to write")
    parser.add_argument(
        "--origin-hf-dir", type=Path, required=True, help="where config, tokenizer and generation settings come from"
    )
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding to keep; default: as config.json says")
    parser.add_argument(
        "--add-missing-from-origin-hf", action="store_true", help="take tensors that the checkpoint lacks from there"
    )
    parser.add_argument("--model-name", help="upstream's flag, without effect: config.json says which model it is")
    running.add_output_flags(parser)
    options = parser.parse_args(argv)
    reason = "config.json of --origin-hf-dir says which model it is"
    running.without_effect(parser.prog, "--model-name", options.model_name, reason)
    return options


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when the output is whole, 2 for bad input."""
    options = parse(argv)
    convert = partial(
        torch_dist_to_hf.convert,
        options.input_dir,
        options.output_dir,
        options.origin_hf_dir,
        vocab_size=options.vocab_size,
        add_missing=options.add_missing_from_origin_hf,
        shard_bytes=options.chunk_size,
        workers=options.workers,
        force=options.force,
    )
    return running.main("convert_torch_dist_to_hf.py", convert, options.output_dir)


if __name__ == "__main__":
    sys.exit(main())
