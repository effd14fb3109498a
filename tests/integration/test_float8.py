"""Float8 engines that are pushed weights. SGLang computes in float8 on GPUs only, so tests/gpu/test_float8.py runs the
loop; here its model classes, which load on any host, take a push as they would there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.backends.sglang.engine import Engine, EngineError
from slime.convert import fp8
from tests.integration.harness import ROOT
from tests.integration.tiny import KEYS, engine_args, write_tiny_model
from tests.releases import PROVEN

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_DEADLINE_S = 600
_SMALL: dict[str, Any] = {
    **{"vocab_size": 258, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 128},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4, **_EXPERTS},
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64},
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "rope_parameters": _YARN},
        **{"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        **{"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
        **_EXPERTS,
    },
}


def write_models(kind: str, directory: Path) -> list[Path]:
    """A float8 checkpoint, and another model in bfloat16 and in float8."""
    config = AutoConfig.for_model(**_SMALL | KINDS[kind])
    for name in ("before", "after"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.normal_(std=0.1)
        model.save_pretrained(directory / name)
        settings: dict[str, Any] = {"block": (128, 128), "shard_bytes": 10**9, "workers": 1, "force": False}
        fp8.convert(directory / name, directory / f"{name}_fp8", **settings)
    return [directory / name for name in ("before_fp8", "after", "after_fp8")]


@pytest.mark.skipif(not PROVEN, reason="float8 is served on GPUs, where the new column was not run")
@pytest.mark.parametrize(
    "kind",
    [pytest.param("qwen3", marks=pytest.mark.full), pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"],
)
def test_sglangs_loaders_take_pushes_as_they_take_checkpoints(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.float8_engine", *map(str, write_models(kind, tmp_path))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["float8"] >= 8
    assert (found["differ"], found["kept"], found["lost_by_sleep"]) == ([], [], [])
    assert any(name.endswith(".k_scale") for name in found["not_pushed"]) == (kind == "deepseek_v3")
    # Why a bucket has both halves: without the other, SGLang drops one and says nothing.
    fused = [
        f"model.layers.{i}.self_attn.fused_qkv_a_proj_with_mqa.weight{end}"
        for i in (0, 1)
        for end in ("", "_scale_inv")
    ]
    assert sorted(found["differ_in_halves"]) == (fused if kind == "deepseek_v3" else [])
    # A push is proved by that.
    assert found["dropped"]["pushed"] == 0
    assert (found["dropped"]["halved"] > 0) == (kind == "deepseek_v3")


@pytest.mark.full
def test_a_server_that_would_repack_does_not_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    args = engine_args(tmp_path / "model", tmp_path, pushes_float8=True)
    engine = Engine(args, 0, "127.0.0.1", KEYS, tmp_path / "engine.log", None)
    try:
        with pytest.raises(EngineError, match="weights are pushed: SGLang on a CPU packs them for AMX"):
            engine.start()
    finally:
        engine.stop()
