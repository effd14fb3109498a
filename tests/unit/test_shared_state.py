"""What rollouts of a process share is in their runtime; every task is referred to; folders and names of users stay."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("slime/rollout", "slime/data", "slime/utils")
CONTAINERS = {
    *("dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "deque"),
    *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
}
OF_A_PROCESS = {
    "slime/rollout/runtime.py": ["_of_process"],
    "slime/utils/http_client.py": ["_of_process"],
    "slime/utils/patching.py": ["_told"],
}
"""Which runtime is the process's, for threads of users that have no context of ours; a patch changes modules of the
process, whoever's rollouts run there, and is told of once."""
CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"),
}


def name_of(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def bound(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of the module, and what each is bound to."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((name_of(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield name_of(node.target), node.value


def changed(tree: ast.Module) -> set[str]:
    """Names whose object, or which themselves, functions of the module change."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= set(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            names.add(name_of(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names.add(name_of(node.value))
        elif isinstance(node, ast.AugAssign):
            names.add(name_of(node.target))
    return names


def registries(tree: ast.Module) -> list[str]:
    """Names of the module that hold what changes while the process runs; a table that nobody changes is none."""
    written, found = changed(tree), []
    for name, value in bound(tree):
        made = isinstance(value, ast.Call) and name_of(value.func) in CONTAINERS
        empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        display = isinstance(value, (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp))
        if made or (empty and name != "__all__") or (display and name in written):
            found.append(name)
    found += [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    return found


def lost_tasks(tree: ast.Module) -> list[int]:
    """Lines that make a task to which nothing refers: the event loop does so only weakly."""
    roots = [node.value if isinstance(node, ast.Expr) else node.body for node in ast.walk(tree)
             if isinstance(node, (ast.Expr, ast.Lambda))]  # fmt: skip
    return [
        node.lineno
        for node in roots
        if isinstance(node, ast.Call) and name_of(node.func) in ("ensure_future", "create_task")
    ]


def files(*parts: str) -> list[Path]:
    return [path for part in parts for path in sorted((ROOT / part).rglob("*.py"))]


def test_no_module_of_the_rollout_side_keeps_a_registry() -> None:
    found = {str(path.relative_to(ROOT)): registries(ast.parse(path.read_text())) for path in files(*PARTS)}
    assert {path: names for path, names in found.items() if names} == OF_A_PROCESS
    assert len(found) > 60


def test_every_task_is_referred_to() -> None:
    found = {str(path.relative_to(ROOT)): lost_tasks(ast.parse(path.read_text())) for path in files("slime")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("_keys: dict[str, str] = {}", ["_keys"]),
        ("_loops = weakref.WeakKeyDictionary()", ["_loops"]),
        ("_seen = set()", ["_seen"]),
        ("_version = 0\ndef note(version):\n    global _version\n    _version = version", ["_version"]),
        ("_known = {'a': 1}\ndef add(name):\n    _known[name] = 2", ["_known"]),
        ("_known = {'a'}\ndef add(name):\n    _known.add(name)", ["_known"]),
        ("_TABLE = {'a': 1}\ndef get(name):\n    return _TABLE[name]", []),
        ("_current = ContextVar('current', default=None)", []),
        ("__all__ = []", []),
        ("def make():\n    own = {}\n    return own", []),
    ],
)
def test_the_checker_of_registries(code: str, names: list[str]) -> None:
    assert registries(ast.parse(code)) == names


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("asyncio.ensure_future(work())", [1]),
        ("task.add_done_callback(lambda _: asyncio.ensure_future(tell()))", [1]),
        ("loop.create_task(work())", [1]),
        ("tasks = [asyncio.create_task(work())]", []),
        ("await asyncio.create_task(work())", []),
    ],
)
def test_the_checker_of_tasks(code: str, lines: list[int]) -> None:
    assert lost_tasks(ast.parse(code)) == lines


FOLDERS = sorted({path.parent for path in files("slime/rollout", "slime/data")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_can_be_held_in_the_head(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 15


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("slime.data", "DataSource RolloutDataSource RolloutDataSourceWithBuffer Sample"),
        ("slime.rollout.base_types", "RolloutFnEvalOutput RolloutFnTrainOutput flatten_samples"),
        ("slime.rollout.data_source", "DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first"),
        ("slime.rollout.filter_hub.base_types", "DynamicFilterOutput"),
        ("slime.rollout.filter_hub.buffer_filters", "pop_first pop_fresh pop_longest"),
        ("slime.rollout.filter_hub.dynamic_sampling_filters", "check_reward_nonzero_std"),
        ("slime.rollout.fully_async_rollout", "generate_rollout_fully_async"),
        ("slime.rollout.model_urls", "get_model_url"),
        ("slime.rollout.observation", "append_observation response_text"),
        ("slime.rollout.rm_hub", "async_rm batched_async_rm grade_answer_verl remote_rm"),
        ("slime.rollout.rm_hub.math_dapo_utils", "compute_score"),
        ("slime.rollout.rm_hub.math_utils", "extract_answer grade_answer_mathd grade_answer_verl"),
        ("slime.rollout.sampling", "request_seed"),
        ("slime.rollout.sft_rollout", "generate_rollout"),
        ("slime.rollout.sglang_rollout", "GenerateState generate generate_and_rm generate_rollout get_model_url"),
        ("slime.rollout.tokenizer", "load_tokenizer"),
        ("slime.utils.http_utils", "RequestError get host_ip post"),
        ("slime.utils.types", "RolloutBatch Sample"),
    ],
)
def test_names_that_users_import_stay(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []
