"""What a command line can already tell: lengths that engines take, rewards and models that cannot be."""

from __future__ import annotations

import asyncio
import random
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.files.model_directory import _download, model_directory
from slime.grading.graders import GRADERS
from slime.options.checks.reward_rules import NEEDS_LABEL
from slime.options.errors import OptionError
from slime.options.rollout import DEFAULT_ROLLOUT
from slime.options.training import check_schedule
from slime.utils.errors import BadInputError
from tests.command_line import BASE, QWEN3, Fails, Flags, Parse, refused, write_model, write_rows

NUM_GPUS = 0

MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
EVAL = "--eval-interval 1 --eval-prompt-data aime.jsonl"
SFT = "--loss-type sft_loss --n-samples-per-prompt 1"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """Models, data and a hook beside each other, as the working directory."""
    write_model(launch_directory / "moe", MOE)
    write_rows(launch_directory / "aime.jsonl")
    (launch_directory / "own.py").write_text(
        "def generate_rollout(*a, **k): ...\nasync def custom_rm(args, sample, **k): ...\n"
        "class Source:\n    def __init__(self, args): ...\n"
    )
    return launch_directory


@pytest.mark.parametrize(
    ("words", "rollout", "evaluation"),
    [
        ("", 2042, 2042),
        ("--sglang-context-length 48", 42, 42),
        ("--sglang-context-length 4096 --rollout-max-context-len 5000", 2042, 2042),
        ("--rollout-max-context-len 40 --sglang-context-length 48 --eval-max-context-len 100", 40, 42),
        ("--rollout-max-context-len 512 --eval-max-context-len 1024", 512, 1024),
    ],
)
def test_contexts_are_what_the_engine_takes(parse: Parse, words: str, rollout: int, evaluation: int) -> None:
    args = parse(words)
    assert (args.rollout_max_context_len, args.eval_max_context_len) == (rollout, evaluation)
    assert (args.rollout_max_prompt_len, args.eval_max_prompt_len) == (rollout - 1, evaluation - 1)


def test_conversations_are_not_cut_but_their_evaluation_is(parse: Parse) -> None:
    args = parse(f"{SFT} {EVAL} --sglang-context-length 100")
    assert (args.rollout_max_context_len, args.rollout_max_prompt_len) == (None, None)
    assert (args.eval_max_context_len, args.eval_max_prompt_len) == (94, 93)


@refused(
    f"""
--rm-type f1 less --label-key -> --rm-type f1 compares responses with the expected answers: --label-key is
--rm-type boxed_math less --label-key -> --rm-type boxed_math compares responses with the expected
{SFT} {EVAL} less --label-key -> --rm-type math compares responses with the expected answers: --eval-label
--sglang-dp-size 2 -> --sglang-dp-size 2 needs --sglang-enable-dp-attention; copies of the whole model
--sglang-pipeline-parallel-size 2 -> --sglang-pp-size 2 cannot be used: an engine's slots (--rollout-num-gpus-per
--sglang-context-length 7 -> an engine's context of 7 tokens
--rm-type dapo -> --rm-type dapo answers with an object: --reward-key must be score or acc
--rm-type boxed_dapo --reward-key pred -> object: --reward-key must be score or acc, not pred
--rm-type dapo {SFT} {EVAL} -> --rm-type dapo answers with an object: --eval-reward-key must
--rm-type dapo {EVAL} --reward-key acc --eval-reward-key x -> must be score or acc, not x
{SFT} {EVAL} less --rm-type -> --eval-interval needs --rm-type or --custom-rm-path
--debug-train-only -> --debug-train-only starts no engine to generate with: give --load-debug-rollout
--rollout-top-p 1.5 -> argument --rollout-top-p: must be at most 1, not 1.5
--eval-top-p 1.01 {EVAL} -> argument --eval-top-p: must be at most 1, not 1.01
--rollout-top-k 0 -> --rollout-top-k 0 must be -1 (all) or at least 1
--eval-top-k 0 {EVAL} -> --eval-top-k 0 must be -1 (all) or at least 1
--eval-min-new-tokens 17 {EVAL} -> --eval-min-new-tokens 17 is more than --rollout-max-response-len 16
--fp8-format hybrid -> --fp8-format hybrid is not available yet
--rotary-interleaved -> --rotary-interleaved is True, config.json means False
--num-experts 4 -> --num-experts is 4, config.json means none
--multi-latent-attention -> --multi-latent-attention is True, config.json means False
--use-gated-attention -> --attention-output-gate is True, config.json means False
--mtp-num-layers 1 -> --mtp-num-layers is 1, config.json means none
--linear-attention-freq 2 -> --linear-attention-freq is 2, config.json means none
--rotary-seq-len-interpolation-factor 2 -> --rotary-seq-len-interpolation-factor is 2.0, config.json
--hf-checkpoint moe --moe-layer-freq 2 -> config.json means [0]*1+[1]*1+[0]*1+[1]*1
--hf-checkpoint moe --moe-layer-freq 0 -> --moe-layer-freq is 0, config.json means
--hf-checkpoint moe --moe-shared-expert-intermediate-size 8 -> intermediate-size is 8, config.json
"""
)
def test_one_line_with_status_2(directory: Path, fails: Fails, flags: Flags, message: str) -> None:
    assert message in fails(*flags)


