"""The runs that are compared: tiny models on CPU slots, chosen so that most of what computes numbers takes part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_TINY = ("--num-layers", "2", "--hidden-size", "64", "--initializer-range", "0.1", "--seed", "1")
MODELS: dict[str, tuple[str, ...]] = {
    "dense": (*_TINY, "--intermediate-size", "96"),
    "experts": (*_TINY, "--arch", "qwen3_moe", "--intermediate-size", "32"),
}
"""Arguments of tools/make_tiny_model.py."""

ROLLOUTS = 3
_REWARD = Path(__file__).resolve().with_name("reward.py")
# Responses that end at one of many tokens have all lengths.
_STOP = [str(token) for token in range(0, 256, 16)]
# One request at a time: what an engine computes for a token may depend on how many others it has in the same batch.
_ONE_AT_A_TIME = "--sglang-enable-deterministic-inference --sglang-server-concurrency 1"
_COMMON = f"""
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --num-rollout {ROLLOUTS} --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16
    --num-steps-per-rollout 2 --use-dynamic-batch-size --max-tokens-per-gpu 96
    --rollout-stop-token-ids {" ".join(_STOP)}
    --lr 1e-3 --lr-decay-style constant --fp32 --seed 7
"""


@dataclass(frozen=True)
class Case:
    """One recorded rollout and the training on it.

    Attributes:
        model: a name of `MODELS`.
        training: flags of the training, on ``slots`` slots.
        reference: the training asks the model, as it was at the start, for log-probs.
        live: the rollouts are recorded in a run that trains, too, so that the later ones are of pushed weights.
    """

    model: str
    training: str
    slots: int
    reference: bool = False
    live: bool = False

    def flags(self, models: Path, data: Path) -> list[str]:
        """Those of the recording and the training."""
        model = str(models / self.model)
        files = ["--hf-checkpoint", model, "--prompt-data", str(data / "train.jsonl")]
        files += ["--ref-load", model] if self.reference else []
        return [*files, "--custom-rm-path", f"{_REWARD}:lower_half", *_COMMON.split(), *self.training.split()]

    def recording(self, files: Path) -> list[str]:
        """Further flags, of the run that writes ``files``/N.pt."""
        slots = f"--colocate --actor-num-gpus-per-node {self.slots}"
        how = slots if self.live else "--debug-rollout-only --rollout-num-gpus 1"
        return [*_ONE_AT_A_TIME.split(), *how.split(), "--save-debug-rollout-data", f"{files}/{{rollout_id}}.pt"]

    def replay(self, files: Path, export: Path) -> list[str]:
        """Further flags, of the run that trains on ``files``/N.pt and exports the weights after its last step."""
        how = f"--debug-train-only --actor-num-gpus-per-node {self.slots}"
        recorded = ["--load-debug-rollout-data", f"{files}/{{rollout_id}}.pt"]
        return [*how.split(), *recorded, "--save-hf", str(export)]


CASES = {
    "dense": Case(
        "dense",
        "--advantage-estimator grpo --eps-clip-high 0.28 --entropy-coef 0.01 --use-tis",
        slots=2,
    ),
    "experts": Case(
        "experts",
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 "
        "--tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        slots=2,
    ),
    "ppo": Case(
        "dense",
        "--advantage-estimator ppo --normalize-advantages --critic-lr 1e-3 --gamma 0.99 --lambd 0.95 "
        "--kl-coef 0.05 --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl",
        slots=1,
        reference=True,
        live=True,
    ),
}
"""By name: data parallelism; tensor, sequence and expert parallelism; a critic, a reference model and pushes."""
