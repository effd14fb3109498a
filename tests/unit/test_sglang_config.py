"""``--sglang-config``: models, groups and slots, what is wrong with a file, and what short ways to write one mean."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.backends.sglang.engine import Engine
from slime.data import Sample
from slime.entry.arguments import describe, parse_args
from slime.files.model_directory import NO_WEIGHTS
from slime.fleet.layout import describe_models
from slime.fleet.placement import describe_placement
from slime.fleet.spec import EngineSpec, fleet_of
from slime.rollout.batches.metrics import speed_metrics
from slime.rollout.model_urls import get_model_url
from tests.command_line import Fails, Flags, Parse, command, refused, write_model

NUM_GPUS = 0
APART = "--rollout-num-gpus-per-engine 1 --sglang-config models.yaml"
ACTOR = {"name": "actor", "server_groups": [{"num_gpus": 1}]}
FROZEN = {"name": "frozen", "model_path": "other", "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory, with two models in it."""
    write_model(launch_directory / "other")
    return launch_directory


def write(content: Any) -> None:
    Path("models.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def parsed(models: list[dict[str, Any]], words: str = "", without: str = "--colocate") -> Namespace:
    write({"sglang": models})
    return parse_args(command(f"{APART} {words}", without))


def groups(*kinds: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"worker_type": kind, "num_gpus": count, "num_gpus_per_engine": size} for kind, count, size in kinds]


def kept(spec: EngineSpec) -> tuple[Any, ...]:
    return spec.model.name, spec.worker_type, list(spec.place), spec.width, spec.beside_trainers


def test_every_key_reaches_the_fleet(directory: Path) -> None:
    overrides = {"mem_fraction_static": 0.5, "disable-radix-cache": False}
    first = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 2, "overrides": overrides}
    actor = {"name": "policy", "model_path": "./model", "update_weights": True, "num_gpus_per_engine": 1}
    models = [
        actor | {"engine_groups": [first, {"worker_type": "placeholder", "num_gpus": 1}, {"num_gpus": 2}]},
        FROZEN,
    ]
    args = parsed(models, "--sglang-context-length 64 --sglang-disable-radix-cache --router-policy random")
    assert (args.rollout_num_gpus, args.num_engines) == (8, 4)
    speed = speed_metrics(args, [Sample(tokens=[1] * 13, response_length=12, loss_mask=[1] * 12)], 1.0)
    assert speed["perf/tokens_per_gpu_per_sec"] == 12 / 6, "of the slots that generate"
    assert pickle.loads(pickle.dumps(args)).sglang_models == args.sglang_models
    fleet = fleet_of(args)
    assert [kept(spec) for spec in fleet.engines] == [
        ("policy", "regular", [2, 3, 4, 5], 2, False),
        ("policy", "regular", [7, 8], 1, False),
        ("frozen", "regular", [9], 1, False),
    ]
    assert [model.checkpoint for model in fleet.models] == [f"{directory}/model", f"{directory}/other"]
    assert [model.trained for model in fleet.models] == [True, False]
    assert all(model.router_flags == ("--policy", "random") for model in fleet.models)
    common = ("--context-length", "64", "--disable-radix-cache")
    wanted = [("--context-length", "64", "--mem-fraction-static", "0.5"), common, common]
    assert [spec.sglang_flags for spec in fleet.engines] == wanted
    derived = yaml.safe_load(describe(args))["derived"]["sglang_models"]
    assert (derived[1]["name"], derived[1]["groups"][0]["sglang_cli"]) == ("frozen", list(common))


def test_weights_go_to_models_of_the_trained_checkpoint_unless_the_file_says_otherwise() -> None:
    same = {"name": "reference", "update_weights": False, "server_groups": [{"num_gpus": 1}]}
    other = FROZEN | {"name": "second", "update_weights": True}
    fleet = fleet_of(parsed([same, ACTOR, other]))
    assert [(model.name, model.trained, model.generates) for model in fleet.models] == [
        ("reference", False, False),
        ("actor", True, True),
        ("second", True, False),
    ]
    assert [model.called("engine") for model in fleet.models] == ["reference engine", "engine", "second engine"]


