"""Names of the upstream system that users' functions ask for: present, or one line that says what to use here."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest
import torch

from slime.rollout.engine.generation import GenerateState
from slime.utils import elsewhere
from slime.utils.errors import HookError
from slime.utils.misc import load_function
from slime.utils.user_functions import naming

NUM_GPUS = 0
SINGLETON = "functools.cache on a function that makes the object gives one a process"


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from slime.utils.misc import SingletonMeta", SINGLETON),
        ("import slime.utils.misc as U\nSTATE = U.SingletonMeta", SINGLETON),
        ("from slime.utils.trace_utils import trace_span", "slime.observability.trace_utils has it"),
        ("from slime.rollout.sample_hooks import anything", "--rollout-sample-hook-path"),
        ("from slime.agent.adapters.common import TurnRecord", r"slime\.agent\.trajectory TurnRecord"),
    ],
)
def test_a_file_that_needs_them_does_not_load(tmp_path: Path, statement: str, hint: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{statement}\ndef generate(): ...\n")
    with pytest.raises(ValueError, match=hint):
        load_function(f"{file}:generate", flag="--custom-generate-function-path")


def test_a_path_that_names_one_directly() -> None:
    with pytest.raises(ValueError, match="has no 'MetricGatherer'; a rollout function returns its own metrics"):
        load_function("slime.rollout.filter_hub.base_types.MetricGatherer")


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("from slime.utils.http_utils import get_host_info", "host_ip has the address"),
        ("import slime.utils.misc\nslime.utils.misc.group_by([], len)", "itertools.groupby over what is sorted"),
        ("import slime.utils.no_such_name", None),
        ("[].no_such_name", None),
    ],
)
def test_what_a_function_needs_when_it_is_called(body: str, hint: str | None) -> None:
    with pytest.raises(HookError) as error, naming("--custom-rm-path mine.py:f"):
        exec(body, {})
    first = str(error.value).split("\n")[0]
    assert hint in first if hint else ";" not in first


def test_an_attribute_of_an_object() -> None:
    state = object.__new__(GenerateState)
    with pytest.raises(HookError, match=r"no attribute 'semaphore'; slime's generate and http_utils.post wait"):
        asyncio.run(_use(state))


async def _use(state: GenerateState) -> None:
    with naming("--custom-generate-function-path mine.py:f"):
        state.semaphore  # type: ignore[attr-defined]  # noqa: B018


def test_an_object_that_cannot_be_asked_what_it_is() -> None:
    class Odd:
        __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    assert elsewhere.told(AttributeError("boom", name="x", obj=Odd())) == "AttributeError: boom"


def test_nothing_that_is_here_has_a_hint() -> None:
    """A hint for a name that exists would never be seen, and says something false."""
    for name in elsewhere._ELSEWHERE:
        source, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(source)
        except (ImportError, ValueError):
            continue
        if name != "slime.backends.megatron_utils":  # what is left out of it
            assert not hasattr(module, attribute), name


def test_joining_and_cutting_responses_changes_nothing() -> None:
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    values = torch.randn(5)
    assert all_gather_with_cp(values, 9, 5) is values
    assert slice_log_prob_with_cp(values, 9, 5, "thd", None) is values
    with pytest.raises(ValueError, match="all_gather_with_cp: 5 values for a response of 4 tokens"):
        all_gather_with_cp(values, 9, 4)
