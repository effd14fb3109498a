"""MTP heads (MTP) in the whole loop: train.py on a tiny MiMo, whose engine is pushed to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration.harness import assert_registered, run_well, series
from tests.integration.test_families import MIMO
from tests.integration.tiny_run import flags, make_workspace
from tests.parallel import heads

NUM_GPUS = 0

pytestmark = [pytest.mark.integration, pytest.mark.full]


def write_mimo(directory: Path) -> None:
    """In the place of another model, of which the tokenizer stays."""
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    options = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    options |= {"vocab_size": vocabulary, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = AutoConfig.for_model("qwen2", **options, num_nextn_predict_layers=1, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # of even probabilities there would be nothing to learn
    model.save_pretrained(directory)
    more = {heads.MIMO + name: tensor for name, tensor in heads.mimo_heads(config).state_dict().items()}
    file = directory / "model.safetensors"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | MIMO))


def test_the_heads_learn_in_a_run(tmp_path: Path) -> None:
    """From random ones, beside a policy whose engine has none and holds all that it was pushed."""
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    write_mimo(workspace / "model")
    line = flags(
        workspace,
        run_dir,
        enable_mtp_training=True,
        num_rollout=6,
        lr="5e-3",
        save=str(run_dir),
        save_interval=6,
        save_hf=str(run_dir / "hf_{rollout_id}"),
        check_weight_update_equal=True,
    )
    run_well(line, tmp_path / "log")
    losses = series(run_dir, "train/mtp_loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5, losses
    assert_registered(run_dir)
    before, after = (load_file(path / "model.safetensors") for path in (workspace / "model", run_dir / "hf_5"))
    assert after.keys() == before.keys()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items() if heads.MIMO in name)
