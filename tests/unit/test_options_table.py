"""Every flag that a user of the upstream system may write: it parses, or one line says why not and what to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime.entry.arguments import assemble
from slime.options.flags.parser import StrictParser
from slime.options.flags.unavailable import (
    NOT_YET,
    REPLACED,
    UNAVAILABLE_VALUES,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_VALUES,
    explain_flag,
)
from tests.command_line import Fails, Flags, refused

NUM_GPUS = 0
UPSTREAM = """
--actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --allgather-cp --apply-chat-template
--apply-chat-template-kwargs --async-save --balance-by-flops --balance-data --buffer-filter-path
--calculate-per-token-loss --check-weight-update-equal --ci-disable-kl-checker --ci-load-grad-norm
--ci-metric-checker-key --ci-save-grad-norm --ci-test --ci-train-rollout-logprob-abs-diff-threshold --clip-grad
--colocate --critic-load --critic-lr --critic-num-nodes --critic-save --custom-advantage-function-path
--custom-config-path --custom-convert-samples-to-train-data-path --custom-eval-rollout-log-function-path
--custom-generate-function-path --custom-loss-function-path --custom-megatron-before-log-prob-hook-path
--custom-megatron-before-train-step-hook-path --custom-megatron-init-path --custom-model-provider-path
--custom-pg-loss-reducer-function-path --custom-reward-post-process-path --custom-rm-path
--custom-rollout-log-function-path --custom-tis-function-path --custom-update-weight-post-write-path
--data-pad-size-multiplier --data-source-path --debug-rollout-only --debug-train-only
--disable-compute-advantages-and-returns --disable-grpo-std-normalization --disable-rewards-normalization
--disable-rollout-global-dataset --disable-wandb-random-suffix --disable-weights-backuper --distributed-backend
--distributed-timeout-minutes --dump-details --dynamic-sampling-filter-path --enable-mtp-training --entropy-coef
--eps-clip --eps-clip-c --eps-clip-high --eval-config --eval-function-path --eval-input-key --eval-interval
--eval-label-key --eval-max-context-len --eval-max-prompt-len --eval-max-response-len --eval-min-new-tokens
--eval-prompt-data --eval-reward-key --eval-temperature --eval-tool-key --eval-top-k --eval-top-p
--fetch-trajectory-retry-times --freeze-indexer --freeze-params-name-list --gamma --get-mismatch-metrics
--global-batch-size --group-rm --hf-checkpoint --http-proxy --input-key --keep-old-actor --kl-coef --kl-loss-coef
--kl-loss-type --label-key --lambd --load --load-debug-rollout-data --load-debug-rollout-data-subsample
--load-forge-rollout-data --log-correct-samples --log-multi-turn --log-passrate --log-probs-chunk-size
--log-probs-max-tokens-per-gpu --log-reward-category --loss-mask-type --loss-type --lr
--mask-offpolicy-in-partial-rollout --max-tokens-per-gpu --megatron-config-path --megatron-deepgemm-forward-layers
--megatron-deepgemm-forward-modules --megatron-deepgemm-moe-forward-layers --megatron-deepgemm-moe-forward-modules
--megatron-to-hf-mode --memory-recorder --memory-snapshot-dir --memory-snapshot-num-steps --metadata-key
--micro-batch-size --min-batch-collection-ratio --model-name --mtp-loss-scaling-factor --mtp-num-layers
--multimodal-keys --n-samples-per-eval-prompt --n-samples-per-prompt --no-offload-rollout --no-offload-train
--no-save-optim --normalize-advantages --num-critic-only-steps --num-epoch --num-gpus-per-node --num-rollout
--num-steps-per-rollout --offload --offload-rollout --offload-train --only-train-params-name-list --opd-kl-coef
--opd-teacher-ckpt-step --opd-teacher-load --opd-type --opsm-delta --over-sampling-batch-size --padded-vocab-size
--partial-rollout --prefill-num-servers --profile-target --prompt-data --qkv-format --qwen-gdn-backend
--recompute-loss-function --record-memory-history --ref-ckpt-step --ref-load --ref-update-interval --release-train
--reset-optimizer-states --reward-key --rm-type --rm-url --rollout-all-samples-process-path --rollout-batch-size
--rollout-buffer-url --rollout-data-postprocess-path --rollout-data-transport --rollout-external-engine-addrs
--rollout-function-path --rollout-health-check-first-wait --rollout-health-check-interval
--rollout-health-check-timeout --rollout-max-context-len --rollout-max-prompt-len --rollout-max-response-len
--rollout-num-gpus --rollout-num-gpus-per-engine --rollout-sample-filter-path --rollout-sample-hook-path
--rollout-seed --rollout-shuffle --rollout-skip-special-tokens --rollout-stop --rollout-stop-token-ids
--rollout-task-type --rollout-temperature --rollout-top-k --rollout-top-p --save --save-debug-rollout-data
--save-debug-train-data --save-hf --save-interval --seed --sglang-config --sglang-router-ip --sglang-router-port
--sglang-router-request-timeout-secs --sglang-server-concurrency --skip-eval-before-train --slime-router-timeout
--start-rollout-id --tb-experiment-name --tb-project-name --tis-clip --tis-clip-low --tool-key --train-backend
--train-env-vars --train-memory-margin-bytes --true-on-policy-mode --update-weight-buffer-size
--update-weight-delta-checksum --update-weight-delta-encoding --update-weight-disk-dir
--update-weight-disk-keep-files --update-weight-local-checkpoint-dir --update-weight-mode --update-weight-transport
--update-weights-interval --use-distributed-post --use-dynamic-batch-size --use-dynamic-global-batch-size
--use-fault-tolerance --use-kl-loss --use-opd --use-opsm --use-rollout-entropy --use-rollout-logprobs
--use-rollout-routing-replay --use-routing-replay --use-slime-router --use-stateless-adam --use-tensorboard --use-tis
--use-unbiased-kl --use-wandb --value-clip --wandb-always-use-train-step --wandb-dir --wandb-group --wandb-host
--wandb-key --wandb-mode --wandb-project --wandb-run-id --wandb-team
"""
"""slime's own flags in the upstream system, and those that it once had."""

