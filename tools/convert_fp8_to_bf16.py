"""Make a bfloat16 copy of a model that is published in float8 with a scale for each block (DeepSeek-R1, Kimi K2).

    python tools/convert_fp8_to_bf16.py --model-dir DeepSeek-R1 --save-dir DeepSeek-R1-bf16

Engines that are pushed the trainer's weights serve this one. The output is written as .NAME.tmp and renamed when it is
whole. Memory: 0.25 GiB, and of every thread about four times the largest matrix (in 16 bit).
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


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-dir", "--input-fp8-hf-path", type=Path, required=True, help="Hugging Face directory in float8"
    )
    parser.add_argument(
        "--save-dir", "--output-bf16-hf-path", type=Path, required=True, help="Hugging Face directory to write"
    )
    running.add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when the output is whole, 2 for bad input."""
    options = parse(argv)
    convert = partial(
        fp8.convert_to_bf16,
        options.model_dir,
        options.save_dir,
        shard_bytes=options.chunk_size,
        workers=options.workers,
        force=options.force,
    )
    return running.main("convert_fp8_to_bf16.py", convert, options.save_dir)


if __name__ == "__main__":
    sys.exit(main())
