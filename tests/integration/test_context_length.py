"""How long a context SGLang makes an engine's of a config.json, and slime therefore gives to requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.models import FAMILIES, hf_config
from slime.models.shape import context_length
from tests import shipped
from tests.command_line import QWEN3
from tests.lengthened import CONTEXTS

NUM_GPUS = 0

pytestmark = pytest.mark.integration

OF_ENGINE = """
import slime.backends.sglang.launch  # as in a server
import json, sys
from slime.backends.sglang import fixes
fixes.register_configs()  # as in a server of such a model
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
