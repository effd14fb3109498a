"""What lets ranks share a GPU finds what it changes in the installed packages."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

NUM_GPUS = 0
SHARED = Path(__file__).parents[1] / "gpu" / "shared"
PROGRAM = """
import json, os
import torch
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
here, (reads, writes) = os.environ["NCCL_HOSTID"], os.pipe()
if os.fork() == 0:
    os.write(writes, os.environ["NCCL_HOSTID"].encode())
    os._exit(0)
os.wait()
hosts = [here, os.read(reads, 100).decode()]
print(json.dumps({
    "gpus": NvidiaGPUAcceleratorManager.get_current_node_num_accelerators(), "hosts": hosts,
    "visible": os.environ["CUDA_VISIBLE_DEVICES"], "changed": torch.cuda.set_device.__module__,
}))
"""


def test_every_process_is_a_host_with_one_gpu_of_as_many_as_wanted() -> None:
    env = {**os.environ, "PYTHONPATH": str(SHARED), "SLIME_TEST_SHARE": "4"}
    env |= {"NCCL_HOSTID": "the parent's", "CUDA_VISIBLE_DEVICES": "2,3"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["gpus"], found["visible"], found["changed"]) == (4, "0,1", "sitecustomize")
    assert len({"the parent's", *found["hosts"]}) == 3


def test_sglang_has_what_turns_its_own_sums_off() -> None:
    """By its source: without GPUs the module cannot be imported."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "srt" / "distributed" / "parallel_state.py"
    functions = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert "set_custom_all_reduce" in functions