def test_groups_sleep_where_their_slots_are_trainers() -> None:
    """Two training ranks: of four engines of the first group two are beside them, the second group is apart."""
    models = [{"name": "actor", "server_groups": groups(("regular", 4, 1), ("regular", 2, 2))}]
    args = parsed(models, without="")
    assert args.engines_apart
    fleet = fleet_of(args)
    assert [kept(spec)[2:] for spec in fleet.engines] == [([0, 1], 1, True), ([2, 3], 1, False), ([4, 5], 2, False)]
    assert fleet.total == 6
    args.offload_rollout = True
    assert [spec.options(args).offload_rollout for spec in fleet.engines] == [True, False, False]
    lines = describe_placement(args).splitlines()[1:7]
    users = ["training rank 0, engine 0", "training rank 1, engine 1", "engine 2", "engine 3", "engine 4", "engine 4"]
    assert lines == [f"  slot {slot}: {user}" for slot, user in enumerate(users)]
    assert not parsed([ACTOR], without="").engines_apart


def test_a_frozen_model_beside_trainers_keeps_its_weights_while_it_sleeps(directory: Path) -> None:
    args = parsed([FROZEN, ACTOR], without="")
    args.offload_rollout = True
    frozen, actor = fleet_of(args).engines
    assert (frozen.beside_trainers, actor.beside_trainers) == (True, True)

    def flags(spec: EngineSpec) -> list[str]:
        return Engine(spec.options(args), 0, "127.0.0.1", None, directory / "log", ["0"])._command(1, 2)

    assert "--enable-weights-cpu-backup" in flags(frozen)
    assert "--enable-memory-saver" in flags(actor)
    assert "--enable-weights-cpu-backup" not in flags(actor)


def test_placeholders_keep_slots_empty() -> None:
    models = [
        {"name": "actor", "server_groups": groups(("placeholder", 1, 1), ("regular", 1, 1), ("placeholder", 2, 1))}
    ]
    args = parsed(models)
    fleet = fleet_of(args)
    assert (fleet.total, args.num_engines) == (6, 1)
    lines = describe_placement(args).splitlines()[3:7]
    assert lines == ["  slot 2: left empty", "  slot 3: engine 0", "  slot 4: left empty", "  slot 5: left empty"]


def test_the_reward_models_flags_write_one_more_entry() -> None:
    args = parsed([ACTOR], "--rm-model-path other --rm-num-gpus 2", without="")
    assert [kept(spec) for spec in fleet_of(args).engines] == [
        ("actor", "regular", [0], 1, True),
        ("reward", "regular", [2, 3], 1, False),
    ]


@pytest.mark.parametrize("colocated", [True, False])
def test_prefill_servers_are_a_short_way_to_write_two_groups(parse: Parse, directory: Path, colocated: bool) -> None:
    words = "--prefill-num-servers 1 --sglang-context-length 64"
    args = parse(words) if colocated else parse(f"{words} --rollout-num-gpus 3", "--colocate")
    fleet = fleet_of(args)
    first, count = (0, 1) if colocated else (2, 2)
    assert [kept(spec) for spec in fleet.engines] == [
        ("default", "prefill", [first], 1, colocated),
        ("default", "decode", list(range(first + 1, first + 1 + count)), 1, colocated),
    ]
    (model,) = fleet.models
    assert (model.trained, model.generates, model.prefills_apart) == (True, True, True)
    assert all(spec.sglang_flags == ("--context-length", "64") for spec in fleet.engines)
    prefill, decode = (
        Engine(spec.options(args), 0, "127.0.0.1", None, directory / "log", None) for spec in fleet.engines
    )
    prefill._bootstrap_port = 7
    line = " ".join(prefill._command(1, 2))
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 7" in line
    line = " ".join(decode._command(1, 2))
    assert "--disaggregation-mode decode" in line
    assert "bootstrap" not in line


def test_a_dry_run_shows_who_serves_what(directory: Path) -> None:
    models = [
        {"name": "policy", "server_groups": groups(("prefill", 2, 2), ("decode", 1, 1), ("decode", 2, 1))},
        FROZEN,
    ]
    table = describe_models(parsed(models, "--sglang-router-ip ::1 --sglang-router-port 7"))
    assert [re.split(r"  +", line.strip()) for line in table.splitlines()[1:]] == [
        ["model", "workers", "engines", "slots", "router", "weights"],
        ["policy", "prefill", "engine 0 of 2 slots", "2-3", "[::1]:7, which runs already", "pushed (distributed)"],
        ["policy", "decode", "engine 1", "4", "[::1]:7, which runs already", "pushed (distributed)"],
        ["policy", "decode", "engine 2-3", "5-6", "[::1]:7, which runs already", "pushed (distributed)"],
        ["frozen", "regular", "frozen engine 0", "7", "frozen router", f"as in {directory}/other"],
    ]
    mixed = describe_models(parsed([{"name": "actor", "server_groups": groups(("regular", 3, 1))}], without=""))
    assert [line.split()[-2:] for line in mixed.splitlines()[2:]] == [
        ["pushed", "(tensor)"],
        ["pushed", "(distributed)"],
    ]
    replayed = parsed([ACTOR], "--debug-train-only --load-debug-rollout-data x_{rollout_id}.pt")
    assert describe_models(replayed) == "models served: none"


