"""Patches to released packages: whose they are, when they are carried out, what becomes of them in other releases."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slime.backends.megatron.patches import RankFacts
from slime.backends.sglang.patches import CPU_STAND_INS, EVERY_PROCESS, SERVER_PROCESS, ServerFacts
from slime.driver.preflight import patch_report
from slime.processes.server_process import EQUAL_BITS_VARIABLE, SAME_KERNELS_VARIABLE
from slime.utils import device, patching
from slime.utils.patching import ALLOW_VARIABLE, Patch, UntestedVersionError, apply, within
from slime.utils.stores import RENDEZVOUS
from tests.command_line import LATENT, QWEN3

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
EVERY = [patch for table in patch_report.TABLES.values() for patch in table]


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "0")
    monkeypatch.setattr(patching, "_told", set())


def record(done: list[str], name: str = "a_fix", versions: str = "==0.0.1") -> Patch[int]:
    """A patch of pytest's, wanted where the facts are a number above 0."""
    carry_out = partial(done.append, name)
    return Patch(name, "pytest", versions, "here", "Soon.", carry_out, lambda facts: facts > 0)


def test_every_patch_has_a_name_of_its_own_and_says_all() -> None:
    assert [name for name, count in Counter(patch.name for patch in EVERY).items() if count > 1] == []
    assert [patch.name for patch in EVERY if not re.fullmatch(r"[a-z0-9_]{1,30}", patch.name)] == []
    texts = [(patch.name, text) for patch in EVERY for text in (patch.what, patch.goes)]
    assert [name for name, text in texts if not text.endswith(".") or "|" in text] == []
    assert RENDEZVOUS in EVERY


_NOT_SEEN = {"cache_scales", "one_pass_sampling", "roundings_of_trainers", "sleep_together"}
"""Of GPUs alone, on which the new column has not been run."""


@pytest.mark.parametrize(
    "file",
    sorted((ROOT / "requirements").rglob("constraints-*.txt")),
    ids=lambda file: "-".join(file.parts[-2:]),
)
def test_patches_are_for_the_pinned_versions(file: Path) -> None:
    """A pin that is raised without a look at the patches fails here."""
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", file.read_text(), re.MULTILINE))
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patching, "version_of", versions.__getitem__)
        neither = {patch.name for patch in EVERY if patch.is_tested() == patch.is_gone()}
        assert neither == (_NOT_SEEN if file.parent.name == "new" else set())


@pytest.mark.parametrize(
    ("versions", "installed", "tested"),
    [
        ("==2.11.0", "2.11.0+cu129", True),
        ("==2.11.0", "2.11.1", False),
        (f"==2.11.0{patching.OR}==2.13.0", "2.13.0+cpu", True),
        (f"==2.11.0{patching.OR}==2.13.0", "2.12.0", False),
        (RENDEZVOUS.versions, "2.11.0+cu129", True),
        (RENDEZVOUS.versions, "2.13.0+cpu", True),
        (RENDEZVOUS.versions, "2.12.0.dev20260101", True),
        (RENDEZVOUS.versions, "2.10.9", False),
        (RENDEZVOUS.versions, "2.11.0a0+nv26.02", False),
        (RENDEZVOUS.versions, "2.14.0", False),
    ],
)
def test_builds_count_as_their_release(
    versions: str, installed: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "version_of", lambda package: installed)
    assert record([], versions=versions).is_tested() == tested


def test_patches_are_carried_out_in_order_where_they_are_wanted() -> None:
    done: list[str] = []
    ours = f"=={pytest.__version__}"
    apply([record(done, "one", ours), record(done, "two", ours)], 1)
    assert done == ["one", "two"]
    apply([record(done, "three", ours), record(done, "another release's")], 0)
    assert done == ["one", "two"]


def test_another_release_is_refused_in_one_line() -> None:
    done: list[str] = []
    with pytest.raises(UntestedVersionError) as raised:
        apply([record(done)], 1)
    assert str(raised.value) == (
        f"pytest {pytest.__version__} is installed, and the patch a_fix (docs/patches.md) is for ==0.0.1: install "
        "pytest==0.0.1, or do without the patch by --allow-untested-versions (SLIME_ALLOW_UNTESTED_VERSIONS=1 for "
        "programs without that flag)"
    )
    assert done == []


def test_a_package_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patch, "installed", lambda patch: None)
    with pytest.raises(UntestedVersionError, match=r"^no version of pytest is known, and the patch a_fix "):
        apply([record([])], 1)


def test_patches_of_another_release_are_left_out_with_one_warning_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    for _ in range(2):
        apply([record(done), record(done, "good", f"=={pytest.__version__}"), record(done, "other")], 1)
    assert done == ["good", "good"]
    assert caplog.messages == [
        f"pytest {pytest.__version__} is installed, and the patch {name} (docs/patches.md) is for ==0.0.1: it is left "
        "out, as --allow-untested-versions says"
        for name in ("a_fix", "other")
    ]


