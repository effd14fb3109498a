"""How users' functions are called: one table, by which command lines are refused and the documents are written."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.entry.arguments import GROUPS
from slime.options.checks.hook_paths import load_hooks
from slime.options.flags.schema import flag_of, hook_fields
from slime.utils.calls import Call, CallError, form_of
from slime.utils.misc import load_function
from tests.command_line import failure, write_model, write_rows
from tests.small_rollout import small_rollout

NUM_GPUS = 0
DOCS = Path(__file__).resolve().parents[2] / "docs"
FIELDS = list(hook_fields(GROUPS))
ONE = Call("args, sample, params, *, evaluation=False", "Sample")
MANY = Call("args, samples, *, must", "list", "samples")


def single(args: Any, x: Any, y: Any) -> None: ...
def with_defaults(args: Any, sample: Any, params: Any = None, more: int = 3, *, evaluation: bool = True) -> None: ...
def with_a_must(args: Any, sample: Any, params: Any, *, evaluation: bool) -> None: ...
def anything(*args: Any, **kwargs: Any) -> None: ...
def listed(args: Any, samples: Any, *, must: int) -> None: ...
def listed_openly(args: Any, samples: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        *((single, ONE), (with_defaults, ONE), (with_a_must, ONE), (anything, ONE), (type, ONE)),
        *((listed, MANY), (listed_openly, MANY)),
    ],
)
def test_names_are_free_but_for_the_one_that_tells_forms_apart(function: Callable[..., Any], form: Call) -> None:
    assert form_of(function, (ONE, MANY), "--x") is form


async def awaited(args: Any, x: Any, y: Any) -> None: ...


class AsyncObject:
    async def __call__(self, args: Any, x: Any, y: Any) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        awaited,
        functools.partial(awaited),
        AsyncObject(),
        AsyncObject().__call__,
        functools.partial(AsyncObject()),
    ],
)
def test_an_async_function_is_refused_where_nobody_awaits_it(function: Callable[..., Any]) -> None:
    plain = Call("args, x, y, **kwargs", "None")
    with pytest.raises(CallError, match=r"^--x a.py:f: it is async, .* would never run: write def, not async def$"):
        form_of(function, (plain,), "--x a.py:f")
    for call in (Call("args, x, y", "None", is_async=True), Call("args, x, y", "None", may_be_async=True)):
        assert form_of(function, (call,), "--x") is call


def test_a_data_source_that_lacks_a_method_is_refused_with_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from slime.data import DataSource\n"
        "class Source(DataSource):\n"
        "    def __init__(self, args): pass\n"
        "    def get_samples(self, num_samples): return []\n"
    )
    args = small_rollout(tmp_path, data_source_path=f"{file}:Source")
    with pytest.raises(CallError, match=r"^--data-source-path .*own.py:Source: the class lacks __len__, add_samples,"):
        load_hooks(args, {"data_source_path"}, GROUPS)


class Shy:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __call__(self, args: Any, x: Any, y: Any) -> None: ...


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("repr")


UNPRINTABLE = Unprintable()


def with_a_default(x: Any = UNPRINTABLE) -> None: ...


@pytest.mark.parametrize(
    ("function", "raised"),
    [(Shy(), "RuntimeError: no "), (with_a_default, "KeyError: 'repr'")],
    ids=["an object", "a default"],
)
def test_what_a_function_raises_when_its_parameters_are_asked_for(function: Callable[..., Any], raised: str) -> None:
    with pytest.raises(CallError, match=rf"^--x a.py:f: asking it for its parameters raised {raised}"):
        form_of(function, (Call("args, x, y", "None"),), "--x a.py:f")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda args, sample: None, "too many positional arguments"),
        (lambda args, sample, params, more: None, "missing a required argument: 'more'"),
        (lambda args, sample, params, *, own: None, "missing a required.* argument: 'own'"),
        (lambda args, samples: None, "got an unexpected keyword argument 'must'"),
        (lambda args, samples, must, x: None, "missing a required argument: 'x'|multiple values"),
    ],
)
def test_the_error_has_both_signatures(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(CallError, match=problem) as error:
        form_of(function, (ONE, MANY), "--x a.py:f")
    assert str(error.value).startswith("--x a.py:f: it is called as (args, sample")


def test_forms_that_only_a_name_tells_apart() -> None:
    forms = (Call("args, sample", "float", "sample"), Call("args, samples", "list", "samples"))
    assert form_of(lambda args, sample: None, forms, "--x") is forms[0]
    for function in (lambda args, s: None, lambda args, sample, samples: None):
        with pytest.raises(CallError, match="a parameter sample or samples, not both: the name tells"):
            form_of(function, forms, "--x")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_function_path_has_its_forms_and_slimes_own_has_one(field: Any) -> None:
    assert field.metadata["call"], f"{flag_of(field)}: give its option() a call="
    for call in field.metadata["call"]:
        form_of(lambda *args, **kwargs: None, (Call(call.parameters, call.returns),), flag_of(field))
    if field.default is not None:
        form_of(load_function(field.default), field.metadata["call"], flag_of(field))


AWAITED = {
    *("custom_generate_function_path", "custom_rm_path", "dynamic_sampling_filter_path", "rollout_sample_hook_path"),
    *("rollout_sample_filter_path", "rollout_all_samples_process_path", "custom_rollout_log_function_path"),
    *("custom_eval_rollout_log_function_path", "custom_agent_function_path"),
}
"""Those that `call_hook` calls, and a session's agent."""


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_functions_that_may_be_async_are_those_that_are_awaited(field: Any) -> None:
    for call in field.metadata["call"]:
        assert (call.is_async or call.may_be_async) == (field.name in AWAITED)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_wrong_signature_is_refused_with_the_command_line(field: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def f(*, nobody_knows): pass\n")
    path: Any = f"{mine}:f"
    args = small_rollout(tmp_path, **{field.name: [[path]] if "list" in str(field.type) else path})
    with pytest.raises(CallError, match=rf"^{flag_of(field)} {re.escape(path)}: it is called as .*nobody_knows"):
        load_hooks(args, {field.name}, GROUPS)


def test_the_command_line_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_rows(tmp_path / "data.jsonl")
    (tmp_path / "mine.py").write_text(
        "def pick(args, buffer): pass\ndef make(args, rollout_id, data_source): pass\n"
        "class Source:\n    def __init__(self): pass\n"
    )
    assert failure(capsys, "--buffer-filter-path mine.py:pick") == (
        "--buffer-filter-path mine.py:pick: it is called as (args, rollout_id, buffer, num_samples), and takes "
        "(args, buffer): too many positional arguments"
    )
    assert "and takes ()" in failure(capsys, "--data-source-path mine.py:Source")
    (tmp_path / "late.py").write_text("async def hook(args): pass\n")
    assert failure(capsys, "--custom-megatron-init-path late.py:hook") == (
        "--custom-megatron-init-path late.py:hook: it is async, and nobody awaits it, so that it would never run: "
        "write def, not async def"
    )
    evaluates = "--rollout-function-path mine.py:make --eval-interval 1 --eval-prompt-data data.jsonl"
    assert "mine.py:make, which also evaluates: it is called as (args, rollout_id, data_source, *, evaluation)" in (
        failure(capsys, evaluates)
    )


@pytest.mark.parametrize("page", ["customize.md", "zh/customize.md"])
def test_the_documents_have_every_function_with_its_signature(page: str) -> None:
    lines = (DOCS / page).read_text().splitlines()
    for field in FIELDS:
        flag = flag_of(field)
        for call in field.metadata["call"]:
            shown = f"`{call}`".replace("|", "\\|")
            rows = [line for line in lines if line.startswith(f"| `{flag}` |") and shown in line]
            assert rows, f"docs/{page} has no row for {flag} with {shown}"
