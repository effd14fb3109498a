"""Settings of Megatron's that a run does not heed are told of when flags are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron import patches
from slime.options import training
from slime.options.checks.unheeded import UNHEEDED
from tests.command_line import LATENT, Flags, Parse, refused, write_model
from tests.parallel import tiny
from tests.releases import GONE, gone_flags
from tests.shipped import CONFIGS

patches.install()

from slime.backends.megatron.model import transformer_config  # noqa: E402

NUM_GPUS = 0
pytestmark = pytest.mark.usefixtures("launch_directory")

NORMS, EXPERTS = "norms are torch's", "experts get their tokens by alltoall, with the same results"
FUSION = "products that make gradients of slime's own linear layers add them in float32, and no others"
LOG_PROBS, OWN = "losses are made of slime's own log-probs", "experts and their activation are slime's own"
PINNED = "--optimizer-cpu-offload --no-pin-cpu-params"


@refused(
    f"""
--persist-layer-norm --no-masked-softmax-fusion -> --persist-layer-norm {NORMS}
--memory-efficient-layer-norm -> --memory-efficient-layer-norm {NORMS}
--no-gradient-accumulation-fusion -> --no-gradient-accumulation-fusion {FUSION}
--masked-softmax-fusion -> --masked-softmax-fusion attention is one kernel, its softmax a part of it
--apply-rope-fusion -> --apply-rope-fusion a kernel of slime's own rotates queries and keys
--random-weights --no-initialization
    -> --no-initialization weights are loaded, but for those of --random-weights, which are made
--no-variable-seq-lengths -> --no-variable-seq-lengths sequences are packed as long as they are
--moe-token-dispatcher-type flex --moe-enable-deepep --moe-deepep-num-sms 24
    -> --moe-token-dispatcher-type flex {EXPERTS}
    & --moe-enable-deepep {EXPERTS}
    & --moe-deepep-num-sms 24 it is of the dispatcher flex, and experts get their tokens by alltoall
--true-on-policy-mode --attention-backend flash -> --attention-backend flash true on-policy mode has the engine's
--no-attention-softmax-in-fp32 --cp-comm-type p2p
    -> --no-attention-softmax-in-fp32 attention computes its softmax in float32
    & --cp-comm-type p2p context-parallel ranks gather keys and values
--sequence-parallel -> --sequence-parallel with --tensor-model-parallel-size 1 there is nothing to divide
--no-overlap-p2p-communication --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    -> --no-overlap-p2p-communication stages overlap what they send if they are interleaved, and only then
--no-batch-p2p-comm -> --no-batch-p2p-comm stages batch what they send unless they are interleaved
--cross-entropy-loss-fusion --cross-entropy-fusion-impl te
    -> --cross-entropy-loss-fusion {LOG_PROBS}
    & --cross-entropy-fusion-impl te {LOG_PROBS}
--tp-comm-overlap -> --tp-comm-overlap layers of Transformer Engine do it, and no others
--moe-use-legacy-grouped-gemm -> --moe-use-legacy-grouped-gemm {OWN}
--use-precision-aware-optimizer
    -> --use-precision-aware-optimizer the optimizer keeps all in float32, in which its steps are the same
{PINNED} --no-pin-cpu-grads
    -> --no-pin-cpu-grads gradients stay in the device's buffers; --no-pin-cpu-params is for what
    --optimizer-cpu-offload keeps in host memory
--data-parallel-sharding-strategy optim
    -> --data-parallel-sharding-strategy optim the distributed optimizer shards optimizer state; there is no FSDP
    backend
--hierarchical-context-parallel-sizes 2 2
    -> --hierarchical-context-parallel-sizes 2 2 context parallelism has one level
