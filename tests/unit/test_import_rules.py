"""Who may import whom, as one table; imports inside functions, and in strings of code, count too."""

import ast
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("ray", "sglang", "sglang_router", "megatron")
NOUNS = ("slime.data", "slime.algorithms", "slime.batching")
BASE = ("slime.utils", "slime.files")
PARTS = (
    *(*NOUNS, *BASE, "slime.processes", "slime.options", "slime.observability", "slime.entry", "slime.rollout"),
    *("slime.training", "slime.weights", "slime.backends", "slime.models", "slime.convert"),
)


@dataclass(frozen=True)
class Rule:
    """What a part may import; a part may always import itself."""

    part: str
    ours: tuple[str, ...]
    engines: tuple[str, ...] = ()
    """Those of ENGINES that it may import."""
    lazily: tuple[str, ...] = ()
    """Further modules, of ours or of the other engines, that it may import inside a function."""
    only: tuple[str, ...] | None = None
    """If given, the only packages besides ours and the standard library."""


# From the ground up: nothing imports what is declared after it. The longest part that matches a module holds.
RULES = (
    Rule("slime.utils", ()),
    Rule("slime.files", ("slime.utils",)),
    Rule("slime.processes", BASE),
    Rule("slime.observability", BASE),
    # The API document has the data sources under this name.
    Rule("slime.data", (), lazily=("slime.data.source.data_source",)),
    Rule("slime.algorithms", ("slime.data",)),
    Rule("slime.batching", ("slime.data", "slime.algorithms")),
    Rule("slime.models", (), only=("torch", "transformers")),
    # The documentation's pages are made of these, where neither torch nor numpy is.
    Rule(
        "slime.options",
        (
            *("slime.files.checkpoints", "slime.files.model_directory", "slime.processes"),
            *("slime.utils.calls", "slime.utils.errors", "slime.utils.patching"),
        ),
        engines=("megatron", "sglang", "sglang_router"),
    ),
    Rule("slime.options.checks", (*BASE, "slime.options", "slime.data", "slime.models")),
    Rule("slime.grading", ("slime.data", "slime.utils", "slime.processes")),
    # What a row must have depends on the options, and on who will grade its response.
    Rule("slime.data.rows", (*BASE, "slime.data", "slime.processes", "slime.options", "slime.grading")),
    Rule("slime.data.source", (*BASE, "slime.data", "slime.options", "slime.data.rows")),
    Rule("slime.convert", (*BASE, "slime.models", "slime.options")),
    Rule("slime.training", (*NOUNS, *BASE, "slime.options", "slime.observability")),
    Rule(
        "slime.backends.megatron",
        (*NOUNS, *BASE, "slime.training", "slime.models", "slime.options", "slime.observability", "slime.convert"),
        engines=("megatron",),
        # The kernels of engines that trainers share in true on-policy mode.
        lazily=("sglang.srt.batch_invariant_ops", "sglang.kernels.ops.attention"),
    ),
    Rule(
        "slime.backends.sglang",
        (*BASE, "slime.processes", "slime.options", "slime.observability"),
        engines=("sglang", "sglang_router"),
    ),
    # The one place that knows the backends by name.
    Rule("slime.backends", ("slime.training",), lazily=("slime.backends.megatron.trainer",)),
    Rule(
        "slime.rollout",
        (*NOUNS, *BASE, "slime.options", "slime.grading", "slime.observability", "slime.backends.sglang.client"),
    ),
    # Users' examples take these without the gateway.
    Rule("slime.agent.sandbox", (*BASE, "slime.processes")),
    Rule("slime.agent.harness", ("slime.agent.sandbox",)),
    Rule("slime.agent", (*NOUNS, *BASE, "slime.processes", "slime.options", "slime.observability", "slime.rollout")),
    Rule(
        "slime.weights",
        (
            *(*BASE, "slime.models", "slime.backends.megatron", "slime.observability"),
            *("slime.backends.sglang.client", "slime.backends.sglang.loads.loaded"),
        ),
        lazily=("sglang.srt.weight_sync.tensor_bucket", "sglang.srt.utils.MultiprocessingSerializer"),
    ),
    # What programs do first. The server's flags are read in a process of its own, as SGLang does not import on a CPU
    # without the patches; a job's secret flags are left with its Ray.
    Rule(
        "slime.entry",
        (*BASE, "slime.data", "slime.options", "slime.models", "slime.grading", "slime.convert"),
        engines=("ray",),
        lazily=("slime.backends.sglang.patches",),
    ),
    Rule("slime.utils.external_utils", (*BASE, "slime.processes", "slime.options")),
    Rule("slime.ray", PARTS, engines=("ray",)),
    Rule("slime.fleet", (*PARTS, "slime.ray"), engines=("ray",)),
    Rule("slime.driver", (*PARTS, "slime.ray", "slime.fleet"), engines=("ray",)),
    Rule("slime", ()),
    Rule("train", ("slime.driver", "slime.entry")),
    Rule("train_async", ("slime.driver", "slime.entry")),
)

