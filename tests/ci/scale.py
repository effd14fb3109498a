"""At which scale a registered test runs, by SLIME_TEST_SCALE, and what it trains on there.

    full    the published model and data, on GPUs; the default
    random  the published model's shape with random weights, on GPUs: nothing is downloaded
    tiny    the same architecture in about a hundred thousand random weights, on CPU slots

Without published weights the data are arithmetic problems made here, and the reward is one that a model may earn whose
answers nobody can read. Models, data and runs are then in OUTPUT_DIR, by default outputs/ci.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import slime.utils.external_utils.command_utils as U
from slime.data import Sample
from slime.files import atomic_io
from slime.rollout.on_policy_distillation import reward_func as ask_the_teacher
from slime.utils.external_utils.metric_gate import Corridor, Seen

ROOT = Path(__file__).resolve().parents[2]
SCALES = ("full", "random", "tiny")
DATASET = "zhuzilin/gsm8k"
_VOCABULARY = 320
_TINY: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    # experts
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    # latent attention
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""What the config.json of a tiny model says in the place of what the published one says."""
_TINY_LATENT = {
    "num_key_value_heads": 4,
    # SGLang's server for CPUs has no plain rotary embedding of latent attention, as Moonlight's is.
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
}
_STEPS = "--num-steps-per-rollout 2 --use-dynamic-batch-size"
_SIZES = {
    "full": f"""
        --num-rollout 3 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024
        {_STEPS} --max-tokens-per-gpu 9216 --lr 1e-6
    """,
    "random": f"""
        --num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 256
        {_STEPS} --max-tokens-per-gpu 9216 --lr 1e-4
    """,
    "tiny": f"""
        --num-rollout 8 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 24
        {_STEPS} --max-tokens-per-gpu 4096 --lr 5e-3
    """,
}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DIFFERENCE = {"full": 0.05, "random": 0.1, "tiny": 1e-4}
"""How far engine and trainer may be apart for the same tokens and weights, in the mean."""


def scale() -> str:
    """The scale; one that is none ends the program."""
    value = os.environ.get("SLIME_TEST_SCALE") or "full"
    if value not in SCALES:
        refuse(f"SLIME_TEST_SCALE={value} must be one of {', '.join(SCALES)}")
    return value


def refuse(message: str) -> NoReturn:
    """End the test with a line on what it lacks."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True)
class Slots:
    """How many slots a test runs on."""

    num_gpus: int
    """Of a run with published weights."""
    least: int
    """GPUs that its layout needs: with random weights it takes what there is, a power of two."""
    tiny: int = 1
    """CPUs of a run with a tiny model."""

    def count(self) -> int:
        """Slots of this run; too few GPUs end the program."""
        if scale() == "tiny":
            return self.tiny
        visible, least = _visible_gpus(), self.num_gpus if scale() == "full" else self.least
        if visible < least:
            refuse(
                f"it needs {least} GPUs, and may use {visible} here; with SLIME_TEST_SCALE=tiny it runs on CPUs, and "
                f"with SLIME_TEST_SCALE=random on {self.least} GPUs"
            )
        return min(self.num_gpus, 1 << (visible.bit_length() - 1))


def _visible_gpus() -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([device for device in chosen.split(",") if device])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return 0
    return len(listed.splitlines())


def prepare(full_name: str, model_type: str, slots: Slots, *, weights: bool = False) -> None:
    """Have a model and problems: downloaded, or made here.

    Args:
        full_name: of the model on a hub, ORG/NAME.
        model_type: NAME of scripts/models/NAME.sh.
        slots: without which there is nothing to prepare for.
        weights: several runs start from the same weights: they are in files also where they are random.
    """
    slots.count()
    if os.environ.get("DRY_RUN", "0") != "0":
        refuse("DRY_RUN trains nothing, and a test asserts what was trained: unset it")
    if scale() == "full":
        U.downloadmodel_directory(full_name)
        U.hf_download_dataset(DATASET)
        return
    if scale() == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a host with GPUs, too
    model, weights = model_directory(full_name), weights or scale() == "tiny"
    if not (model / "config.json").exists() or (weights and not _has_weights(model)):
        with atomic_io.written_directory(model) as directory:
            _write_model(model_type, directory, weights)
    if not _problems().exists():
        tool = [sys.executable, str(ROOT / "tools" / "make_arithmetic_data.py"), str(_problems().parent)]
        U.exec_command(shlex.join([*tool, "--seed", "1"]))


def work_dir(test_file: str) -> Path:
    """A new directory for what a test's runs leave, which is printed."""
    path = _home() / Path(test_file).stem / U.create_run_id()
    path.mkdir(parents=True)
    print(f"{Path(test_file).name}, {scale()}: {path}", flush=True)
    return path


def run_flags(test_file: str, run_dir: Path) -> str:
    """Flags that say where a run writes and to whom it reports, and those that the test was given, which win."""
    own = ["--run-dir", str(run_dir), "--ci-test"]
    return f"{shlex.join(own)} {U.get_default_wandb_args(test_file)} {shlex.join(sys.argv[1:])}"


def model_flags(full_name: str) -> str:
    """Flags that say what is trained."""
    model = model_directory(full_name)
    words = ["--hf-checkpoint", str(model)]
    if scale() == "tiny":
        words.append("--fp32")
    if scale() == "random" and not _has_weights(model):
        words.append("--random-weights")
    return shlex.join(words)


