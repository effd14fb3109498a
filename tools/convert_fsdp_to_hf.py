"""Convert an FSDP checkpoint, a torch.distributed.checkpoint directory with Hugging Face names, to Hugging Face.

    python tools/convert_fsdp_to_hf.py --input-dir CKPT/iter_0000100 --output-dir OUT --origin-hf-dir MODEL

Names may have a prefix, such as model_state.model.; optimizer state is passed over. The weights keep the type that they
were saved in. The output is written as .OUT.tmp and renamed when it is whole. Memory: 0.25 GiB, and of every thread
about three times the largest stored tensor.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.convert import dcp_to_hf, running  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="the checkpoint, iter_xxx or iter_xxx/model")
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face directory to write")
    parser.add_argument(
        "--origin-hf-dir", type=Path, required=True, help="the model that was trained: names, config, tokenizer"
    )
    running.add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when the output is whole, 2 for bad input."""
    options = parse(argv)
    convert = partial(
        dcp_to_hf.convert,
        options.input_dir,
        options.output_dir,
        options.origin_hf_dir,
        shard_bytes=options.chunk_size,
        workers=options.workers,
        force=options.force,
    )
    return running.main("convert_fsdp_to_hf.py", convert, options.output_dir)


if __name__ == "__main__":
    sys.exit(main())
