"""The reward model's flags, and the addresses of models that hooks ask for."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from slime.entry.arguments import describe
from slime.files.model_directory import NO_WEIGHTS
from slime.rollout.model_urls import get_model_url
from tests.command_line import Fails, Flags, Parse, refused, write_model

NUM_GPUS = 0
SERVED = "--rm-model-path judge --rm-num-gpus 2 --custom-rm-path judging.py"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> None:
    write_model(launch_directory / "judge")
    (launch_directory / "judging.py").write_text(
        "def reward_func(args, sample): return 1\ndef batched_custom_rm(args, samples): return [1]\n"
        "def other(args, row): return 1\n"
    )


def test_it_has_slots_and_flags_of_its_own(tmp_path: Path, parse: Parse) -> None:
    given = '{"context_length":64,"disable-radix-cache":true,"json_model_override_args":{"a":1}}'
    args = parse(f"{SERVED} --rm-sglang-args {given} --sglang-context-length 32")
    assert args.rm_num_gpus == 2
    assert args.rm_model_path == str(tmp_path / "judge")
    expected = ["--context-length", "64", "--disable-radix-cache", "--json-model-override-args", '{"a": 1}']
    assert args.rm_sglang_cli == expected
    assert args.sglang_cli == ["--context-length", "32"]
    assert args.sglang_context_length == 32
    assert yaml.safe_load(describe(args))["sglang"]["rm_sglang_cli"] == expected
    assert parse().rm_num_gpus == 0
    assert parse(f"{SERVED} --debug-train-only --load-debug-rollout-data x_{{rollout_id}}.pt").rm_num_gpus == 0


@refused(
    f"""
--rm-num-gpus 2 -> --rm-num-gpus 2 needs --rm-model-path
--rm-sglang-args {{"context_length":1}} -> --rm-sglang-args needs --rm-model-path
--rm-model-path judge -> --rm-num-gpus is missing: the engines of --rm-model-path have slots of their own
{SERVED} --rm-num-gpus-per-engine 3 -> --rm-num-gpus 2 is not a multiple of --rm-num-gpus-per-engine 3
{SERVED} --rm-num-gpus 16 --rm-num-gpus-per-engine 16
    -> --rm-num-gpus-per-engine 16 is more than --num-gpus-per-node 8: an engine of the reward model over
--rm-model-path nowhere --rm-num-gpus 1 -> --rm-model-path nowhere: there is no such directory
--rm-model-path o/m --rm-num-gpus 1 -> --rm-model-path o/m: no such directory, not in the Hugging Face cache
{SERVED} --rm-sglang-args {{"contxt_length":1}} -> 'contxt_length' is not a flag of the installed SGLang, or one
{SERVED} --rm-sglang-args {{"tp_size":2}} -> --rm-sglang-args: 'tp_size' is not a flag of the installed SGLang
{SERVED} --rm-sglang-args {{"server_concurrency":2}} -> 'server_concurrency' is not a flag
{SERVED} --rm-sglang-args {{"context_length":"x"}} -> --sglang-context-length: invalid value: 'x'
{SERVED} --rm-sglang-args {{"disable_radix_cache":3}} -> --rm-sglang-args: sglang_disable_radix_cache: 3 is
{SERVED} --rm-sglang-args {{"dp_size":2}}
    -> --rm-sglang-args: dp-size 2 needs enable-dp-attention; copies of the whole model are engines
{SERVED} --rm-sglang-args {{"pp-size":"2"}}
    -> --rm-sglang-args: pp-size 2 cannot be used: an engine's slots (--rollout-num-gpus-per-engine, a reward
    model's --rm-num-gpus-per-engine) are all tensor-par
--custom-rm-path judging.py:other -> judging.py:other: it is called as (args, sample, **kwargs) or as
"""
)
def test_what_cannot_be_is_one_line(flags: Flags, message: str, fails: Fails) -> None:
    assert message in fails(*flags)


def test_attention_that_is_split_by_data_takes_no_other_slots(parse: Parse) -> None:
    given = '{"dp_size":2,"enable_dp_attention":true,"pp_size":1}'
    args = parse(f"{SERVED} --rm-num-gpus-per-engine 2 --rm-sglang-args {given}")
    assert args.rm_sglang_cli == ["--dp-size", "2", "--enable-dp-attention", "--pp-size", "1"]


def test_a_model_without_weights_or_without_a_use(
    tmp_path: Path, parse: Parse, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    parse("--rm-model-path judge --rm-num-gpus 1")
    assert "--rm-model-path serves a model that only your own code asks" in capsys.readouterr().err
    (tmp_path / "judge" / "model.safetensors").unlink()
    assert fails(SERVED).endswith(NO_WEIGHTS)
    assert parse(f'{SERVED} --rm-sglang-args {{"load_format":"dummy"}}').rm_sglang_cli == ["--load-format", "dummy"]


def test_the_function_of_a_bare_file_depends_on_group_rm(tmp_path: Path, parse: Parse) -> None:
    assert parse("--custom-rm-path judging.py").custom_rm_path == f"{tmp_path}/judging.py:reward_func"
    assert parse("--custom-rm-path judging.py --group-rm").custom_rm_path == f"{tmp_path}/judging.py:batched_custom_rm"


def test_model_urls() -> None:
    args = Namespace(sglang_router_ip=None, sglang_router_port=None, sglang_model_routers={})
    with pytest.raises(ValueError, match="there is no model 'actor', served are: none yet"):
        get_model_url(args)
    args.sglang_router_ip, args.sglang_router_port = "10.0.0.1", 7
    assert get_model_url(args) == get_model_url(args, "default") == "http://10.0.0.1:7/generate"
    with pytest.raises(ValueError, match="no model 'reward', served are: actor; --rm-model-path and --rm-num-gpus"):
        get_model_url(args, "reward")
    args.sglang_model_routers = {"actor": ("10.0.0.1", 7), "reward": ("[::1]", 8)}
    assert get_model_url(args, "reward", "/v1/models") == "http://[::1]:8/v1/models"
    assert get_model_url(args, "actor", "/x") == "http://10.0.0.1:7/x"
