"""How long a context slime gives to requests: as long as SGLang makes an engine's of the same config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slime.models import hf_config
from slime.models.shape import context_length
from slime.options.checks.validate import ENGINE_KEEPS
from tests.command_line import QWEN3, Fails, Parse, write_model
from tests.lengthened import CONTEXTS, LINEAR, LLAMA3, YARN

NUM_GPUS = 0

FLAG = "--sglang-json-model-override-args"


@pytest.mark.parametrize(("said", "context"), CONTEXTS)
def test_contexts(said: dict[str, Any], context: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | said))
    assert context_length(hf_config(tmp_path)) == context


def test_requests_get_what_the_engine_leaves_of_a_lengthened_context(launch_directory: Path, parse: Parse) -> None:
    write_model(launch_directory / "model", QWEN3 | {"rope_scaling": LINEAR})
    assert parse().rollout_max_context_len == 5120 - ENGINE_KEEPS
    assert parse("--sglang-context-length 4000").rollout_max_context_len == 4000 - ENGINE_KEEPS


@pytest.mark.parametrize(
    ("said", "overrides", "problem"),
    [
        ({}, '{"rope_scaling":{"rope_type":"linear","factor":2.0}}', "rotary_base 10000 for 1000000"),
        ({}, '{"rope_parameters":{"rope_type":"linear","factor":2.0,"rope_theta":1e6}}', "factor 2.0 for none)"),
        ({}, '{"num_hidden_layers":1}', "(num_layers 1 for 4): change config.json instead"),
        ({}, '{"a":', "is not JSON: "),
        ({}, "[1]", "should be an object"),
        ({}, '{"num_hidden_layers":"x"}', "Field 'num_hidden_layers' expected int"),
        ({}, '{"rope_parameters":{"rope_type":"of_mine","factor":2.0}}', "of_mine"),
        ({}, '{"rope_parameters":"linear"}', f"{FLAG}: "),
        (
            {},
            '{"rope_parameters":{"rope_type":"linear","factor":null}}',
            "with rope_scaling's factor None, is not a length",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
            '{"rope_parameters":{"rope_type":"default","rope_theta":1e6}}',
            "(use_rope_scaling False for True, rope_scaling_factor none for 8.0): change",
        ),
    ],
)
def test_engines_of_another_model_are_refused(
    said: dict[str, Any], overrides: str, problem: str, launch_directory: Path, fails: Fails
) -> None:
    write_model(launch_directory / "model", QWEN3 | said)
    printed = fails(f"{FLAG} {overrides}")
    assert FLAG in printed
    assert problem in printed


def test_engines_may_have_another_context(launch_directory: Path, parse: Parse) -> None:
    args = parse(FLAG + ' {"max_position_embeddings":99,"architectures":["Own"]}')
    assert args.rollout_max_context_len == 99 - ENGINE_KEEPS
    other = '{"rope_parameters":{"rope_type":"linear","factor":2.0,"rope_theta":1e6}}'
    args = parse(f"--allow-config-mismatch {FLAG} {other}")
    assert args.rollout_max_context_len == 2 * 2048 - ENGINE_KEEPS


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"seq_length": "x"}, "seq_length 'x', with rope_scaling's factor 1, is not a length"),
        ({"seq_length": math.inf}, "seq_length inf, with"),
        ({"rope_scaling": {"factor": None}}, "max_position_embeddings 2048, with rope_scaling's factor None, is no"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "not 'NoneType'"),
    ],
)
def test_a_config_without_a_length_is_not_blamed_on_overrides(
    said: dict[str, Any], problem: str, launch_directory: Path, fails: Fails
) -> None:
    (launch_directory / "model/config.json").write_text(json.dumps(QWEN3 | said))
    printed = fails()
    assert f"--hf-checkpoint {launch_directory / 'model'}: " in printed
    assert problem in printed
    assert FLAG not in printed


@pytest.mark.parametrize("words", ["--debug-rollout-only --rollout-num-gpus 2", "--allow-config-mismatch"])
def test_engines_without_trainers_may_have_any_shape(words: str, launch_directory: Path, parse: Parse) -> None:
    yarn = json.dumps({"rope_parameters": YARN | {"rope_theta": 1e6}}, separators=(",", ":"))
    assert parse(f"{words} {FLAG} {yarn}").rollout_max_context_len == 4 * 2048 - ENGINE_KEEPS