DOCUMENTS = """
--actor-num-gpus-per-node --actor-num-nodes --adam-beta1 --adam-beta2 --advantage-estimator --apply-chat-template
--async-buffer-size --balance-data --bf16 --buffer-filter-path --calculate-per-token-loss --colocate
--context-parallel-size --custom-generate-function-path --custom-rm-path --dynamic-sampling-filter-path
--entropy-coef --eps-clip --eps-clip-high --eval --eval-interval --eval-max-response-len --eval-prompt-data
--eval-temperature --eval-top-p --expert-model-parallel-size --expert-tensor-parallel-size --ffn-hidden-size
--global-batch-size --group-rm --hf-checkpoint --hidden-size --initial-megatron-checkpoint --input-key --kl-loss-coef
--kl-loss-type --label-key --load --lr --lr-decay-style --max-position-embeddings --max-tokens-per-gpu --max-turns
--metadata-key --micro-batch-size --n-samples-per-eval-prompt --n-samples-per-prompt --no-position-embedding
--normalization --num-attention-heads --num-layers --num-query-groups --num-rollout --num-steps-per-rollout
--optimizer --over-sampling-batch-size --partial-rollout --pipeline-model-parallel-size --prompt-data
--recompute-granularity --recompute-method --recompute-num-layers --ref-load --rm-type --rollout-batch-size
--rollout-max-response-len --rollout-num-gpus --rollout-num-gpus-per-engine --rollout-shuffle --rollout-temperature
--rotary-base --rotary-percent --save --save-interval --seq-length --sequence-parallel --sglang-context-length
--sglang-disable-cuda-graph --sglang-log-level --sglang-mem-fraction-static --sglang-tp-size --swiglu
--tensor-model-parallel-size --tis-threshold --tokenizer-type --true-on-policy-mode
--untie-embeddings-and-output-weights --update-weights-interval --use-dynamic-batch-size --use-kl-loss --use-tis
--weight-decay
"""
"""The flags of the quick start and of the API reference."""

