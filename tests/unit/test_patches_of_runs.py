"""Which patches a run gets, told before it starts; how another release is refused, or allowed in every process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.backends.sglang.engine import Engine
from slime.backends.sglang.patches import ServerFacts
from slime.driver.preflight import patch_report
from slime.options.cluster import ClusterOptions
from slime.options.flags.schema import flag_named
from slime.ray.cluster import actor_environment
from slime.utils import device, patching
from slime.utils.environment import server_environment
from slime.utils.patching import ALLOW_FLAG, ALLOW_VARIABLE, Patch, UntestedVersionError, apply
from tests.command_line import LATENT, Parse, write_model

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "0")
    monkeypatch.setattr(patching, "_told", set())


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--sglang-ep-size 2 --rollout-num-gpus-per-engine 2",
        "--lora-rank 4 --lora-target-modules q_proj --lora-sync adapter",
        "--debug-rollout-only --sglang-lora-paths a=b",
        "--no-offload-rollout",
        "--offload-rollout --sglang-log-level info",
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.usefixtures("launch_directory")
def test_a_run_foretells_what_its_servers_get(
    words: str, cuda: bool, parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its options, what they find by their command line and environment."""
    monkeypatch.setattr(device, "is_cuda", lambda: cuda)
    args = parse(words)
    args.pushes_float8 = "ep-size" in words
    args.worker_type, args.keeps_weights, args.returns_routes = "regular", False, args.use_rollout_routing_replay
    foretold = ServerFacts.of_run(args)
    args.offload_rollout = args.offload_rollout is None or args.offload_rollout  # as of a colocated run on GPUs
    engine = Engine(args, 0, "127.0.0.1", None, "log", ["0"] if cuda else None)
    assert foretold == ServerFacts.of_command(engine._command(1, 2), engine._environment())


ROUTERS, RANKS, SERVERS, DRIVER = "router_policy", "optimizer_load", "keys_in_answers", "raylets_last_lines"


