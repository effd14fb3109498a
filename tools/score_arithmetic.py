#!/usr/bin/env python3
"""Score a Hugging Face model on arithmetic problems with transformers alone: no engine, no trainer of ours.

python3 tools/score_arithmetic.py eval.jsonl MODEL_DIR prints one JSON line: model, accuracy, well_formed, problems.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

_BATCH = 128


@torch.no_grad()
def score(model_dir: Path, rows: list[dict[str, Any]], max_new_tokens: int) -> dict[str, float]:
    """Greedy answers to every row's ``prompt`` (chat messages), against its ``label`` (an integer).

    ``well_formed`` is the share of answers that are ``\\boxed{integer}`` and nothing else, then the end-of-turn token.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    right = well_formed = 0
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        prompts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        for row, tokens in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            if tokenizer.eos_token_id not in tokens:
                continue
            answer = tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)])
            if match := re.fullmatch(r"\\boxed\{(-?\d+)\}", answer):
                well_formed += 1
                right += int(match[1]) == int(row["label"])
    return {"accuracy": right / len(rows), "well_formed": well_formed / len(rows), "problems": len(rows)}


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)  # the model is tiny: threads only wait for one another
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSONL with prompt (chat messages) and label (integer)")
    parser.add_argument("model_dirs", type=Path, nargs="+", help="Hugging Face directories, scored in this order")
    parser.add_argument("--stop-at", type=float, default=2.0, help="stop after the first model of this accuracy")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    args = parser.parse_args()
    for path in (args.data, *args.model_dirs):
        if not path.exists():
            parser.error(f"{path} does not exist")
    transformers.logging.disable_progress_bar()
    with args.data.open("rb") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    for model_dir in args.model_dirs:
        result = score(model_dir, rows, args.max_new_tokens)
        print(json.dumps({"model": str(model_dir), **result}), flush=True)
        if result["accuracy"] >= args.stop_at:
            break


if __name__ == "__main__":
    main()