--seq-length 4096 -> --seq-length 4096 sequences have lengths of their own; --rollout-max-context-len limits them
"""
)
def test_flags_that_mean_nothing_are_told_of(flags: Flags, message: str, parse: Parse) -> None:
    """Only where the run does something else than they say; several warnings stand in the table with & between them."""
    if gone_flags() & set(" ".join(flags).split()):
        pytest.skip("this column's releases have no such flag")
    warnings = [line.replace(" is ignored: ", " ") for line in parse(*flags).option_warnings]
    assert " & ".join(warnings) == message


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--no-rope-fusion",
        "--no-initialization",
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall",
        "--attention-backend auto --attention-softmax-in-fp32 --cp-comm-type all_gather",
        "--sequence-parallel --tensor-model-parallel-size 2",
        "--no-overlap-p2p-communication",
        "--use-torch-optimizer-for-cpu-offload",
        PINNED,
        "--debug-rollout-only --attention-backend flash --persist-layer-norm",
    ],
)
def test_nothing_is_told_of_flags_that_say_what_is_done(words: str, parse: Parse) -> None:
    """A run without trainers has no use for any."""
    assert parse(words).option_warnings == []


def test_they_are_told_of_in_the_words_of_others(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    parse("--cross-entropy-fusion-impl te")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        ": warning: --cross-entropy-fusion-impl te is ignored: losses are made of slime's own log-probs"
    )


def test_a_files_settings_are_flags(launch_directory: Path, parse: Parse) -> None:
    (launch_directory / "more.yaml").write_text("accumulate_allreduce_grads_in_fp32: false\npersist_layer_norm: true\n")
    words = "--custom-config-path more.yaml"
    assert [line.partition(" is ignored")[0] for line in parse(words).option_warnings] == ["--persist-layer-norm"]
    assert parse(f"{words} --bf16", without="--fp32").option_warnings[1] == (
        "--no-accumulate-allreduce-grads-in-fp32 is ignored: gradients of bfloat16 are always summed in float32"
    )


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--gradient-accumulation-fusion --attention-backend flash", []),
        ("--no-gradient-accumulation-fusion", ["--no-gradient-accumulation-fusion"]),
        ("--masked-softmax-fusion", ["--masked-softmax-fusion"]),
    ],
)
def test_transformer_engine_heeds_more(
    words: str, left: list[str], parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "import_transformer_engine", lambda: None)
    args = parse(f"--transformer-impl transformer_engine --bf16 {words}", without="--fp32")
    assert [line.partition(" is ignored")[0] for line in args.option_warnings] == left


def test_a_model_of_the_users_may_heed_more(launch_directory: Path, parse: Parse) -> None:
    """What slime's own parts do in place of Megatron's does not hold for it; what is overwritten does."""
    (launch_directory / "mine.py").write_text("def model(pre_process=True, post_process=True, vp_stage=None): ...\n")
    args = parse("--custom-model-provider-path mine.py:model --attention-backend flash --persist-layer-norm")
    assert [line.partition(" is ignored")[0] for line in args.option_warnings] == ["--persist-layer-norm"]


def test_latent_attention_has_no_use_for_widths_of_heads(launch_directory: Path, parse: Parse) -> None:
    assert parse("--kv-channels 32 --no-add-qkv-bias").option_warnings == []
    write_model(launch_directory / "model", LATENT)
    (line,) = parse("--kv-channels 32 --no-add-qkv-bias").option_warnings
    assert line == "--kv-channels 32 is ignored: multi-latent attention has widths of its own"


def test_every_setting_of_the_table_can_be_given(parse: Parse) -> None:
    names = [name for row in UNHEEDED for name in row.names.split()]
    assert len(set(names)) == len(names)
    assert {name for name in names if not hasattr(parse(), name)} == GONE & set(names)


OVERWRITTEN: dict[str, Any] = {
    **dict.fromkeys(("persist_layer_norm", "masked_softmax_fusion", "apply_rope_fusion"), True),
    **dict.fromkeys(("moe_permute_fusion", "use_cpu_initialization", "overlap_p2p_comm"), True),
    **dict.fromkeys(("variable_seq_lengths", "moe_grouped_gemm", "batch_p2p_comm"), False),
    **{"perform_initialization": True, "moe_token_dispatcher_type": "allgather", "moe_enable_deepep": True},
}


def test_the_model_does_what_the_table_says() -> None:
    """Where it overwrites what is given, with the value that the table has for what the run does."""
    args = tiny.arguments(CONFIGS / "qwen3-30B-A3B", random_weights=False, **OVERWRITTEN)
    config, rows = transformer_config(args), {row.names: row.does for row in UNHEEDED}
    does = {name: rows[name](args) if callable(rows[name]) else rows[name] for name in OVERWRITTEN}
    assert {name: getattr(config, name) for name in OVERWRITTEN} == does
    assert [name for name, value in does.items() if value == OVERWRITTEN[name]] == []
