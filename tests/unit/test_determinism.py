"""Deterministic runs: what is refused, what trainers and engines are told, and by which kernels torch computes."""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from slime.agent.parsing import Call
from slime.agent.session import _as_openai
from slime.backends.sglang import engine as engine_module
from slime.fleet import train_group
from slime.options.checks.determinism import ATTENTION
from slime.processes.server_process import last_value
from slime.utils import device
from slime.utils.environment import DETERMINISTIC, deterministic_variables, kernels_of_any_shape
from tests.command_line import Fails, Parse, failure, write_model
from tests.fake_client import FakeClient, reply, rollout
from tests.unit.test_engine import make_engine

NUM_GPUS = 0
Args = Callable[..., Namespace]
MODE = "--deterministic-mode"
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


pytestmark = pytest.mark.usefixtures("launch_directory")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--sglang-attention-backend triton",
        f"--dynamic-sampling-filter-path {FILTER}",
        '--train-env-vars {"NCCL_ALGO":"Tree"}',
        "--rollout-external-engine-addrs 127.0.0.1:9",
        '--rm-model-path model --rm-num-gpus 1 --rm-sglang-args {"attention_backend":"fa3"}',
    ],
)
def test_what_goes_with_it(words: str, parse: Parse) -> None:
    assert parse(f"{MODE} {words}").sglang_enable_deterministic_inference


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--over-sampling-batch-size 8", "what is done first, and so is trained, is a matter of time"),
        ("--partial-rollout", "what is done first, and so is trained, is a matter of time"),
        ("--sglang-speculative-algorithm EAGLE", "drafts without a seed"),
        ("--sglang-enable-hierarchical-cache", "what a cache has of a prompt is a matter of time"),
        ("--sglang-enable-eplb", "experts move by how long"),
        ("--sglang-attention-backend flex_attention", "with --attention-backend flex_attention responses depend on"),
        ("--sglang-decode-attention-backend trtllm_mha", "with --decode-attention-backend trtllm_mha responses depend"),
        (
            '--rm-model-path model --rm-num-gpus 1 --rm-sglang-args {"attention_backend":"flex_attention"}',
            "--rm-sglang-args: with --attention-backend flex_attention responses depend on",
        ),
        (
            '--rm-model-path model --rm-num-gpus 1 --rm-sglang-args {"enable_hierarchical_cache":true}',
            "--rm-sglang-args: --deterministic-mode and --sglang-enable-hierarchical-cache do not go together",
        ),
        (
            '--train-env-vars {"CUBLAS_WORKSPACE_CONFIG":":0:0"}',
            "CUBLAS_WORKSPACE_CONFIG=:0:0 must be one of :4096:8, :16:8: unset it",
        ),
    ],
)
def test_what_does_not_is_one_line(words: str, why: str, fails: Fails, parse: Parse) -> None:
    """Without the mode each is taken, or refused for another reason."""
    told = fails(f"{MODE} {words}")
    assert MODE in told
    assert why in told
    if "speculative" not in words:
        parse(words)