def test_everything_that_is_missing_is_named_at_once(directory: Path, fails: Fails) -> None:
    line = fails("", " ".join(BASE))
    flags = re.findall(r"(--[a-z-]+)(?: or --[a-z-]+)? is missing", line)
    needed = ["--hf-checkpoint", "--rollout-num-gpus", "--prompt-data", "--num-rollout", "--rollout-batch-size"]
    assert flags == [*needed, "--rollout-max-response-len", "--rm-type"]
    assert line.startswith("--hf-checkpoint is missing; ")
    supervised = fails("--loss-type sft_loss --debug-train-only", " ".join(BASE))
    assert re.findall(r"(--[a-z-]+)(?: or --[a-z-]+)? is missing", supervised) == [needed[0], *needed[2:]]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--rm-type random",
        "--custom-rm-path own.py",
        "--custom-generate-function-path own.py:generate_rollout",
        "--data-source-path own.py:Source",
        f"{EVAL} --eval-label-key label --rollout-function-path own.py --eval-function-path {DEFAULT_ROLLOUT}",
        "--load-debug-rollout-data dump/{rollout_id}.pt",
    ],
)
def test_rewards_that_find_their_label_elsewhere(parse: Parse, words: str) -> None:
    assert parse(words, "--label-key" if words else "").label_key == (None if words else "label")


def test_rewards_that_compare_are_those_that_need_a_label() -> None:
    def needs_label(name: str) -> bool:
        try:
            asyncio.run(GRADERS[name](Namespace(rollout_seed=0, rm_url=None), Sample(response=""), ""))
        except BadInputError as error:
            return "needs a label" in str(error)
        return False

    assert {name for name in GRADERS if needs_label(name)} == set(NEEDS_LABEL)


def test_copies_of_an_engine_that_share_their_attention(parse: Parse) -> None:
    words = "--rollout-num-gpus-per-engine 2 --sglang-dp-size 2 --sglang-enable-dp-attention"
    assert parse(words).sglang_cli == ["--dp-size", "2", "--enable-dp-attention"]


@pytest.mark.parametrize(
    "words",
    [
        "--rm-type dapo --reward-key score",
        "--rm-type dapo --custom-rm-path own.py",
        "--rm-type dapo --rollout-function-path own.py",
        "--debug-train-only --rollout-function-path own.py",
        f"{SFT} --debug-train-only",
        f"{SFT} {EVAL} --eval-function-path own.py",
        "--rollout-top-p 1 --rollout-top-k 1",
        "--mtp-num-layers 0 --no-rotary-interleaved",
    ],
)
def test_what_is_well_given_passes(parse: Parse, words: str) -> None:
    parse(words, "--rm-type" if SFT in words else "")


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_interval_of_expert_layers_is_a_pattern(parse: Parse, directory: Path, every: int) -> None:
    """Megatron-LM: of every N layers the first has experts."""
    step, layers = (1, 4) if every == 1 else (every, 6)
    config = MOE | {"decoder_sparse_step": 1, "num_hidden_layers": layers}
    config["mlp_only_layers"] = [layer for layer in range(layers) if layer % step]
    write_model(directory / "moe", config)
    args = parse(f"--hf-checkpoint moe --moe-layer-freq {every}")
    assert args.moe_layer_freq == [int(layer % every == 0) for layer in range(layers)]


def test_a_schedule_that_only_counted_prompts_can_judge(parse: Parse) -> None:
    warmup = random.randrange(2, 20)
    args = parse(f"--num-epoch 1 --lr-warmup-iters {warmup} --num-steps-per-rollout 2", "--num-rollout")
    args.num_rollout = warmup // 2
    with pytest.raises(OptionError, match=f"would warm up for {warmup} optimizer steps of {warmup // 2 * 2}"):
        check_schedule(args)
    args.num_rollout += 1
    check_schedule(args)
    args.lr_decay_style, args.lr_wsd_decay_iters = "WSD", 3
    with pytest.raises(OptionError, match=r"--lr-wsd-decay-iters 3: there are [12] optimizer steps after the warm-up"):
        check_schedule(args)


@pytest.mark.parametrize("with_weights", [True, False])
def test_only_weights_that_someone_reads_are_downloaded(monkeypatch: pytest.MonkeyPatch, with_weights: bool) -> None:
    from fnmatch import fnmatch

    ignored: list[str] = []

    def download(hub_id: str, ignore_patterns: list[str]) -> str:
        ignored.extend(ignore_patterns)
        return "/cache"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _download("owner/model", with_weights, "--hf-checkpoint")
    files: dict[str, Any] = {
        "config.json": True,
        "tokenizer.model": True,
        "model-00001-of-00002.safetensors": with_weights,
        "pytorch_model.bin": False,
        "original/consolidated.00.pth": False,
        "model-Q4.gguf": False,
    }
    assert {name: not any(fnmatch(name, pattern) for pattern in ignored) for name in files} == files


@pytest.mark.parametrize(
    ("name", "hub"), [("Qwen3-4B", True), ("/root/Qwen3-4B", False), ("~/Qwen3-4B", False), ("./Qwen3-4B", False)]
)
def test_only_what_could_be_one_is_told_of_hub_ids(name: str, hub: bool) -> None:
    expected = f"--hf-checkpoint {name}: there is no such directory" + (", and a hub id is OWNER/MODEL" if hub else "")
    with pytest.raises(BadInputError) as error:
        model_directory(name, with_weights=False)
    assert str(error.value) == expected