def model_type(name: str) -> str | None:
    """The shape that `execute_train` hands on; None where config.json has another."""
    return None if scale() == "tiny" else name


def data_flags(reward: str | None = None) -> str:
    """Flags that say what prompts there are and who judges.

    Args:
        reward: a function of this file, at every scale; by default answers are judged where they can be read.
    """
    if scale() == "full":
        prompts, key = f"{U.datasets_dir()}/{DATASET.rpartition('/')[2]}/train.parquet", "messages"
    else:
        prompts, key, reward = str(_problems()), "prompt", reward or "lower_half"
    judge = ["--custom-rm-path", f"{Path(__file__).resolve()}:{reward}"] if reward else ["--rm-type", "math"]
    words = ["--prompt-data", prompts, "--input-key", key, "--label-key", "label", *judge]
    return shlex.join([*words, "--apply-chat-template", "--rollout-shuffle"])


def size_flags() -> str:
    """Flags that say how much is generated and how large steps are: two a rollout. Of two flags the last one wins."""
    return _SIZES[scale()]


def corridors(first: int = 0, *, difference: float | None = None, stale: bool = False) -> tuple[Corridor, ...]:
    """What every run of RL must show: it starts on policy, engine and trainer agree, it has gradients, and it learns.

    What three rollouts teach a published model is less than chance. There it must be right at times, which it is not
    unless template, data and grader fit together.

    Args:
        first: the first step that trains the actor.
        difference: in the place of `DIFFERENCE`.
        stale: later steps train on tokens of older weights, of which the log-probs are others.
    """
    reward = {
        "full": (Corridor("rollout/raw_reward", at_least=0.01),),
        "random": (Corridor("rollout/raw_reward", at_least=0.3, at_most=0.9),),
        "tiny": (Corridor("rollout/raw_reward", at_least=0.58, below=0.1),),
    }
    exact = 0.0 if scale() == "tiny" else 5e-4
    return (
        Corridor("train/ppo_kl", steps=(first,), at_least=-exact, at_most=exact),
        Corridor("train/ppo_kl", steps=(first + 1, -1), at_least=-0.5, at_most=0.5),
        Corridor(
            "train/train_rollout_logprob_abs_diff",
            steps=(first,) if stale else (first, -1),
            at_most=DIFFERENCE[scale()] if difference is None else difference,
        ),
        Corridor("train/grad_norm", steps=(first, -1), at_least=1e-6, at_most=1e3),
        *reward[scale()],
        STEP_TIME,
    )


STEP_TIME = Corridor("perf/step_time", above_ratio=0.5, timed=True)


def around(seen: Seen, share: float, least: float = 0.0) -> tuple[Corridor, ...]:
    """What a run must show that is to be like another: each metric as there, but for a share of it, or ``least``."""
    return tuple(
        Corridor(metric, (int(step),), at_least=value - away, at_most=value + away)
        for metric, steps in seen.values.items()
        for step, value in steps.items()
        for away in [max(share * abs(value), least)]
    )


async def lower_half(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward: the share of tokens whose id is in the lower half of the vocabulary, about 0.5 by chance."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < args.vocab_size / 2 for token in response) / max(1, len(response))


async def lower_half_beside_a_teacher(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The same of a sample that the teacher of ``--opd-type sglang`` has scored."""
    await ask_the_teacher(args, sample)
    return await lower_half(args, sample)


async def always_one(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward that teaches nothing."""
    return 1.0


def _has_weights(model: Path) -> bool:
    return any(model.glob("*.safetensors"))


def _home() -> Path:
    return Path(os.environ.get("OUTPUT_DIR") or ROOT / "outputs" / "ci").resolve() / scale()


def model_directory(full_name: str) -> Path:
    """Where `prepare` has put a model."""
    name = full_name.rpartition("/")[2]
    return Path(U.models_dir(), name) if scale() == "full" else _home() / "models" / name


def _problems() -> Path:
    return _home() / "data" / "train.jsonl"


def _write_model(model_type: str, directory: Path, weights: bool) -> None:
    """A config.json and a tokenizer of which every byte is a token, and weights if they are wanted."""
    from tools.make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer(_VOCABULARY)
    tokenizer.save_pretrained(directory)
    config = json.loads((ROOT / "tests" / "data" / "configs" / model_type / "config.json").read_text())
    if scale() == "tiny":
        latent = _TINY_LATENT if "kv_lora_rank" in config else {}
        config |= {name: value for name, value in (_TINY | latent).items() if name in config}
        config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config |= {"initializer_range": 0.1, "torch_dtype": "float32"}
        config.pop("bos_token_id", None)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if weights:
        _write_weights(directory)
        (directory / "config.json").write_text(json.dumps(config, indent=1))  # transformers writes one, too


def _write_weights(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from slime.models import hf_config
    from tests.parallel import heads

    config = hf_config(directory)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    # transformers makes the padding token's embedding 0, where a norm's gradient is a thousand times too large.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.initializer_range)
    model.save_pretrained(directory)
    if getattr(config, "num_nextn_predict_layers", 0):
        mtp = {heads.MIMO + name: tensor for name, tensor in heads.mimo_heads(config).state_dict().items()}
        file = directory / "model.safetensors"
        save_file(load_file(file) | mtp, file, metadata={"format": "pt"})