def test_hooks_find_models_by_the_names_of_the_file() -> None:
    args = Namespace(sglang_router_ip="h", sglang_router_port=1)
    args.sglang_model_routers = {"policy": ("h", 1), "frozen": ("h", 2)}
    names = {"actor": 1, "default": 1, "policy": 1, "frozen": 2}
    assert {name: int(get_model_url(args, name, "").split(":")[-1]) for name in names} == names
    args.sglang_model_routers = {"default": ("h", 1)}
    assert get_model_url(args, "actor") == get_model_url(args, "default") == "http://h:1/generate"
    with pytest.raises(ValueError, match="no model 'frozen', served are: default, actor"):
        get_model_url(args, "frozen")


A_MODEL = "sglang: [{name: a, server_groups: %s}]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "while parsing a flow"),
        ("models: []", "there are no models in it: write `sglang:` and a list of them below"),
        ("sglang: {a: 1}", "there are no models in it"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}]}]\nsglnag: 1",
            "unknown key 'sglnag'; did you mean sglang?",
        ),
        ("sglang: [3]", "model 0: not a mapping of keys to values, but 3"),
        ("sglang: [{server_groups: [{num_gpus: 1}]}]", "model 0: its name must be letters, digits, dots, dashes"),
        ("sglang: [{name: a b, server_groups: [{num_gpus: 1}]}]", "underscores, not 'a b'"),
        ("sglang: [{name: a, model: x}]", "model 0: unknown key 'model'; did you mean model_path"),
        ("sglang: [{name: a}]", "a: server_groups is missing: a list of engines, such as [{num_gpus: 1}]"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1}], engine_groups: []}]", "two names of one key: give one"),
        ("sglang: [{name: a, update_weights: 1}]", "model 0: update_weights must be true or false, not 1"),
        (A_MODEL % "{num_gpus: 1}", "model 0: server_groups must be a list, not {'num_gpus': 1}"),
        (A_MODEL % "[{num_gpu: 1}]", "a: group 0: unknown key 'num_gpu'; did you mean num_gpus"),
        (A_MODEL % "[{num_gpus: 0}]", "a: group 0: num_gpus must be a whole number above 0, not 0"),
        (A_MODEL % "[{num_gpus: true}]", "a: group 0: num_gpus must be a whole number above 0, not True"),
        (A_MODEL % "[{worker_type: regular}]", "a: group 0 (regular): num_gpus is missing"),
        (
            A_MODEL % "[{num_gpus: 1}, {num_gpus: 1, worker_type: reglar}]",
            "a: group 1: worker_type 'reglar' must be one of",
        ),
        (A_MODEL % "[{num_gpus: 3, num_gpus_per_engine: 2}]", "num_gpus 3 is not a multiple of num_gpus_per_engine 2"),
        (A_MODEL % "[{num_gpus: 1, overrides: 3}]", "a: group 0: overrides must be a mapping of names, not 3"),
        (A_MODEL % "[{num_gpus: 1, worker_type: prefill}]", "a: there are prefill engines and none to decode"),
        (A_MODEL % "[{num_gpus: 1, worker_type: decode}]", "a: there are decode engines and none to prefill"),
        (
            A_MODEL % "[{num_gpus: 1}, {num_gpus: 1, worker_type: decode}]",
            "a: regular engines cannot serve a model beside prefill and decode",
        ),
        (A_MODEL % "[{num_gpus: 1, worker_type: placeholder}]", "a: all its groups are placeholders"),
        (
            A_MODEL % "[{num_gpus: 1, worker_type: placeholder, overrides: {x: 1}}]",
            "there is no engine that they are for",
        ),
        (
            A_MODEL % "[{num_gpus: 1, overrides: {mem_fraction_statik: 0.5}}]",
            "a: group 0 (regular): overrides: 'mem_fraction_statik' is not a flag of the installed SGLang, or one that "
            "slime decides; did you mean mem_fraction_static",
        ),
        (
            A_MODEL % "[{num_gpus: 1, overrides: {model_path: x}}]",
            "overrides: 'model_path' is not a flag of the installed",
        ),
        (A_MODEL % "[{num_gpus: 1, overrides: {tp_size: 2}}]", "overrides: 'tp_size' is not a flag of the installed"),
        (A_MODEL % "[{num_gpus: 1, overrides: {disaggregation_mode: prefill}}]", "'disaggregation_mode' is not a flag"),
        (
            A_MODEL % "[{num_gpus: 1, overrides: {mem_fraction_static: x}}]",
            "overrides: argument --sglang-mem-fraction-static: invalid value: 'x'",
        ),
        (A_MODEL % "[{num_gpus: 1, overrides: {dp_size: 2}}]", "overrides: dp-size 2 needs enable-dp-attention"),
        (
            A_MODEL % "[{num_gpus: 1, overrides: {context_length: 64}}]",
            "'context_length' must be the same for every engine that gets the trained weights: give --sglang-context",
        ),
        (
            A_MODEL.replace("a,", "actor, model_path: other,") % "[{num_gpus: 1}]",
            "no model in it gets the trained weights",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, model_path: x}, {num_gpus: 1, model_path: y}]}]",
            "a: one model has one model_path, not x and y",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(content: str, message: str, fails: Fails) -> None:
    write(content)
    line = fails(APART, "--colocate")
    assert line.startswith("--sglang-config models.yaml:") or "no model in it" in line
    assert message in line


