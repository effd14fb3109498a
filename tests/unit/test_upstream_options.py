"""Command lines, YAML and attributes in the forms of the upstream system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Fails, Parse

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    return launch_directory


def test_flags_that_mean_nothing_here_are_taken_with_a_line(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(
        "--spec slime_plugins.models.glm4 get_glm_spec --data-pad-size-multiplier 128 --async-save "
        "--te-rng-tracker --lr 0.5"
    )
    assert args.lr == 0.5
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("warning: ")[2].partition(":")[0] for line in lines] == [
        "--spec is ignored",
        "--data-pad-size-multiplier is ignored",
        "--async-save is ignored",
        "--te-rng-tracker is ignored",
    ]


def test_what_is_done_anyway_is_taken_with_a_line(
    directory: Path, parse: Parse, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(
        "--qkv-format thd --megatron-to-hf-mode=raw --ddp-average-in-collective --get-mismatch-metrics "
        "--override-opt_param-scheduler --model-name qwen3 --recompute-loss-function --use-rollout-entropy "
        "--rollout-health-check-first-wait 30 --lr 0.5"
    )
    assert (args.lr, len(args.option_warnings)) == (0.5, 9)
    assert all(" is ignored: " in warning for warning in args.option_warnings)
    (directory / "thd.yaml").write_text("qkv_format: thd\nmegatron-to-hf-mode: raw\n")
    capsys.readouterr()
    assert parse("--custom-config-path thd.yaml").qkv_format == "thd"
    assert capsys.readouterr().err.count("otherwise it is ignored: ") == 2
    for flag, value, instead in (
        ("--qkv-format", "bshd", "without their padding; drop it, --use-dynamic-batch-size and --max-tokens-per-gpu"),
        ("--megatron-to-hf-mode", "bridge", "there is no bridge; drop it, --ref-load takes Hugging Face directories"),
    ):
        (directory / "other.yaml").write_text(f"{flag[2:]}: {value}\n")
        for words in (f"{flag} {value}", f"{flag}={value}", "--custom-config-path other.yaml"):
            line = fails(words)
            assert f"{flag} is not available: " in line
            assert instead in line


def test_yaml_entries_that_mean_nothing_here_are_told_of(
    directory: Path, parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "idle.yaml").write_text("async_save: true\ntrain-memory-margin-bytes: 5\nmine: 1\n")
    args = parse("--custom-config-path idle.yaml")
    assert (args.async_save, args.train_memory_margin_bytes) == (True, 5)
    async_save, margin = capsys.readouterr().err.splitlines()
    expected = "async_save is kept as an attribute of args; otherwise it is ignored: a checkpoint"
    assert expected in async_save
    assert "train_memory_margin_bytes is kept" in margin


def test_all_reasons_come_at_once(fails: Fails) -> None:
    words = "--release-train --megatron-config-path x --save-interval 3 --use-dynamic-batch-size"
    line = fails(f"{words} --tensor-model-parallel-size 3 --eps-clip-c 2 --advantage-estimator cispo")
    for part in (
        "--release-train",
        "--megatron-config-path",
        "--save-interval 3",
        "--use-dynamic-batch-size needs",
        "--eps-clip-c",
    ):
        assert line.count(part) == 1, part
    assert "is not a multiple of" not in fails("--rm-typ x --tensor-model-parallel-size 3"), (
        "a misspelt flag comes first"
    )


def test_null_in_yaml_means_unset(directory: Path, parse: Parse) -> None:
    (directory / "theirs.py").write_text("def f(args, **kwargs): ...")
    (directory / "mis.yaml").write_text("rs_lower_bound: null\nlr: null\nmine: null\ntis_mode: mask\n")
    args = parse("--use-tis --custom-tis-function-path theirs.py:f --custom-config-path mis.yaml")
    assert (args.rs_lower_bound, args.lr, args.mine, args.tis_mode) == (0.5, 1e-6, None, "mask")


def test_a_reward_is_not_demanded_where_own_code_may_give_it(directory: Path, parse: Parse) -> None:
    functions = (
        "async def generate(args, sample, sampling_params): ...",
        "def roll(args, rollout_id, data_source, evaluation=False): ...",
        "class Source:\n    def __init__(self, args): ...",
        "def sample_hook(args, sample, **others): ...",
    )
    (directory / "giving.py").write_text("\n".join(functions))
    evaluates = "--eval-interval 1 --eval-prompt-data e data.jsonl "
    for words in (
        evaluates + "--custom-generate-function-path giving.py:generate",
        "--rollout-function-path giving.py:roll",
        "--data-source-path giving.py:Source",
        evaluates + "--rollout-sample-hook-path giving.py",
    ):
        assert parse(words, "--rm-type").rm_type is None


@pytest.mark.parametrize("source", ["slime.rollout.data_source:RolloutDataSource", "slime.data.RolloutDataSource"])
def test_slimes_own_sources_give_none(fails: Fails, source: str) -> None:
    missing = fails(f"--data-source-path {source}", "--rm-type --prompt-data")
    assert missing == "--prompt-data is missing; --rm-type or --custom-rm-path is missing: responses need a reward"


def test_debug_flags_in_upstreams_forms(directory: Path, parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--save-debug-train-data t_{rollout_id}.pt --save-debug-rollout-data r.pt")
    assert args.save_debug_train_data == str(directory / "t_{rollout_id}_{rank}.pt")
    assert args.save_debug_rollout_data == str(directory / "r_{rollout_id}.pt")
    args = parse("--load-debug-rollout-data r_{rollout_id}.pt --eval-interval 2 --eval-prompt-data a data.jsonl")
    assert args.eval_interval is None
    assert "--load-debug-rollout-data starts no engine to evaluate" in capsys.readouterr().err


def test_args_has_every_attribute_of_upstream(parse: Parse) -> None:
    args = parse("--disable-rewards-normalization")
    assert (args.rewards_normalization, args.grpo_std_normalization, args.rollout_global_dataset) == (False, True, True)
    assert (args.compute_advantages_and_returns, args.wandb_random_suffix) == (True, True)
    assert (args.use_rollout_routing_replay, args.use_opd, args.opd_type, args.multimodal_keys) == (
        False,
        False,
        None,
        None,
    )
