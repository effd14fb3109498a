"""``--custom-config-path``: a YAML file beside the command line, and hooks whose own flags either may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import Fails, Parse, write_rows

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test: a model, data and a hook."""
    write_rows(launch_directory / "aime.jsonl")
    (launch_directory / "budget.py").write_text(
        "def add_arguments(parser):\n"
        "    parser.add_argument('--tool-budget', type=int, default=3)\n"
        "async def reward_func(args, sample, **kwargs):\n    return 1.0\n"
    )
    return launch_directory


def test_yaml_is_merged_before_derivation(parse: Parse, directory: Path, fails: Fails) -> None:
    settings = {
        "rollout_batch_size": 8,
        "lr": "3e-5",
        "colocate": False,
        "rollout-num-gpus": 2,
        "eval_prompt_data": ["aime", "aime.jsonl"],
        "eval_interval": 2,
        "train_env_vars": {"A": "1"},
        "sglang_mem_fraction_static": 0.5,
        "custom_rm_path": "budget.py:reward_func",
        "my_setting": {"deep": [1, 2]},
    }
    (directory / "c.yaml").write_text(yaml.safe_dump(settings))
    args = parse("--custom-config-path c.yaml --sglang-mem-fraction-static 0.9 --lr 1")
    assert (args.rollout_batch_size, args.global_batch_size, args.lr) == (8, 32, 3e-5)
    assert (args.placement, args.rollout_num_gpus) == ("disaggregate", 2)
    assert args.eval_datasets[0].name == "aime"
    assert args.train_env_vars == {"A": "1"}
    assert args.sglang_cli == ["--mem-fraction-static", "0.5"]
    assert args.tool_budget == 3
    assert args.my_setting == {"deep": [1, 2]}
    for content, expected in (
        (
            "rollout_batch_size: many",
            "--custom-config-path c.yaml: argument --rollout-batch-size: invalid int value: 'many'",
        ),
        ("use_stateless_adam: true", "--custom-config-path c.yaml: --use-stateless-adam is not available yet"),
        ("colocate: 3", "neither true nor false"),
        ("lr: high", "--custom-config-path c.yaml: argument --lr: invalid float value: 'high'"),
        ("lr: true", "--custom-config-path c.yaml: lr: --lr takes a value"),
        ("- 1", "not a mapping"),
        ("a: [", "--custom-config-path c.yaml: "),
    ):
        (directory / "c.yaml").write_text(content)
        assert expected in fails("--custom-config-path c.yaml")
    assert "--custom-config-path no.yaml" in fails("--custom-config-path no.yaml")


def write_settings(directory: Path, settings: dict[str, Any]) -> None:
    (directory / "c.yaml").write_text(yaml.safe_dump(settings))


def test_yaml_wins_flag_by_flag_of_an_engine_too(parse: Parse, directory: Path) -> None:
    words = "--custom-config-path c.yaml --sglang-enable-metrics --sglang-log-level info --sglang-disable-radix-cache"
    write_settings(directory, {"sglang_log_level": "debug", "sglang_disable_radix_cache": False})
    args = parse(words)
    assert args.sglang_cli == ["--enable-metrics", "--log-level", "debug"]
    assert not args.sglang_disable_radix_cache


def test_yaml_keys_that_no_flag_has(
    parse: Parse, directory: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(directory, {"rollout_bacth_size": 2, "judge_url": "http://j"})
    args = parse("--custom-config-path c.yaml")
    assert (args.rollout_bacth_size, args.judge_url) == (2, "http://j")
    kept = "rollout_bacth_size is kept as an attribute of args; did you mean --rollout-batch-size?"
    assert args.option_warnings == [f"--custom-config-path c.yaml: {kept}"]
    capsys.readouterr()
    write_settings(directory, {"sglang_trust_remote_code": True, "router_polcy": "random"})
    line = fails("--custom-config-path c.yaml")
    assert "--custom-config-path c.yaml: unknown flag --" in line
    assert "--sglang-trust-remote-code" in line
    assert "unknown flag --router-polcy; did you mean --router-policy?" in line


def test_what_a_hook_requires_may_come_from_the_command_line_or_yaml(
    parse: Parse, directory: Path, fails: Fails
) -> None:
    source = (directory / "budget.py").read_text()
    needs = source.replace("'--tool-budget', type=int, default=3", "'--tool-url', required=True")
    (directory / "needs.py").write_text(needs)
    assert parse("--custom-rm-path needs.py --tool-url http://x").tool_url == "http://x"
    write_settings(directory, {"tool_url": "http://y"})
    assert parse("--custom-rm-path needs.py --custom-config-path c.yaml").tool_url == "http://y"
    assert fails("--custom-rm-path needs.py").endswith("--tool-url is missing")


def test_every_hook_of_a_list_is_loaded(parse: Parse, directory: Path) -> None:
    for name in ("first", "second"):
        lines = (f"def add_arguments(parser):\n    parser.add_argument('--{name}')", "def f(args, sample): return None")
        (directory / f"{name}.py").write_text("\n".join(lines) + "\n")
    paths = [f"{directory}/{name}.py:f" for name in ("first", "second")]
    args = parse("--rollout-sample-hook-path first.py:f second.py:f --first 1 --second 2")
    assert (args.rollout_sample_hook_path, args.first, args.second) == (paths, "1", "2")
    for value in (["first.py:f", "second.py:f"], [["first.py:f"], ["second.py:f"]]):
        write_settings(directory, {"rollout_sample_hook_path": value})
        assert parse("--custom-config-path c.yaml --second 2").rollout_sample_hook_path == paths