_MOST_FILES = 15
TORCH_CUDA = {
    "slime/utils/device.py",
    "slime/backends/megatron/cpu_shim.py",
    "slime/backends/sglang/cpu/stand_ins.py",
}
OPTIONAL = ("wandb", "matplotlib", "math_verify", "peft", "tensorboard", "torch.utils.tensorboard")

FILES = sorted(ROOT.glob("slime/**/*.py")) + [p for p in (ROOT / "train.py", ROOT / "train_async.py") if p.exists()]


@dataclass(frozen=True)
class Import:
    name: str
    """Dotted; of ``from a import b`` it is ``a.b``."""
    lazy: bool
    """Inside a function."""
    line: int


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def code_of(text: str) -> ast.Module:
    """A string as a program, empty where it is none."""
    if "import " in text:
        with contextlib.suppress(SyntaxError):
            return ast.parse(text)
    return ast.Module([], [])


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import statement and ``import_module("...")``; ``package`` is what relative imports start from."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from (Import(f"{source}.{alias.name}", lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            constants = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            yield from (Import(str(name), lazy, node.lineno) for name in constants)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for inner in imports_of(code_of(node.value), ""):
                yield Import(inner.name, True, node.lineno)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(tree, False)


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def rule_of(module: str) -> Rule:
    return max((rule for rule in RULES if within(module, (rule.part,))), key=lambda rule: len(rule.part))


def violation(module: str, found: Import, rule: Rule) -> str | None:
    """Why ``module`` may not do this import, or None."""
    name, top = found.name, found.name.split(".")[0]
    if name == "slime":
        return None  # the empty package by itself; its parts are imported by name
    if within(name, rule.lazily):
        return None if found.lazy else f"{name} only inside a function"
    if top in ("slime", "train", "train_async"):
        theirs = rule_of(name)
        if RULES.index(theirs) > RULES.index(rule):
            return f"{theirs.part} is above {rule.part}"
        its = theirs is rule or within(name, rule.ours)
        return None if its else f"{rule.part} may import of ours only {rule.ours}"
    if top in ENGINES and top not in rule.engines:
        return f"{rule.part} may not import {top}" + (f" other than {rule.lazily}" if rule.lazily else "")
    if rule.only is not None and top not in rule.only and top not in sys.stdlib_module_names:
        return f"{rule.part} may import only {rule.only}"
    return None


