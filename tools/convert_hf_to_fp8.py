"""Quantise a Hugging Face model to fp8 (e4m3) with one float32 scale a block, as SGLang serves it.

    python tools/convert_hf_to_fp8.py --model-dir MODEL --save-dir MODEL-FP8

The matrices of linear layers become values and NAME_scale_inv; norms, embeddings, output layers and routers stay as
they are. config.json gets the quantization_config that engines read. The output is written as .NAME.tmp and renamed
when it is whole. Memory: 0.25 GiB, and of every thread about eight times the largest matrix (in 16 bit).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.convert import fp8, running  # noqa: E402
from slime.options.flags.schema import positive  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory in 16 or 32 bit")
    parser.add_argument("--save-dir", type=Path, required=True, help="Hugging Face directory to write")
    parser.add_argument(
        "--block-size",
        type=positive,
        nargs=2,
        default=(128, 128),
        metavar=("ROWS", "COLUMNS"),
        help="of a matrix, that share a scale; default: 128 128, which is what engines have kernels for",
    )
    parser.add_argument(
        "--strategy", type=_strategy, metavar="block", help="upstream's flag: block, which is what is done without it"
    )
    running.add_output_flags(parser)
    return parser.parse_args(argv)


def _strategy(text: str) -> str:
    if text != "block":
        raise argparse.ArgumentTypeError(
            f"{text} is not available: scales are of blocks, which is what engines take pushed weights in; leave it "
            "out, and say how large by --block-size"
        )
    return text


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when the output is whole, 2 for bad input."""
    options = parse(argv)
    convert = partial(
        fp8.convert,
        options.model_dir,
        options.save_dir,
        block=tuple(options.block_size),
        shard_bytes=options.chunk_size,
        workers=options.workers,
        force=options.force,
    )
    return running.main("convert_hf_to_fp8.py", convert, options.save_dir)


if __name__ == "__main__":
    sys.exit(main())