COMMON_MEGATRON = """
--accumulate-allreduce-grads-in-fp32 --adam-eps --attention-backend --attention-dropout --attention-softmax-in-fp32
--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --fp16 --hidden-dropout --init-method-std
--lr-decay-iters --lr-warmup-fraction --lr-warmup-iters --min-lr --moe-token-dispatcher-type
--num-layers-per-virtual-pipeline-stage --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --overlap-grad-reduce
--overlap-param-gather --transformer-impl --use-distributed-optimizer --use-precision-aware-optimizer
"""


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    parser = StrictParser(prog="train.py")
    assemble(parser, [], {})
    return set(parser._option_string_actions)


@pytest.mark.parametrize("table", [UPSTREAM, DOCUMENTS, COMMON_MEGATRON], ids=["upstream", "documents", "megatron"])
def test_every_flag_parses_or_says_what_to_do(table: str, known_flags: set[str]) -> None:
    unknown = [flag for flag in table.split() if flag not in known_flags and explain_flag(flag) is None]
    assert not set(unknown) - set(WITHOUT_EFFECT)


def test_every_flag_of_the_model_scripts_parses(known_flags: set[str]) -> None:
    shapes = json.loads(Path(__file__).with_name("test_options_shapes.json").read_text())
    assert len(shapes) == 39
    flags = {word for words in shapes.values() for word in words.split() if word.startswith("--")}
    assert not flags - known_flags


def test_no_flag_is_both_available_and_not(known_flags: set[str]) -> None:
    later = " ".join(NOT_YET.values()).split()
    assert not {*later, *REPLACED, *WITHOUT_EFFECT} & known_flags
    assert {flag for flag, _ in UNAVAILABLE_VALUES} <= known_flags
    assert {flag for flag, _ in WITHOUT_EFFECT_VALUES} <= set(REPLACED)
    assert len(later) == len(set(later))
    assert len({*later, *REPLACED, *WITHOUT_EFFECT}) == len(later) + len(REPLACED) + len(WITHOUT_EFFECT)


def test_what_to_write_instead_is_available(known_flags: set[str]) -> None:
    for reason in (*REPLACED.values(), *NOT_YET, *WITHOUT_EFFECT.values()):
        assert set(re.findall(r"--[a-z][-a-z]+", reason)) <= known_flags | {"--help"}, reason


@refused(
    """
--release-train -> --release-train is not available yet in this version
--rollout-task-type 9 --use-distributed-post -> --rollout-task-type is not available yet in this version: nothing
--window-size 9 --megatron-config-path 1 -> has; --megatron-config-path is not available yet in this version: nothing
--sglang-disaggregation-mode prefill -> use --prefill-num-servers, or worker_type in --sglang-config
--sglang-tp-size 2 -> --sglang-tp-size is not available: use --rollout-num-gpus-per-engine
--slime-router-timeout 3 -> the router is sglang-router
--use-critic -> --advantage-estimator ppo has a critic; drop it
--no-load-optim -> drop it: --ref-load starts from a checkpoint's weights alone
--sglang-enable-ep-moe -> --sglang-enable-ep-moe is not available: use --sglang-ep-size N
--sglang-router-policy random -> --sglang-router-policy is not available: use --router-policy
--log-probs-chunk-size -1 -> logits of all tokens never exist at once; drop it
--train-backend fsdp -> --train-backend fsdp is not available: Megatron trains
--update-weight-mode=delta -> --update-weight-mode delta is not available yet
"""
)
@pytest.mark.usefixtures("launch_directory")
def test_an_unavailable_flag_is_one_line(flags: Flags, message: str, fails: Fails) -> None:
    assert message in fails(*flags)