def test_a_release_that_needs_a_patch_no_more_gets_nothing_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    gone = replace(record(done), gone=f"==0.0.2{patching.OR}=={pytest.__version__}")
    apply([gone, record(done, "good", f"==0.0.3{patching.OR}=={pytest.__version__}")], 1)
    assert (done, caplog.messages) == (["good"], [])


@pytest.mark.parametrize(("tested", "facts", "expected"), [(True, 1, ["in", "out"]), (True, 0, []), (False, 1, [])])
def test_a_patch_may_last_for_a_block(
    tested: bool, facts: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def scoped() -> Iterator[None]:
        done.append("in")
        yield
        done.append("out")

    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    versions = f"=={pytest.__version__}" if tested else "==0.0.1"
    patch: Patch[int] = Patch("a_fix", "pytest", versions, "here", "Soon.", scoped, lambda facts: facts > 0)
    with within(patch, facts):
        assert done == expected[:1]
    assert done == expected


CPU, ALL = (
    {
        *("stand_ins", "nothing_to_synchronize", "sampling_seeds", "memory_files", "forked_processes", "no_nccl"),
    },
    {"rendezvous", "keys_in_answers", "beating_schedulers", "noted_loads", "no_megatron"},
)


@pytest.mark.parametrize(
    ("flags", "config", "float8", "on_cpu", "everywhere"),
    [
        ([], QWEN3, False, set(), set()),
        (["--enable-lora"], QWEN3, False, {"nothing_to_pin"}, {"unloaded_adapters"}),
        (["--lora-paths", "a=b"], QWEN3, False, {"nothing_to_pin"}, set()),
        (["--ep", "2"], QWEN3, False, {"absent_experts"}, set()),
        ([], LATENT, False, {"latent_attention"}, {"experts_in_turn"}),
        ([], {"model_type": "glm4_moe", "n_routed_experts": 4}, False, set(), {"glm4_moe_routers", "experts_in_turn"}),
        ([], {"model_type": "glm4_moe_lite"}, False, set(), {"glm4_moe_lite_routers"}),
        ([], {"model_type": "mimo"}, False, set(), {"model_configs"}),
        (["--enable-memory-saver", "--node-rank", "0"], QWEN3, False, set(), {"sleep_together"}),
        (["--node-rank", "0", "--node-rank", "1"], QWEN3, False, set(), {"schedulers_of_further_nodes"}),
        ([], QWEN3, True, set(), {"cache_scales"}),
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
def test_what_servers_get(
    flags: list[str],
    config: dict[str, object],
    float8: bool,
    on_cpu: set[str],
    everywhere: set[str],
    cuda: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: cuda)
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {"SLIME_ENGINE_TAKES_FLOAT8": "1"} if float8 else {}
    server = ServerFacts.of_command(["--model-path", str(tmp_path), *flags], environment)
    wanted = {patch.name for patch in (*CPU_STAND_INS, *EVERY_PROCESS, *SERVER_PROCESS) if patch.wanted(server)}
    together = set() if cuda or config is LATENT else {"requests_together"}
    of_device = {"one_pass_sampling"} if cuda else CPU | on_cpu | together
    assert wanted - {"torchvision_operators"} == ALL | everywhere | of_device


@pytest.mark.parametrize("variable", [EQUAL_BITS_VARIABLE, SAME_KERNELS_VARIABLE])
def test_servers_of_equal_bits_draw_as_sglang_does(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for environment, draws in (({variable: "1"}, False), (dict[str, str](), True)):
        server = ServerFacts.of_command(["--model-path", str(tmp_path)], environment)
        wanted = {patch.name for patch in (*EVERY_PROCESS, *SERVER_PROCESS) if patch.wanted(server)}
        assert ("one_pass_sampling" in wanted) == draws


@pytest.mark.parametrize(
    ("rank", "left_out"),
    [
        (RankFacts(cuda=False, transformer_engine=False), {"swiglu_gradient"}),
        (
            RankFacts(cuda=False, transformer_engine=True, saves=False),
            {"latent_attention_alone", "save_results", "swiglu_gradient", "write_by_threads"},
        ),
        (
            RankFacts(cuda=True, transformer_engine=False),
            {patch.name for patch in patch_report.megatron.CPU_SHIM} | {"swiglu_gradient_on_cpus"},
        ),
    ],
)
def test_what_ranks_get(rank: RankFacts, left_out: set[str]) -> None:
    assert {patch.name for patch in patch_report.TABLES["Training ranks"] if not patch.wanted(rank)} == left_out


@pytest.mark.parametrize("starts_ray", [False, True])
def test_what_drivers_get(starts_ray: bool) -> None:
    assert {patch.wanted(starts_ray) for patch in patch_report.TABLES["The driver"]} == {starts_ray}
