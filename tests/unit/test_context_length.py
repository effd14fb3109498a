"""How long a context slime gives to requests: as long as SGLang makes an engine's of the same config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.models import FAMILIES, context_length, hf_config
from slime.options.validate import ENGINE_KEEPS
from slime.utils.arguments import parse_args
from tests import shipped
from tests.command_line import QWEN3, command, write_model, write_rows

NUM_GPUS = 0

LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXTS: list[tuple[dict[str, Any], int]] = [
    ({}, 2048),
    ({"rope_scaling": LINEAR}, 5120),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 5120),
    ({"rope_parameters": LINEAR | {"rope_theta": 1e6}}, 5120),
    ({"rope_scaling": DYNAMIC}, 4096),
    ({"rope_scaling": DYNAMIC | {"original_max_position_embeddings": 64}}, 2048),
    ({"rope_scaling": YARN}, 2048),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 512}}, 2048),
    ({"rope_scaling": LLAMA3}, 2048),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256}}, 2048),
    ({"model_max_length": 99}, 99),
    ({"seq_length": 100, "rope_scaling": LINEAR}, 250),
    ({"model_max_length": 99, "max_sequence_length": 77}, 77),
]
"""What a config of 2048 positions says besides, and its context."""
OF_ENGINE = """
import slime.backends.sglang.launch  # as in a server
import json, sys
from sglang.srt.configs.model_config import ModelConfig
print(json.dumps([ModelConfig(directory).context_len for directory in sys.argv[1:]]))
"""


def test_contexts_are_those_of_sglang(tmp_path: Path) -> None:
    known = {kind for family in FAMILIES for kind in family.model_types}
    directories = [shipped.CONFIGS / name for name in shipped.CHECKPOINTS if shipped.model_type(name) in known]
    for number, (said, _) in enumerate(CONTEXTS):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(QWEN3 | said))
        directories.append(directory)
    program = [sys.executable, "-c", OF_ENGINE, *map(str, directories)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    contexts = [context_length(hf_config(directory)) for directory in directories]
    assert contexts == json.loads(ran.stdout.splitlines()[-1])
    assert contexts[-len(CONTEXTS) :] == [context for _, context in CONTEXTS]


def test_requests_get_what_the_engine_leaves_of_a_lengthened_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", QWEN3 | {"rope_scaling": LINEAR})
    write_rows(tmp_path / "data.jsonl")
    assert parse_args(command()).rollout_max_context_len == 5120 - ENGINE_KEEPS
    assert parse_args(command("--sglang-context-length 4000")).rollout_max_context_len == 4000 - ENGINE_KEEPS
