"""Convert a Hugging Face model to a torch_dist checkpoint, for --ref-load or --load of train.py.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint MODEL --save MODEL_torch_dist

Shape flags are compared with config.json and may be left out. The checkpoint fits every parallel layout: flags of one
are accepted and change nothing. Weights keep the types that they have. Nothing is computed and no GPU is used.
Memory: 0.3 GiB and about three times the largest parameter (the embedding, as a rule), whatever the model's size.
Under torchrun each rank writes its share:

    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save MODEL_torch_dist
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.convert import running  # noqa: E402
from slime.convert.arguments import parse_model_args  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when the checkpoint is whole, 2 for bad input."""
    args = parse_model_args(__doc__ or "", argv)

    def convert() -> None:
        from slime.backends.megatron import hf_to_torch_dist

        hf_to_torch_dist.check_target(Path(args.save), force=args.force)
        with hf_to_torch_dist.joined_ranks():
            hf_to_torch_dist.convert(args, Path(args.save))

    return running.main("convert_hf_to_torch_dist.py", convert, Path(args.save), several_ranks=True)


if __name__ == "__main__":
    sys.exit(main())