@pytest.mark.parametrize(
    ("words", "address", "expected"),
    [
        ("", "", {DRIVER, SERVERS, ROUTERS, RANKS, "rendezvous"}),
        ("", "10.0.0.1:6379", {SERVERS, ROUTERS, RANKS, "rendezvous"}),
        ("--debug-rollout-only", "", {DRIVER, SERVERS, ROUTERS, "rendezvous"}),
        ("--debug-train-only --rollout-function-path my.rollout", "", {DRIVER, RANKS, "rendezvous"}),
        (
            "--save new --save-interval 1",
            "",
            {DRIVER, SERVERS, ROUTERS, RANKS, "rendezvous", "save_results", "write_by_threads"},
        ),
        (
            "--trainer-snapshot-interval 1",
            "",
            {DRIVER, SERVERS, ROUTERS, RANKS, "rendezvous", "save_results", "write_by_threads"},
        ),
        (
            "--rollout-num-gpus-per-engine 2 --num-gpus-per-node 1",
            "",
            {DRIVER, SERVERS, ROUTERS, RANKS, "rendezvous", "schedulers_of_further_nodes"},
        ),
        (
            "--rm-model-path experts --rm-num-gpus 1 --custom-rm-path my.reward",
            "",
            {DRIVER, SERVERS, ROUTERS, RANKS, "rendezvous", "experts_in_turn"},
        ),
    ],
)
def test_what_a_run_gets(
    words: str, address: str, expected: set[str], launch_directory: Path, parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reward model may be of another kind."""
    (launch_directory / "my.py").write_text(
        "def rollout(*args, **kwargs): ...\nasync def reward(args, sample, **kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(str(launch_directory))
    write_model(launch_directory / "experts", LATENT)
    monkeypatch.setenv("RAY_ADDRESS", address)
    told = "\n".join(patch_report.lines(parse(words)))
    asked = {ROUTERS, RANKS, SERVERS, DRIVER, "rendezvous", "save_results", "experts_in_turn"}
    asked |= {"write_by_threads", "schedulers_of_further_nodes"}
    gone = {patch.name for table in patch_report.TABLES.values() for patch in table if patch.is_gone()}
    assert {name for name in asked if re.search(rf"\b{name}\b", told)} == expected - gone
    assert told.count("rendezvous") == 1


@pytest.fixture
def newer_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Patch.installed
    monkeypatch.setattr(Patch, "installed", lambda patch: "9.9" if patch.package == "ray" else installed(patch))


@pytest.mark.usefixtures("launch_directory", "newer_ray")
def test_a_run_with_another_release_is_refused_before_it_starts(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    args, warnings = parse(), list[str]()
    with pytest.raises(UntestedVersionError, match=r"^ray 9.9 is installed, and the patch sessions_of_rays_own "):
        patch_report.check(args, warnings.append)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    patch_report.check(args, warnings.append)
    assert warnings == []


@pytest.mark.usefixtures("launch_directory", "newer_ray")
def test_what_is_left_out_is_told_once_and_listed(parse: Parse, caplog: pytest.LogCaptureFixture) -> None:
    args, warnings = parse(ALLOW_FLAG), list[str]()
    patch_report.check(args, warnings.append)
    assert [re.findall(r"the patch (\w+) .* it is left out", line) for line in warnings] == [
        ["sessions_of_rays_own"],
        ["raylets_last_lines"],
    ]
    apply(patch_report.ray.PRINTING, True)  # as later in the same process
    assert caplog.messages == []
    (line,) = [line for line in patch_report.lines(args) if line.startswith("  ray")]
    driver = "the driver, where it starts a Ray of its own"
    assert line == f"  ray 9.9, {driver}: sessions_of_rays_own (left out), raylets_last_lines (left out)"


@pytest.mark.usefixtures("launch_directory")
def test_packages_of_other_hosts_are_no_concern_of_the_driver(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    args, installed = parse(), Patch.installed
    monkeypatch.setattr(Patch, "installed", lambda patch: None if patch.package == "sglang" else installed(patch))
    patch_report.check(args, pytest.fail)
    assert "  sglang (not on this host), the first process of a server: keys_in_answers" in patch_report.lines(args)


@pytest.mark.parametrize(
    ("words", "yaml", "allowed"),
    [
        ("", "", False),
        (ALLOW_FLAG, "", True),
        ("", "allow_untested_versions: true", True),
        ("", "allow-untested-versions: true", True),
        (ALLOW_FLAG, "allow_untested_versions: false", False),
    ],
)
def test_the_flag_reaches_every_process(
    words: str, yaml: str, allowed: bool, launch_directory: Path, parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors by Ray's runtime environment, so that of a Ray that was joined too; servers by their actor's."""
    monkeypatch.delenv(ALLOW_VARIABLE)
    (launch_directory / "more.yaml").write_text(yaml or "{}")
    args = parse(f"{words} --custom-config-path more.yaml")
    assert args.allow_untested_versions == allowed == (os.environ.get(patching.ALLOW_VARIABLE) == "1")
    assert (actor_environment()["env_vars"].get(ALLOW_VARIABLE) == "1") == allowed
    engine = Engine(args, 0, "127.0.0.1", None, "log", None)
    assert (engine._environment().get(ALLOW_VARIABLE) == "1") == allowed
    assert (server_environment().get(ALLOW_VARIABLE) == "1") == allowed  # what a router gets


def test_messages_name_the_flag_that_there_is() -> None:
    assert flag_named("allow_untested_versions") == ALLOW_FLAG
    assert ClusterOptions.__dataclass_fields__["allow_untested_versions"].default is False


def install(directory: Path, package: str, version: str) -> None:
    """Have a program that finds its packages in a directory first take another version for the installed one."""
    place = directory / f"{package.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(("allow", "status"), [("0", 1), pytest.param("1", 0, marks=pytest.mark.full)])
def test_each_process_of_a_server_looks_at_its_own_packages(allow: str, status: int, tmp_path: Path) -> None:
    """A server of a host with another SGLang ends with one line, or goes without the patches."""
    install(tmp_path, "sglang", "99")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", ALLOW_VARIABLE: allow, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "import slime.backends.sglang.launch"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == status
    first = ran.stderr.splitlines()[0]
    expected = "sglang 99 is installed, and the patch stand_ins (docs/patches.md) is for ==0.5.17 or ==0.5.23: "
    assert first.startswith(expected if status == 0 else f"error: {expected}install sglang==0.5.17 or ==0.5.23, ")
    assert status == 0 or len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(("allow", "status"), [("0", 2), pytest.param("1", 0, marks=pytest.mark.full)])
def test_a_program_without_the_flag_heeds_the_variable(
    allow: str, status: int, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A conversion takes no part in what gloo is mended for, and is refused all the same."""
    install(tmp_path, "torch", "99")
    own = {"PYTHONPATH": f"{ROOT}:{tmp_path}", ALLOW_VARIABLE: allow}
    command = [sys.executable, str(ROOT / "tools" / "convert_hf_to_torch_dist.py")]
    command += ["--hf-checkpoint", str(models("qwen3")), "--save", str(tmp_path / "converted")]
    ran = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300)
    assert ran.returncode == status, ran.stderr
    refused = "torch 99 is installed, and the patch uneven_parts (docs/patches.md) is for >=2.11.0,<=2.13.0: "
    (line,) = [line for line in ran.stderr.splitlines() if "torch 99 is installed" in line]
    if allow == "1":
        assert line == f"{refused}it is left out, as --allow-untested-versions says"
    else:
        assert line.startswith(f"convert_hf_to_torch_dist.py: error: {refused}install torch>=2.11.0,<=2.13.0, or do ")
    assert (tmp_path / "converted").exists() == (status == 0)
