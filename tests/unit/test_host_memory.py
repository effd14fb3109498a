"""The host-memory plan of ``--dry-run``: what each line counts, and where it does not fit."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.driver.preflight import host_memory
from slime.driver.preflight.host_memory import fullest, lines, nodes
from slime.files.storage import amount
from slime.fleet.spec import fleet_of
from tests.command_line import LATENT, QWEN3, Parse

NUM_GPUS = 0
GIB = 2**30
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPE = QWEN3 | SIZES | {"head_dim": 128, "vocab_size": 2048, "num_hidden_layers": 6, "tie_word_embeddings": False}
LAYER = (16 * 128 * 1024, 8 * 128 * 1024, 6144 * 1024, 3072 * 1024)
"""Elements of a layer's matrices: query, key and value; their output; gate and up; down."""
VOCABULARY = 2048 * 1024
ELEMENTS = 6 * sum(LAYER) + 2 * VOCABULARY

Shares = dict[str, float]
Plan = Callable[..., Shares]


@pytest.fixture
def plan(launch_directory: Path, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Bytes by line of the node that needs the most, of a run of the model above with further words."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (launch_directory / "model" / "config.json").write_text(json.dumps(SHAPE))

    def make(words: str, *, on_gpus: bool = True, without: str = "--fp32") -> Shares:
        _, shares = fullest(options(parse, words, without), on_gpus)
        return {share.what: share.nbytes for share in shares}

    return make


def options(parse: Parse, words: str, without: str = "--fp32") -> Namespace:
    return parse(f"--random-weights --bf16 {words}", without=f"{without} --actor-num-gpus-per-node --rollout-num-gpus")


def test_trainers_that_sleep(plan: Plan) -> None:
    """Two ways of tensor parallelism, twice: each rank has half of the weights, and a fourth of the optimizer's."""
    words = "--colocate --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2"
    found = plan(words)
    assert found["copies of sleeping trainers, pinned"] == 4 * (ELEMENTS / 2 * 2 + ELEMENTS / 4 * 12)
    everywhere = plan(f"{words} --no-use-distributed-optimizer")["copies of sleeping trainers, pinned"]
    assert everywhere == 4 * ELEMENTS / 2 * 14
    halved = plan(f"{words} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert halved["copies of sleeping trainers, pinned"] == 4 * (ELEMENTS / 2 * 2 + ELEMENTS / 4 * 6)
    assert halved["optimizer state (--optimizer-cpu-offload)"] == 4 * ELEMENTS / 4 * 6
    assert not [line for line in plan(f"{words} --no-offload-train") if line.startswith("copies")]
    assert not [line for line in plan(words, on_gpus=False) if line.startswith("copies")]
    assert plan(f"{words} --advantage-estimator ppo")["copies of sleeping trainers, pinned"] == 2 * sum(
        (4 * ELEMENTS / 2 * 2, 4 * ELEMENTS / 4 * 12)
    )


def test_sets_of_weights(plan: Plan) -> None:
    """Two, the trained one among them."""
    words = "--colocate --actor-num-gpus-per-node 1 --use-kl-loss --kl-loss-coef 0.1 --ref-load model"
    of_set = 2 * ELEMENTS
    assert plan(words)["sets of weights: current, reference"] == 2 * of_set
    assert plan(words, on_gpus=False)["sets of weights: current, reference"] == 2 * 2 * ELEMENTS
    assert not [line for line in plan(f"{words} --lora-rank 4") if line.startswith("sets")]


def test_hosts_without_gpus(plan: Plan) -> None:
    """Hold what GPUs hold elsewhere."""
    words = "--colocate --actor-num-gpus-per-node 1 --sglang-max-total-tokens 1000 --update-weight-buffer-size 1000000"
    found = plan(words, on_gpus=False)
    assert found["weights, gradients, optimizer of trainers"] == ELEMENTS * (2 + 4 + 12)
    assert found["weights of engines"] == ELEMENTS * 2
    assert found["caches of engines"] == 1000 * 6 * 2 * 4 * 128 * 2
    assert found["buckets of a push"] == 4.5 * 1e6


def test_experts(plan: Plan, launch_directory: Path) -> None:
    """Two of four experts on each rank, whose optimizer state is cut over all ranks like the rest."""
    shape = LATENT | {"num_hidden_layers": 3}
    (launch_directory / "model" / "config.json").write_text(json.dumps(shape))
    attention = 128 * 32 + 32 * 4 * 32 + 128 * 48 + 32 * 4 * 32 + 4 * 16 * 128
    experts = 2 * 4 * 3 * 128 * 64
    dense = 3 * attention + 3 * 384 * 128 + 2 * (4 * 128 + 3 * 64 * 128) + 2 * 300 * 128
    words = "--colocate --actor-num-gpus-per-node 2 --expert-model-parallel-size 2"
    expected = 2 * ((dense + experts / 2) * 2 + (dense + experts) / 2 * 12)
    assert plan(words)["copies of sleeping trainers, pinned"] == expected


@pytest.mark.parametrize(
    ("words", "on_gpus", "expected"),
    [
        # Each a part, of all that ranks have alike.
        ("--tensor-model-parallel-size 2", True, ELEMENTS * (2 + 12 * 1.5)),
        ("--tensor-model-parallel-size 2 --no-use-distributed-optimizer", True, ELEMENTS * (2 + 12)),
        ("--fp32", False, ELEMENTS * (4 + 12)),
        ("--fp32 --overlap-grad-reduce", False, ELEMENTS * (4 + 12 * 1.5)),
        ("--fp32 --no-use-distributed-optimizer", False, None),
        ("--tensor-model-parallel-size 2 --lora-rank 4", True, None),
    ],
)
def test_saving(words: str, on_gpus: bool, expected: float | None, plan: Plan) -> None:
    found = plan(f"--colocate --actor-num-gpus-per-node 4 --save saved {words}", on_gpus=on_gpus)
    assert found.get("a checkpoint on its way to a disk") == expected


def test_saving_experts(launch_directory: Path, plan: Plan) -> None:
    """The same, however experts are divided."""
    shape = LATENT | {"num_hidden_layers": 3}
    (launch_directory / "model" / "config.json").write_text(json.dumps(shape))
    words = "--colocate --actor-num-gpus-per-node 4 --save saved"
    found = [plan(f"{words} --expert-model-parallel-size {n}")["a checkpoint on its way to a disk"] for n in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def test_batches_and_snapshots(plan: Plan) -> None:
    """In /dev/shm: of 4 x 4 samples tokens, masks and log-probs, 9 bytes a token; and two checkpoints."""
    words = "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-max-response-len 100"
    found = plan(f"{words} --rollout-max-prompt-len 28 --trainer-snapshot-interval 1 --save saved")
    assert found["batches of 1 rollout, all of the longest"] == 4 * 4 * 128 * (4 + 1 + 4)
    assert found["two snapshots of the trainers"] == 2 * ELEMENTS * (2 + 12)
    assert plan(words)["batches of 1 rollout, all of the longest"] == 4 * 4 * 200 * (4 + 1 + 4)


def test_nodes_of_a_running_ray(plan: Plan, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers on two hosts and engines on a third; without a running Ray all on this host."""
    words = "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --num-gpus-per-node 4"
    args = options(parse, words, "--fp32 --colocate")
    assert [node.trainers for node in nodes(args, fleet_of(args))] == [8]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = nodes(args, fleet_of(args))
    assert [(n.slots, n.trainers, [slots for _, slots in n.engines]) for n in found] == [
        (range(4), 4, []),
        (range(4, 8), 4, []),
        (range(8, 12), 0, [4]),
    ]
    assert [node.has_driver for node in found] == [True, False, False]
    assert fullest(args, True)[0] == found[2]


def test_what_does_not_fit(plan: Plan, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is said with the flags that help, of the memory and of /dev/shm each; a plan that fits says nothing more."""
    monkeypatch.setattr(host_memory.device, "is_cuda", lambda: True)
    args = options(parse, "--colocate --actor-num-gpus-per-node 1 --trainer-snapshot-interval 1 --save saved")
    room = {"ram": 100 * GIB, "shared": 100 * GIB}
    monkeypatch.setattr(host_memory, "_ram", lambda: room["ram"])
    monkeypatch.setattr(host_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=room["shared"]))
    assert lines(args)[0] == "host memory at the peak, of the node that needs the most (slots 0 to 0):"
    assert not [line for line in lines(args) if line.startswith("warning")]
    assert lines(args)[-1].endswith(f"  {amount(ELEMENTS * 14)} of the 100 GiB free on its disk")
    shares = fullest(args, True)[1]
    room["ram"] = 3 * GIB
    (warning,) = [line for line in lines(args) if line.startswith("warning")]
    need = amount(sum(share.nbytes for share in shares))
    told, helps = warning.split(" of 95% of this host's memory: ")
    assert told == f"warning: about {need} do not fit into the 2.85 GiB"
    assert "drop --trainer-snapshot-interval; " in helps
    assert "train on more GPUs; " in helps
    assert "--no-offload-train, where GPUs have room" in helps
    room |= {"ram": 100 * GIB, "shared": GIB}
    (warning,) = [line for line in lines(args) if line.startswith("warning")]
    need = amount(sum(share.nbytes for share in shares if share.shared))
    assert warning.startswith(
        f"warning: about {need} do not fit into the 1 GiB of /dev/shm: drop --trainer-snapshot-interval; lower --"
    )