def test_names_are_unique_and_those_of_the_generating_model_its_own(fails: Fails) -> None:
    write({"sglang": [ACTOR, ACTOR]})
    assert "two models are named 'actor'" in fails(APART, "--colocate")
    write({"sglang": [FROZEN | {"name": "default"}, ACTOR]})
    assert "default: the name is for the model that samples are generated by, which is 'actor'" in fails(
        APART, "--colocate"
    )
    write({"sglang": [ACTOR, FROZEN | {"name": "reward"}]})
    assert "reward: --rm-model-path names a model so too" in fails(f"{APART} --rm-model-path other --rm-num-gpus 1")


@refused(
    f"""
{APART} --rollout-num-gpus 3
    -> --rollout-num-gpus 3: the groups of --sglang-config models.yaml have 4 slots together: drop the flag, or
{APART} --num-gpus-per-node 2 -> actor: group 1 (regular): num_gpus_per_engine 3 is more than --num-gpus-per-node 2
{APART} -> actor: group 1 (regular): an engine on the slots 1 to 3 would be on trainers' slots in part: trainers
{APART} --prefill-num-servers 1 -> --sglang-config models.yaml and --prefill-num-servers 1 exclude each other
--sglang-config nowhere -> --sglang-config nowhere: there is no such file
--prefill-num-servers 2
    -> --prefill-num-servers 2 x --rollout-num-gpus-per-engine 1 = 2 slots leave none of 2 to decode on
--sglang-router-ip 10.0.0.1 -> --sglang-router-ip 10.0.0.1 needs --sglang-router-port
--sglang-router-port 7 -> --sglang-router-port 7 needs --sglang-router-ip
"""
)
def test_what_does_not_fit_the_run_is_one_line(flags: Flags, message: str, fails: Fails) -> None:
    write({"sglang": [{"name": "actor", "server_groups": groups(("regular", 1, 1), ("regular", 3, 3))}]})
    assert message in fails(*flags)


def test_a_model_without_weights(directory: Path, fails: Fails) -> None:
    (directory / "other" / "model.safetensors").unlink()
    write({"sglang": [ACTOR, FROZEN]})
    assert fails(APART, "--colocate").endswith(f"frozen: model_path {directory}/other: {NO_WEIGHTS}")
    assert NO_WEIGHTS in fails(APART, "--colocate --dry-run"), "files of this host are looked at"
    dummy = [{"num_gpus": 1, "overrides": {"load_format": "dummy"}}]
    assert fleet_of(parsed([ACTOR, FROZEN | {"server_groups": dummy}])).engines[1].sglang_flags[-1] == "dummy"
    write({"sglang": [ACTOR, FROZEN | {"model_path": "nowhere"}]})
    assert "frozen: model_path nowhere: there is no such directory" in fails(APART, "--colocate")


def test_without_trainers_no_model_need_be_trained() -> None:
    args = parsed([FROZEN], "--debug-rollout-only")
    (spec,) = fleet_of(args).engines
    assert (spec.model.generates, spec.model.trained, list(spec.place)) == (True, False, [0])
