"""GRPO of the quickstart by TRL, in an environment of its own that has no slime: `tools/compare_trl.py` runs this file.

The one argument is JSON, the fields of `Settings`. It prints a line of JSON a step, marked by `MARK`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

MARK = "trl-step "


@dataclass(frozen=True)
class Settings:
    """What both frameworks are given."""

    model: str
    data: str
    """JSONL with prompt (chat messages) and label (an integer)."""
    output: str
    steps: int
    responses: int
    """Of a step, each in the one micro-batch."""
    samples_per_prompt: int
    max_new_tokens: int
    lr: float
    warmup_steps: int
    eps_clip: float
    eps_clip_high: float
    betas: tuple[float, float]
    seed: int


def reward(completions: list[list[dict[str, str]]], label: list[str], **_: Any) -> list[float]:
    """1 where the last ``\\boxed{}`` of a completion has the label's integer, else 0."""
    found = [re.findall(r"\\boxed\{(-?\d+)\}", messages[-1]["content"]) for messages in completions]
    return [float(bool(boxed) and int(boxed[-1]) == int(right)) for boxed, right in zip(found, label, strict=True)]


def config_of(s: Settings) -> Any:
    """TRL's settings, for one batch a step."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=s.output,
        max_steps=s.steps,
        per_device_train_batch_size=s.responses,
        num_generations=s.samples_per_prompt,
        max_completion_length=s.max_new_tokens,
        learning_rate=s.lr,
        warmup_steps=s.warmup_steps,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        adam_beta1=s.betas[0],
        adam_beta2=s.betas[1],
        epsilon=s.eps_clip,
        epsilon_high=s.eps_clip_high,
        beta=0.0,
        seed=s.seed,
        use_cpu=True,
        bf16=False,
        # What TRL does by default, and what would cost it time that slime does not spend.
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    s = Settings(**json.loads(sys.argv[1]))
    with open(s.data) as lines:
        rows = [json.loads(line) for line in lines]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows])
    generating = [0.0]

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            generating[0] += time.perf_counter() - began
            return made

    class Told(TrainerCallback):
        """Tells of each step: seconds since the one before it ended, and what TRL logs."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" not in logs:
                return
            now = time.perf_counter()
            told = {"seconds": now - self.began, "generation": generating[0], "threads": torch.get_num_threads()}
            self.began, generating[0] = now, 0.0
            told |= {"reward": logs["reward"], "length": logs["completions/mean_length"]}
            print(MARK + json.dumps(told), flush=True)

    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32)
    Timed(model=model, reward_funcs=reward, args=config_of(s), train_dataset=dataset, callbacks=[Told()]).train()


if __name__ == "__main__":
    main()