def module_of(file: Path) -> tuple[str, str]:
    """Dotted name, and the package that relative imports start from."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]), ".".join(parts[:-1])
    return ".".join(parts), ".".join(parts[:-1])


def only_names(tree: ast.Module) -> bool:
    """Whether a module is no more than a name by which users import what is elsewhere, as upstream has it there."""
    targets = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    return all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in tree.body) and [
        [ast.unparse(target) for target in each] for each in targets
    ] == [["__all__"]]


def torch_cuda_lines(tree: ast.Module) -> list[int]:
    lines = []
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and node.attr == "cuda" and getattr(node.value, "id", "") == "torch"
        imported = isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            within(found.name, ("torch.cuda",)) for found in imports_of(ast.Module([node], []), "")
        )
        if attribute or imported:
            lines.append(node.lineno)
    return lines


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20


def test_no_import_runs_upwards() -> None:
    """What a part may import is declared before it, and no part is a single module: there are no exceptions."""
    order = [rule.part for rule in RULES]
    for index, rule in enumerate(RULES):
        later = [name for name in rule.ours if order.index(rule_of(name).part) > index]
        assert not later, f"{rule.part} imports what is above it: {later}"
        assert (ROOT / rule.part.replace(".", "/")).is_dir() or rule.part in ("train", "train_async"), rule.part


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES if file.parent != ROOT}), ids=str)
def test_a_folder_can_be_held_in_the_head(folder: Path) -> None:
    files = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= _MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file(file: Path) -> None:
    """One file keeps the table, names torch.cuda only where allowed, and takes optional packages where it uses them."""
    tree = ast.parse(file.read_text(), str(file))
    module, package = module_of(file)
    rule = rule_of(module)
    found = [] if only_names(tree) else list(imports_of(tree, package))
    errors = [
        f"{file}:{i.line}: {module} imports {i.name}: {why}" for i in found if (why := violation(module, i, rule))
    ]
    errors += [
        f"{file}:{i.line}: {i.name} is optional: import it inside the function that uses it"
        for i in found
        if within(i.name, OPTIONAL) and not i.lazy
    ]
    if str(file.relative_to(ROOT)) not in TORCH_CUDA:
        errors += [f"{file}:{line}: torch.cuda belongs in slime/utils/device.py" for line in torch_cuda_lines(tree)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("module", "statement", "allowed"),
    [
        ("slime.algorithms.losses", "import ray", False),
        ("slime.algorithms.losses", "from slime.data import Sample", True),
        ("slime.algorithms.losses", "from slime.utils import misc", False),
        ("slime.models.qwen", "import numpy", False),
        ("slime.models.qwen", "import torch.nn.functional as F, dataclasses, transformers", True),
        ("slime.models.qwen", "from .family import Family", True),
        ("slime.options.cluster", "from slime.utils.misc import load_function", False),
        ("slime.options.cluster", "READER = 'import sys; from slime.backends.sglang import patches'", False),
        ("slime.options.cluster", "from slime.options.checks import validate", False),
        ("slime.options.flags.sglang", "from slime.backends.sglang import patches", False),
        ("slime.entry.arguments", "READER = 'def f():\\n    from slime.backends.sglang import patches'", True),
        ("slime.entry.arguments", "def f():\n    from slime.backends.sglang import engine", False),
        ("slime.rollout.generate", "from slime.backends.sglang.client import GenerateClient", True),
        ("slime.rollout.generate", "from slime.backends.sglang import client", True),
        ("slime.rollout.generate", "from slime.backends.sglang import engine", False),
        ("slime.rollout.generate", "def f():\n    import megatron.core", False),
        ("slime.rollout.generate", "import importlib\nimportlib.import_module('megatron.core')", False),
        ("slime.backends.megatron.model", "def f():\n    from sglang import srt", False),
        ("slime.backends.megatron.model", "from slime.backends.sglang.client import EngineControl", False),
        ("slime.training.checks", "from megatron.core import parallel_state", False),
        ("slime.training.trainer", "def f():\n    from slime.backends.megatron import lora", False),
        ("slime.backends.trainers", "from slime.backends.megatron.trainer import MegatronTrainer", False),
        ("slime.backends.sglang.engine", "import ray", False),
        ("slime.backends.sglang.engine", "from ..megatron import model", False),
        ("slime.weights.tensor", "from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket", False),
        (
            "slime.weights.tensor",
            "def f():\n    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket",
            True,
        ),
        ("slime.weights.tensor", "def f():\n    from sglang.srt.utils import kill_process_tree", False),
        ("slime.driver.run", "from slime.weights import EngineAddress\nimport ray", True),
        ("slime.driver.run", "import sglang", False),
        ("slime.fleet.engines", "from slime.ray.supervision import Supervisor\nimport ray", True),
        ("slime.rollout.engine.state", "from slime.fleet.engines import Membership", False),
        ("train", "from slime.driver.run import Run\nfrom slime.entry.arguments import parse_args", True),
        ("train", "from slime.rollout import loop", False),
    ],
)
def test_the_checker_itself(module: str, statement: str, allowed: bool) -> None:
    found = imports_of(ast.parse(statement), module.rpartition(".")[0])
    assert all(violation(module, i, rule_of(module)) is None for i in found) == allowed


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("import torch\ntorch.cuda.synchronize()", True),
        ("def f():\n    from torch.cuda import Event", True),
        ("from torch import cuda", True),
        ("x.cuda()", False),
        ("device = 'cuda'", False),
    ],
)
def test_torch_cuda_is_found(statement: str, named: bool) -> None:
    assert bool(torch_cuda_lines(ast.parse(statement))) == named
