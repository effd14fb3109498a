"""External engines: addresses, what servers say of themselves, whether they serve the run's model, and their place in a
fleet."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang.client import EngineError, HangError
from slime.backends.sglang.external import (
    KEY_VARIABLES,
    ExternalEngine,
    check_serves,
    discover_external_engines,
)
from slime.entry.arguments import parse_args
from slime.fleet.external import given_keys, is_elsewhere, with_external_engines
from slime.fleet.layout import describe_models
from slime.fleet.spec import Fleet, fleet_of
from slime.options.errors import OptionError
from slime.options.serving.external import normalize_external_engine_addr
from slime.ray.supervision import InputError
from tests.command_line import Fails, command
from tests.fake_servers import Servers

NUM_GPUS = 0
KEYS = ("generate-key-of-tests", "admin-key-of-tests")
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320, "dtype": "bfloat16"}
MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "is_generation": True}
INFO = {"tp_size": 2, "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998}
INFO |= {"dtype": "bfloat16", "max_req_input_len": 100, "version": "0.5.17", "model_path": "/elsewhere"}


@pytest.fixture
def server() -> Iterator[Servers]:
    made = Servers()
    made.answers["/server_info"] = 200, INFO
    yield made
    made.close()


@pytest.mark.parametrize(
    ("addr", "url"),
    [
        ("10.0.0.7:30000", "http://10.0.0.7:30000"),
        ("http://host-1.local:30000/", "http://host-1.local:30000"),
        ("[2001:db8::1]:30000", "http://[2001:db8::1]:30000"),
        ("http://[::1]:1", "http://[::1]:1"),
    ],
)
def test_an_address_is_a_host_and_a_port(addr: str, url: str) -> None:
    assert normalize_external_engine_addr(addr) == url
    assert normalize_external_engine_addr(url) == url


@pytest.mark.parametrize(
    "addr", ["10.0.0.7", ":30000", "host:", "host:70000", "host:x", "https://host:1", "2001:db8::1:30000", "host:1/v1"]
)
def test_anything_else_is_refused(addr: str) -> None:
    with pytest.raises(OptionError, match=r"must be HOST:PORT or http://HOST:PORT"):
        normalize_external_engine_addr(addr)


def test_the_command_line_has_them_beside_slots_or_alone(launch_directory: Path, fails: Fails) -> None:
    addrs = "--rollout-external-engine-addrs 10.0.0.7:30000 http://10.0.0.8:30000"
    alone = parse_args(command(addrs, "--colocate"))
    assert alone.external_engine_urls == ["http://10.0.0.7:30000", "http://10.0.0.8:30000"]
    assert (alone.rollout_num_gpus, alone.num_engines, alone.update_weight_transport) == (0, 2, "distributed")
    beside = parse_args(command(addrs))
    assert (beside.num_engines, beside.engines_apart) == (beside.actor_num_gpus + 2, True)
    rows = [line.split() for line in describe_models(beside).splitlines()]
    number = str(beside.actor_num_gpus)
    external = ["actor", "external", "at", "10.0.0.7:30000", "engine", number, "none", "router", "pushed"]
    assert [*external, "(distributed)"] in rows
    assert "10.0.0.7:30000 is named twice" in fails(f"{addrs} 10.0.0.7:30000")
    assert "exclude each other" in fails(f"{addrs} --prefill-num-servers 1")


@pytest.mark.parametrize("key", [None, KEYS[0]])
def test_a_server_says_what_it_is_and_sees_a_key_only_where_it_asks_for_one(server: Servers, key: str | None) -> None:
    server.key = key
    (info,) = discover_external_engines([server.url], KEYS)
    assert (info.url, info.host, info.port) == (server.url, *server.address)
    assert (info.num_gpus, info.worker_type, info.keyed) == (2, "regular", key is not None)
    assert info.disaggregation_bootstrap_port is None
    assert server.asked == [("/server_info", None), ("/server_info", f"Bearer {key}")][: 2 if key else 1]


@pytest.mark.parametrize(
    ("mode", "kind", "port"), [("prefill", "prefill", 8998), ("decode", "decode", None), ("null", "regular", None)]
)
def test_a_prefill_server_has_a_bootstrap_port(server: Servers, mode: str, kind: str, port: int | None) -> None:
    server.answers["/get_server_info"] = 200, INFO | {"disaggregation_mode": mode, "num_gpus": 4}
    del server.answers["/server_info"]  # of an older release
    (info,) = discover_external_engines([server.url], None)
    assert (info.worker_type, info.disaggregation_bootstrap_port, info.num_gpus) == (kind, port, 4)


@pytest.mark.parametrize(
    ("keys", "answer", "message"),
    [
        (
            None,
            (401, {}),
            "asks for a key: give the driver its keys in variables SLIME_API_KEY and SLIME_ADMIN_API_KEY",
        ),
        (KEYS, (401, {}), "refuses that of the driver's variables"),
        (KEYS, (500, {"error": KEYS[0]}), r"status 500: .*\*\*\*"),
        (None, (200, {"version": "x"}), "not that of an SGLang server: KeyError"),
        (None, (200, [1]), "not that of an SGLang server"),
        (None, (200, INFO | {"encoder_only": True}), "does not generate"),
        (None, (200, INFO | {"disaggregation_mode": "other"}), "does not generate"),
    ],
)
def test_what_is_no_engine_is_told_in_one_line(
    server: Servers, keys: tuple[str, str] | None, answer: tuple[int, Any], message: str
) -> None:
    server.answers["/server_info"] = answer
    with pytest.raises(EngineError, match=f"the server at {server.url}.*{message}") as e:
        discover_external_engines([server.url], keys)
    assert len(str(e.value).splitlines()) == 1
    assert KEYS[0] not in str(e.value)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"the server at http://127\.0\.0\.1:9: GET /server_info: .*refused"):
        discover_external_engines(["http://127.0.0.1:9"], None)


def run_args(directory: Path, **changes: Any) -> Namespace:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    values: dict[str, Any] = {"hf_checkpoint": str(directory), "params_dtype": "bfloat16", "pushes_float8": False}
    values["deterministic_mode"] = False
    values |= {"rollout_max_context_len": 100, "eval_max_context_len": None, "lora_sync": "merged"}
    values["use_rollout_routing_replay"] = False
    return Namespace(**values | {"update_weight_transport": "distributed", "pushes_heads": False} | changes)


@pytest.mark.parametrize(
    ("told", "model", "vocabulary", "changes", "message"),
    [
        ({}, {}, 320, {}, None),
        ({}, {}, None, {}, None),
        ({"dtype": "auto"}, {}, 320, {}, None),
        (
            {},
            {"architectures": ["LlamaForCausalLM"]},
            320,
            {},
            "architectures LlamaForCausalLM instead of Qwen3ForCausalLM",
        ),
        ({}, {"model_type": "llama"}, 320, {}, "model_type llama instead of qwen3"),
        ({}, {"is_generation": False}, 320, {}, "does not generate"),
        ({}, {}, 512, {}, "a vocabulary of 512 tokens instead of 320"),
        ({"dtype": "half"}, {}, 320, {}, "dtype half instead of bfloat16: start it with --dtype bfloat16"),
        ({"dtype": "auto"}, {}, 320, {"params_dtype": "float32"}, "dtype bfloat16 instead of float32"),
        ({"max_req_input_len": 99}, {}, 320, {}, "99 tokens together, and the run's have up to 100"),
        ({"pp_size": 2}, {}, 320, {}, "use --update-weight-transport disk"),
        ({"pp_size": 2}, {}, 320, {"update_weight_transport": "disk"}, None),
        ({"dp_size": 2}, {}, 320, {}, "use --update-weight-transport disk"),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, 320, {}, None),
        ({"quantization": "fp8"}, {}, 320, {}, "quantization fp8 instead of none"),
        ({"speculative_algorithm": "EAGLE"}, {}, 320, {}, "speculative_algorithm EAGLE instead of none"),
        ({}, {}, 320, {"pushes_float8": True}, "takes by disk only"),
        ({}, {}, 320, {"lora_sync": "adapter"}, "start it with --enable-lora"),
        ({"enable_lora": True}, {}, 320, {"lora_sync": "adapter"}, None),
        ({"enable_deterministic_inference": True}, {}, 320, {"deterministic_mode": True}, "--disable-radix-cache"),
        ({"disable_radix_cache": True}, {}, 320, {"deterministic_mode": True}, "start it with --enable-deterministic"),
        (
            {"enable_deterministic_inference": True, "disable_radix_cache": True},
            {},
            320,
            {"deterministic_mode": True},
            None,
        ),
        ({"model_path": "other"}, {}, 320, {}, "hidden_size 128 instead of 64"),
    ],
)
def test_a_server_must_serve_the_runs_model(
    server: Servers,
    tmp_path: Path,
    told: dict[str, Any],
    model: dict[str, Any],
    vocabulary: int | None,
    changes: dict[str, Any],
    message: str | None,
) -> None:
    args = run_args(tmp_path, **changes)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    if told.get("model_path") == "other":
        told = told | {"model_path": str(tmp_path / "other")}
    server.answers["/server_info"] = 200, INFO | told
    (info,) = discover_external_engines([server.url], None)
    if message is None:
        check_serves(info, MODEL | model, vocabulary, args)
        return
    with pytest.raises(EngineError, match="does not serve this run's model: ") as raised:
        check_serves(info, MODEL | model, vocabulary, args)
    assert message in str(raised.value)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_config_is_no_other_hosts(server: Servers, tmp_path: Path, content: str) -> None:
    """Of another host's model nothing is known; one that is here and cannot be read is told."""
    args, damaged = run_args(tmp_path), tmp_path / "other" / "config.json"
    server.answers["/server_info"] = 200, INFO | {"model_path": str(damaged.parent)}
    (info,) = discover_external_engines([server.url], None)
    check_serves(info, MODEL, 320, args)
    damaged.parent.mkdir()
    damaged.write_text(content)
    with pytest.raises(EngineError, match=rf"{damaged} is damaged: "):
        check_serves(info, MODEL, 320, args)