def test_asynchronous_training_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = failure(capsys, f"{MODE} --rollout-num-gpus 1", "--colocate", asynchronous=True)
    assert f"{MODE} and train_async.py do not go together" in told


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"attention_backend": "flex_attention"}, "with --attention-backend flex_attention responses"),
        ({"enable_hierarchical_cache": True}, "--deterministic-mode and --sglang-enable-hierarchical-cache do not"),
        ({"enable_eplb": True}, "--deterministic-mode and --sglang-enable-eplb do not"),
        ({"speculative_algorithm": "EAGLE"}, "--deterministic-mode and --sglang-speculative-algorithm EAGLE do not"),
    ],
)
def test_engines_of_a_file_are_looked_at(
    overrides: dict[str, object], why: str, launch_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(launch_directory / "other")
    groups = [{"num_gpus": 1, "overrides": overrides}]
    other = {"name": "other", "model_path": "other", "server_groups": groups}
    models = [{"name": "actor", "server_groups": [{"num_gpus": 1}]}, other]
    Path("models.yaml").write_text(yaml.safe_dump({"sglang": models}))
    told = failure(capsys, f"{MODE} --sglang-config models.yaml", "--colocate")
    assert re.search(rf"models\.yaml.*other.*: {why}", told)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_variable_that_says_otherwise_is_refused(
    name: str, fails: Fails, parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in DETERMINISTIC[name]:
        monkeypatch.setenv(name, value)
        parse(MODE)
        assert deterministic_variables()[name] == value
    monkeypatch.setenv(name, "1")
    assert f"{MODE}: {name}=1 must be one of {DETERMINISTIC[name][0]}" in fails(MODE)
    parse("")


def test_trainers_have_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def stop(variables: dict[str, str]) -> None:
        given.append(variables)
        raise StopIteration

    monkeypatch.setattr(train_group, "actor_environment", stop)
    monkeypatch.setattr(train_group, "worker_options", lambda args: args)
    placement = Namespace(train=[Namespace(host="here")], interface=dict)
    for on in (True, False):
        args = Namespace(train_env_vars=None, true_on_policy_mode=False, deterministic_mode=on)
        with pytest.raises(StopIteration):
            train_group.TrainGroup(args, None).create(placement)  # type: ignore[arg-type]
    first = {name: values[0] for name, values in DETERMINISTIC.items()} | kernels_of_any_shape()
    assert given[0].items() >= first.items()
    assert not first.keys() & given[1].keys()


@pytest.mark.parametrize("is_intel", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_are_told(dtype: str, is_intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows depend on those beside them, one request is computed at a time, whatever the user's flags say."""
    monkeypatch.setattr(engine_module, "rows_alone_by_mkl", lambda: is_intel)
    engine = make_engine(tmp_path, "--max-running-requests", "8")
    engine._args.params_dtype = dtype
    plain = engine._command(1, 2)
    assert "--enable-deterministic-inference" not in plain
    assert "MKL_CBWR" not in engine._environment()
    engine._args.deterministic_mode = True
    told, environment = engine._command(1, 2), engine._environment()
    assert "--enable-deterministic-inference" in told
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment.items() >= kernels_of_any_shape().items()
    assert "--disable-radix-cache" in told
    assert "--disable-radix-cache" not in plain
    assert last_value(told, "--max-running-requests") == ("8" if dtype == "float32" and is_intel else "1")
    assert last_value(plain, "--max-running-requests") == "8"
    engine._cuda_devices = [0]
    on_gpu = engine._command(1, 2)
    assert {"--enable-deterministic-inference", "--disable-radix-cache"} <= set(on_gpu)
    assert last_value(on_gpu, "--max-running-requests") == "8"


def test_its_attention_is_the_installed_sglangs() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    places = [Path(spec.origin).with_name("srt") / place for place in ("server_args.py", "arg_groups/choices.py")]
    source = "".join(place.read_text() for place in places if place.exists())
    (listed,) = re.findall(r"^DETERMINISTIC_ATTENTION_BACKEND_CHOICES = \[(.*?)\]", source, re.S | re.M)
    of_gpus = [name for name in re.findall(r'"(\w+)"', listed) if name != "intel_xpu"]  # of later releases
    assert (*of_gpus, "torch_native") == ATTENTION


def test_torch_raises_where_it_has_no_such_kernel() -> None:
    """And does not only warn: torch's attention would then keep its other gradient."""
    try:
        device.compute_deterministically()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_ids_of_tool_calls_follow_from_the_turn() -> None:
    """Some chat templates render them, and so they are part of the next prompt."""
    call: Call = {"name": "ls", "input": {"path": "/"}}
    ids = [_as_openai(call, turn, number)["id"] for turn, number in (([1, 2], 0), ([1, 2], 1), ([1, 3], 0))]
    assert len(set(ids)) == 3
    assert _as_openai(call, [1, 2], 0)["id"] == ids[0]


@pytest.mark.parametrize("on", [True, False])
def test_a_request_that_was_computed_again_is_told_of(
    on: bool, make_args: Args, use: Callable[..., FakeClient], caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeClient(lambda number, ids, params: reply("abc", num_retractions=int(number < 4))))
    rollout(Namespace(**vars(make_args()) | {"deterministic_mode": on}))
    told = [message for message in caplog.messages if "no room in its cache" in message]
    assert ["for 1 requests" in told[0], "for 2 requests" in told[1]] == [True, True] if on else not told


def test_requests_have_seeds_in_either_mode_and_else_by_sglangs_flag(parse: Parse) -> None:
    assert not parse().sglang_enable_deterministic_inference
    assert parse("--true-on-policy-mode --actor-num-gpus-per-node 1").sglang_enable_deterministic_inference