def started(server: Servers, tmp_path: Path, vocabulary: int = 320) -> ExternalEngine:
    limits = {"rollout_health_check_timeout": 5.0, "rollout_health_check_interval": 60.0}
    args = run_args(tmp_path, **limits)
    refused = f"token_ids_logprob contains out-of-vocabulary token id 9; valid range is [0, {vocabulary})."
    server.answers |= {"/model_info": (200, MODEL | {"weight_version": "default"}), "/generate": (400, refused)}
    server.answers["/continue_generation"] = 200, {}
    engine = ExternalEngine(args, server.url, "engine 3", None)
    engine.start()
    return engine


def test_it_is_checked_before_it_joins(server: Servers, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a vocabulary of 512 tokens instead of 320"):
        started(server, tmp_path, vocabulary=512)
    started(server, tmp_path)
    assert [path for path, _ in server.posted[-2:]] == ["/continue_generation", "/generate"]
    asked = server.posted[-1][1]
    assert asked["input_ids"] == [0], "a prompt beyond the vocabulary would end the server"


def test_it_is_lost_when_it_does_not_answer_or_was_started_again(server: Servers, tmp_path: Path) -> None:
    engine = started(server, tmp_path)
    engine.listen()
    for version in ("default", "3", "4"):
        server.answers["/model_info"] = 200, MODEL | {"weight_version": version}
        engine.examine("a test")
    server.answers["/model_info"] = 200, MODEL | {"weight_version": "default"}
    with pytest.raises(EngineError, match=r"engine 3 at \S+ is lost: it has weights of version 'default' after 4"):
        engine.examine("a test")
    other = started(server, tmp_path)
    other.listen()
    server.close()
    with pytest.raises(EngineError, match=r"engine 3 at \S+ is lost: .*(refused|reset)") as lost:
        other.examine("a test")
    assert not isinstance(lost.value, HangError), "it may as well have ended: nobody here can tell"
    for each in (engine, other):
        each.stop()


def fleet_at(*urls: str) -> Fleet:
    return fleet_of(parse_args(command(f"--rollout-external-engine-addrs {' '.join(urls)}", "--colocate")))


def test_their_entries_have_the_ranks_that_they_say_and_no_slots(
    server: Servers, launch_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = with_external_engines(fleet_at(server.url), None)
    (spec,) = fleet.external
    assert (spec.width, spec.slots, list(spec.place), spec.worker_type, spec.keyed) == (2, 0, [], "regular", False)
    assert fleet.total == fleet.trainers
    assert not is_elsewhere(spec)
    assert f"external engine at {server.url}: SGLang 0.5.17, regular, ranks: 2" in capsys.readouterr().out


def test_a_run_does_not_start_without_one_that_it_names(launch_directory: Path) -> None:
    with pytest.raises(InputError, match=r"^--rollout-external-engine-addrs: the server at http://127\.0\.0\.1:9: GET"):
        with_external_engines(fleet_at("http://127.0.0.1:9"), None)


def test_prefill_and_decode_servers_make_a_split_model(launch_directory: Path) -> None:
    made = [Servers(), Servers()]
    try:
        fleet = fleet_at(*(each.url for each in made))
        for each, mode in zip(made, ("prefill", "decode"), strict=True):
            each.answers["/server_info"] = 200, INFO | {"disaggregation_mode": mode}
        assert [model.prefills_apart for model in with_external_engines(fleet, None).models] == [True]
        made[1].answers["/server_info"] = 200, INFO
        with pytest.raises(InputError, match="regular engines cannot serve a model beside prefill and decode"):
            with_external_engines(fleet, None)
        made[1].answers["/server_info"] = made[0].answers["/server_info"]
        with pytest.raises(InputError, match="prefill and decode go together"):
            with_external_engines(fleet, None)
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((), None),
        (KEYS, KEYS),
        ((KEYS[0], ""), "SLIME_ADMIN_API_KEY: must be at least 16"),
        (("short", KEYS[1]), "SLIME_API_KEY: must be at least 16"),
        (("-" + KEYS[0], KEYS[1]), "SLIME_API_KEY: must be .* not beginning with a dash"),
    ],
)
def test_keys_of_the_operator(monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...], found: Any) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(KEY_VARIABLES, values, strict=False):
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            given_keys(Namespace(no_api_keys=False))
    else:
        assert given_keys(Namespace(no_api_keys=False)) == found
    assert given_keys(Namespace(no_api_keys=True)) is None
