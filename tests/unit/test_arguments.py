"""The whole command line: derived values, and for every bad input one line that names the flag and exit status 2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from slime.entry.arguments import describe, parse_args
from tests.command_line import QWEN3, Fails, Flags, Parse, command, refused, write_model, write_rows

NUM_GPUS = 0
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test: models, prompt data and hooks."""
    write_model(launch_directory / "moe", QWEN3_MOE)
    for name in ("aime", "gsm8k"):
        write_rows(launch_directory / f"{name}.jsonl")
    (launch_directory / "hook.py").write_text(
        "def add_arguments(parser):\n"
        "    parser.add_argument('--tool-budget', type=int, default=3)\n"
        "async def reward_func(args, sample, **kwargs):\n    return 1.0\n"
        "async def generate(args, sample, sampling_params):\n    return sample\n"
    )
    (launch_directory / "clash.py").write_text((launch_directory / "hook.py").read_text())
    return launch_directory


@pytest.mark.parametrize(
    ("words", "steps", "batch"),
    [
        ("", 1, 16),
        ("--num-steps-per-rollout 2", 2, 8),
        ("--global-batch-size 4", 4, 4),
        ("--global-batch-size 8 --num-steps-per-rollout 2", 2, 8),
    ],
)
def test_batch_equation(parse: Parse, words: str, steps: int, batch: int) -> None:
    args = parse(words)
    assert (args.num_steps_per_rollout, args.global_batch_size) == (steps, batch)
    assert args.rollout_batch_size * args.n_samples_per_prompt == batch * steps
    assert args.train_iters == 3 * steps


def test_sampling_of_a_part_of_the_tokens_is_warned_of(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    parse("--eval-top-p 0.5 --eval-top-k 3")
    parse("--rollout-top-p 0.9 --debug-rollout-only")
    assert "off policy" not in capsys.readouterr().err
    parse("--rollout-top-p 0.9 --rollout-top-k 20")
    printed = capsys.readouterr().err
    assert "--rollout-top-p 0.9: responses are sampled from the likeliest tokens only" in printed
    assert "--rollout-top-k 20: responses" in printed


def test_placements(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--rollout-num-gpus 6")
    assert (args.placement, args.rollout_num_gpus, args.num_engines) == ("colocate", 2, 2)
    assert "--rollout-num-gpus 6 is ignored with --colocate" in capsys.readouterr().err
    assert args.update_weight_transport == "tensor"
    args = parse("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", "--colocate")
    assert (args.placement, args.actor_num_gpus, args.rollout_num_gpus, args.num_engines) == ("disaggregate", 2, 4, 2)
    assert args.update_weight_transport == "distributed"
    args = parse("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 --num-gpus-per-node 2", "--colocate")
    assert args.num_engines == 2
    args = parse("--rollout-num-gpus 1 --update-weight-transport nccl", "--colocate")
    assert args.update_weight_transport == "distributed"
    args = parse("--debug-rollout-only --rollout-num-gpus 3")
    assert (args.placement, args.num_engines) == ("rollout_only", 3)
    args = parse("--load-debug-rollout-data dump/{rollout_id}.pt", "--prompt-data")
    assert (args.placement, args.num_engines, args.debug_train_only) == ("train_only", 0, True)
    args = parse("--update-weight-transport disk --run-dir out")
    assert args.update_weight_disk_dir == os.path.abspath("out/weights")


def test_run_directory(parse: Parse, directory: Path) -> None:
    assert Path(parse().run_dir).parent == directory / "outputs"
    assert parse("--save ckpt").run_dir == str(directory / "ckpt")
    assert parse("--save ckpt --run-dir elsewhere").run_dir == str(directory / "elsewhere")
    assert parse().launch_dir == str(directory)


def test_eval_data_repeated_paired_and_alone(parse: Parse, directory: Path) -> None:
    aime, gsm8k = (str(directory / f"{name}.jsonl") for name in ("aime", "gsm8k"))
    for words in ("aime aime.jsonl --eval-prompt-data gsm8k gsm8k.jsonl", "aime aime.jsonl gsm8k gsm8k.jsonl"):
        args = parse(f"--eval-interval 5 --eval-prompt-data {words}")
        assert [(d.name, d.path) for d in args.eval_datasets] == [("aime", aime), ("gsm8k", gsm8k)]
        assert args.eval_prompt_data == ["aime", aime, "gsm8k", gsm8k]
    (dataset,) = parse("--eval-interval 5 --eval-prompt-data aime.jsonl@[0:1]").eval_datasets
    assert (dataset.name, dataset.path) == ("aime", aime + "@[0:1]")
    assert args.eval_function_path == args.rollout_function_path


def test_supervised_training(parse: Parse) -> None:
    words = "--loss-type sft_loss --debug-train-only --n-samples-per-prompt 1"
    args = parse(words, "--rm-type --rollout-max-response-len")
    assert args.rollout_function_path == "slime.rollout.sft_rollout.generate_rollout"
    assert args.disable_compute_advantages_and_returns


def test_hooks_are_loaded_and_their_flags_known(parse: Parse, directory: Path, fails: Fails) -> None:
    args = parse("--custom-rm-path hook.py --custom-generate-function-path hook:generate --tool-budget 7")
    assert args.custom_rm_path == f"{directory}/hook.py:reward_func"
    assert args.custom_generate_function_path == "hook:generate"
    assert args.tool_budget == 7
    assert "conflicting option string" in fails("--custom-rm-path hook.py --custom-generate-function-path clash.py")
    assert parse("--custom-rm-path hook.py").tool_budget == 3
    assert "unknown flag --tool-budget" in fails("--tool-budget 7")


@refused(
    """
less --hf-checkpoint -> --hf-checkpoint is missing
--hf-checkpoint /no/model -> --hf-checkpoint /no/model: there is no such directory
--hf-checkpoint nobody/no-such-model -> nobody/no-such-model: no such directory, not in the Hugging
--hf-checkpoint . -> there is no config.json
less --prompt-data -> --prompt-data is missing
--prompt-data no.jsonl@[0:3] -> --prompt-data no.jsonl@[0:3]: there is no such file as no.jsonl
less --rollout-batch-size -> --rollout-batch-size is missing
less --num-rollout -> --num-rollout or --num-epoch is missing
less --rm-type -> --rm-type or --custom-rm-path is missing
--rm-type maths -> --rm-type maths: there are dapo
--rm-type remote_rm -> --rm-type remote_rm needs --rm-url
--rm-type remote_rm --rm-url me:pw@judge/score -> remote_rm needs an address in --rm-url, such as http:
--rm-type boxed_remote_rm --rm-url http://judge:80000 -> boxed_remote_rm needs an address in --rm-url
less --rollout-max-response-len -> --rollout-max-response-len is missing
--global-batch-size 5 -> --rollout-batch-size 4 x --n-samples-per-prompt 4 = 16 is not a multiple of --
--num-steps-per-rollout 3 -> = 16 is not a multiple of --num-steps-per-rollout 3
--num-steps-per-rollout 2 --global-batch-size 16 -> = 16, but --global-batch-size 16 x --num-steps
--use-dynamic-batch-size -> --use-dynamic-batch-size needs --max-tokens-per-gpu
less --colocate -> --rollout-num-gpus is missing
--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 less --colocate -> 3 rollout slots are not a multiple
--rollout-num-gpus-per-engine 12 -> 12 is more than --num-gpus-per-node 8 and not a multiple of it
--debug-rollout-only --debug-train-only -> --debug-rollout-only and --debug-train-only exclude
--use-kl-loss --ref-load /no/ref -> --ref-load /no/ref: there is no such directory
--save-interval 3 -> --save-interval 3 needs --save
--eval-interval 3 -> --eval-interval 3 needs --eval-prompt-data
--eval-prompt-data a aime.jsonl b -> --eval-prompt-data takes pairs NAME PATH, not 3 words
--eval-prompt-data a aime.jsonl a gsm8k.jsonl -> --eval-prompt-data names 'a' twice
--eval-prompt-data a no.jsonl -> --eval-prompt-data no.jsonl: there is no such file
--update-weight-transport distributed -> distributed needs separate slots
--update-weight-transport tensor --rollout-num-gpus 1 less --colocate -> tensor needs --colocate
--custom-rm-path hook.py:reward -> --custom-rm-path hook.py:reward: hook.py has no 'reward'; did you
--custom-rm-path none.py -> --custom-rm-path none.py: there is no file
--rollout-function-path slime.nowhere.fn -> --rollout-function-path slime.nowhere.fn: there is no
--tensor-model-parallel-size 4 -> 2 training slots
--transformer-impl transformer_engine --fp32 -> does not go with --fp32, in which its attention
--transformer-impl transformer_engine --bf16 --lora-rank 8 -> does not go with --lora-rank 8: drop one
--transformer-impl transformer_engine --bf16 --tp-comm-overlap -> does not go with --tp-comm-overlap
--transformer-impl inference_optimized -> --transformer-impl inference_optimized is not available yet
--lr-warmup-iters 3 -> --lr-warmup-iters 3: the learning rate would warm up for 3 optimizer steps of 3
--lr-warmup-fraction 1 -> --lr-warmup-fraction: must be below 1, not 1.0
--lr-warmup-iters 2 --lr-decay-iters 2 --num-epoch 1 less --num-rollout -> 2 optimizer steps of 2
--lr 1e-5 --min-lr 1e-4 -> --min-lr 0.0001 is above --lr 1e-05
--lr-warmup-init 1 -> --lr-warmup-init 1.0 is above --lr 1e-06
--lr-warmup-iters -1 -> --lr-warmup-iters: must be at least 0, not -1
--lr-decay-style WSD -> --lr-decay-style WSD needs --lr-wsd-decay-iters
--lr-decay-style WSD --lr-wsd-decay-iters 4 -> -iters 4: there are 3 optimizer steps after the warm-up
--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 1 -> there are 2 optimizer steps after
--end-weight-decay 0.1 -> --start-weight-decay 0.01 and --end-weight-decay 0.1 (--weight-decay
--start-weight-decay 0.1 --weight-decay-incr-style linear -> weight decay is at least 0 and does not
--weight-decay -1 -> --weight-decay: must be at least 0, not -1.0
--start-weight-decay 0.2 -> weight decay is at least 0 and does not fall
--weight-decay-incr-style cosine -> are the same; set them, or drop it
--optimizer sgd --use-distributed-optimizer -> --optimizer sgd cannot be distributed
--overlap-cpu-optimizer-d2h-h2d -> -d2h-h2d has no effect without --optimizer-cpu-offload
--no-pin-cpu-params -> --no-pin-cpu-params has no effect without --optimizer-cpu-offload
--optimizer-cpu-offload --optimizer-offload-fraction 0 -> -fraction: must be above 0, not 0.0
--exp-avg-dtype bf16 --main-params-dtype fp16 -> --main-params-dtype fp16, --exp-avg-dtype bf16: the op
--optimizer lion -> --optimizer lion: there are adam and sgd
--padded-vocab-size 299 -> --padded-vocab-size 299 is less than --vocab-size 300
--padded-vocab-size 301 --tensor-model-parallel-size 2 -> 301 is not a multiple of --tensor-model
--hf-checkpoint moe --moe-aux-loss-coeff 0 0.01 -> --moe-aux-loss-coeff 0.0 0.01 is not available
--hf-checkpoint moe --moe-z-loss-coeff 0.1 -> --moe-z-loss-coeff 0.1 is not available yet
--attention-dropout 0.1 -> --attention-dropout 0.1 is not available yet
--hidden-dropout 0.1 -> --hidden-dropout 0.1 is not available yet
--apply-layernorm-1p -> --apply-layernorm-1p is not available yet
--post-self-attn-layernorm -> --post-self-attn-layernorm is True, config.json means False
--post-mlp-layernorm -> --post-mlp-layernorm is True, config.json means False
--enable-experimental -> --enable-experimental is not available yet
--overlap-moe-expert-parallel-comm -> --overlap-moe-expert-parallel-comm is not available yet
--delay-wgrad-compute -> --delay-wgrad-compute is not available yet
--batch-invariant-mode -> --batch-invariant-mode is not available yet
--fine-grained-activation-offloading -> --fine-grained-activation-offloading is not available yet
--qk-clip -> --qk-clip is not available yet
--log-num-zeros-in-grad -> --log-num-zeros-in-grad is not available yet
--log-max-attention-logit -> --log-max-attention-logit is not available yet
--symmetric-ar-type two_shot -> --symmetric-ar-type two_shot is not available yet
--use-kitchen -> --use-kitchen is not available yet
--test-mode -> --test-mode is not available yet
--enable-cuda-graph -> --enable-cuda-graph is not available yet
--cuda-graph-impl local -> --cuda-graph-impl local is not available yet
--num-distributed-optimizer-instances 2 -> --num-distributed-optimizer-instances 2 is not available yet
--cpu-offloading -> --cpu-offloading needs --transformer-impl transformer_engine
--window-size 128,0 -> --window-size is not available yet
--softmax-type off-by-one -> --softmax-type is not available yet
--offload -> --offload is not available: use --offload-train
--offload-rollout --rollout-num-gpus 1 less --colocate -> --offload-rollout needs --colocate
--rotary-scaling-factor 4 --rope-scaling-factor 8 -> --rotary-scaling-factor 4.0 and --rope-scaling-fac
--save-debug-rollout-data {rollout}/{rollout_id}.pt -> only {rollout_id} is filled in
--load-debug-rollout-data {}.pt -> --load-debug-rollout-data {}.pt: only {rollout_id}
--save-hf {rollout_id -> --save-hf {rollout_id: only {rollout_id}
--save-hf {rollout_id.x} -> --save-hf {rollout_id.x}: only {rollout_id}
--save-debug-train-data {rollout_id}_{rank:{rollout_id}} -> {rank:{rollout_id}}: write {rank}, or
--hf-checkpoint bare -> bare: there are no *.safetensors in it: download or copy
--hf-checkpoint bare --debug-rollout-only -> bare: there are no *.safetensors in it
--hf-checkpoint moe --expert-tensor-parallel-size 3 -> not a multiple of --expert-tensor-parallel-size 3
--rolout-batch-size 4 -> unknown flag --rolout-batch-size; did you mean --rollout-batch-size?
"""
)
def test_bad_input_is_one_line_with_status_2(fails: Fails, directory: Path, flags: Flags, message: str) -> None:
    (directory / "bare").mkdir()
    (directory / "bare" / "config.json").write_text(json.dumps(QWEN3))
    assert message.replace("{directory}", str(directory)) in fails(*flags)


@pytest.mark.parametrize(
    "place", ["{rollout_id:>99999999999}", "{rollout_id:100}", "{rollout_id:.99999f}", "{rollout_id!r}"]
)
@pytest.mark.parametrize(
    "flag",
    ["--save-hf", "--save-lora", "--load-debug-rollout-data", "--save-debug-rollout-data", "--save-debug-train-data"],
)
def test_numbers_of_rollouts_in_paths_have_few_digits(fails: Fails, flag: str, place: str) -> None:
    expected = f"{flag} {place}: {place}: write {{rollout_id}}, or {{rollout_id:0"
    assert expected in fails(f"{flag} {place} --lora-rank 4")


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("", "auto"),
        ("--transformer-impl transformer_engine --bf16", "fused"),
        ("--transformer-impl transformer_engine --bf16 --attention-backend flash", "flash"),
    ],
)
def test_transformer_engine_computes_attention_by_cudnn(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, words: str, backend: str
) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert parse(words).attention_backend == backend


def test_transformer_engine_must_be_installed(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    words = "--transformer-impl transformer_engine --bf16"
    assert "engine: it cannot be imported (ModuleNotFoundError: No module named 'transformer_engine" in fails(words)


@pytest.mark.parametrize(
    "words",
    [
        "--weight-decay-incr-style cosine --end-weight-decay 0.1",
        "--start-weight-decay 0.1 --end-weight-decay 0.1",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-iters 1",
        "--cuda-graph-impl none --num-distributed-optimizer-instances 1 --exp-avg-dtype fp32",
        "--moe-token-dispatcher-type flex --moe-enable-deepep",
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --no-pin-cpu-grads --no-pin-cpu-params",
        "--use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-sq-dtype fp32",
    ],
)
def test_what_a_trainer_takes(parse: Parse, words: str) -> None:
    parse(words)


def test_sgd_is_not_distributed(parse: Parse) -> None:
    assert parse().use_distributed_optimizer is True
    assert parse("--optimizer sgd").use_distributed_optimizer is False


def test_a_run_that_only_evaluates_has_no_schedule(parse: Parse) -> None:
    words = "--num-rollout 0 --lr-warmup-iters 10 --eval-interval 1 --eval-prompt-data aime.jsonl"
    assert parse(words, "--num-rollout").train_iters == 0


def test_save_paths_are_templates(parse: Parse, directory: Path) -> None:
    for width, number in (("d", "7"), ("06", "000007"), ("0>3", "007"), ("010d", "0000000007"), ("99d", "7".rjust(99))):
        assert parse(f"--save-hf hf/{{rollout_id:{width}}}").save_hf.format(rollout_id=7) == f"{directory}/hf/{number}"
    args = parse("--save-hf hf/{rollout_id:05d} --save-debug-rollout-data {{d}}/{rollout_id:03d}.pt")
    assert args.save_hf.format(rollout_id=7) == f"{directory}/hf/00007"
    assert args.save_debug_rollout_data.format(rollout_id=7) == f"{directory}/{{d}}/007.pt"
    assert parse("--save-hf hf").save_hf == str(directory / "hf")


@pytest.mark.parametrize(
    ("words", "rollout", "evaluation"),
    [
        ("", 2041, 2041),
        ("--rollout-max-prompt-len 100", 100, 100),
        ("--rollout-max-prompt-len 9999", 2041, 2041),
        ("--rollout-max-context-len 512 --rollout-max-prompt-len 600", 511, 511),
        ("--rollout-max-context-len 512 --eval-max-context-len 1024", 511, 1023),
        ("--rollout-max-prompt-len 100 --eval-max-prompt-len 3000", 100, 2041),
        ("--rollout-max-prompt-len 600 --rollout-max-context-len 512 --eval-max-context-len 700", 511, 600),
    ],
)
def test_prompts_leave_room_for_a_response(parse: Parse, words: str, rollout: int, evaluation: int) -> None:
    """Of the model's 2048 tokens the engine keeps six."""
    args = parse(words)
    assert (args.rollout_max_prompt_len, args.eval_max_prompt_len) == (rollout, evaluation)


def test_the_second_of_two_ways_to_say_one_thing_is_told_of(launch_directory: Path, parse: Parse) -> None:
    """And only where it goes unheeded: a teacher's function gives the reward of --rm-type."""
    (launch_directory / "mine.py").write_text("def reward_func(args, sample, **kwargs): ...\n")
    args = parse("--rm-type math --custom-rm-path mine.py --num-rollout 20 --num-epoch 1")
    assert (args.num_epoch, args.option_warnings) == (
        None,
        [
            "--num-epoch 1 is ignored: --num-rollout 20 says how long the run is",
            "--rm-type math is ignored: rewards are those of --custom-rm-path",
        ],
    )
    assert parse("--num-epoch 1", "--num-rollout").option_warnings == []
    assert parse("--custom-rm-path mine.py", "--rm-type").option_warnings == []


def test_conversations_are_limited_only_by_flags(parse: Parse) -> None:
    words = "--loss-type sft_loss --debug-train-only"
    assert parse(words).rollout_max_prompt_len is None
    assert parse(f"{words} --rollout-max-context-len 512").rollout_max_prompt_len == 511


def test_describe_is_yaml_without_secrets(directory: Path) -> None:
    (directory / "c.yaml").write_text("judge_secret: s3cret\njudge: {api_key: s3cret, url: here}\n")
    words = "--wandb-key s3cret --sglang-ssl-keyfile-password s3cret --custom-config-path c.yaml"
    environment = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "AWS_SECRET_ACCESS_KEY": "s3cret"}
    flags = ["--train-env-vars", json.dumps(environment), "--input-key", "question", "--rollout-stop-token-ids", "7"]
    args = parse_args(command(f"--use-wandb {words} --sglang-log-level info --dry-run") + flags)
    args.sglang_router_api_key = "t0ken"
    text = describe(args)
    assert "s3cret" not in text
    assert "t0ken" not in text
    sections: dict[str, dict[str, Any]] = yaml.safe_load(text)
    assert sections["batches"]["global_batch_size"] == 16
    assert sections["cluster"]["no_api_keys"] is False
    assert sections["tracking"]["wandb_key"] == "<redacted>"
    assert sections["cluster"]["train_env_vars"] == dict.fromkeys(environment, "<redacted>")
    assert sections["data"]["input_key"] == "question"
    assert sections["rollout"]["rollout_stop_token_ids"] == [7]
    assert sections["megatron and others"]["judge"] == {"api_key": "<redacted>", "url": "here"}
    expected = ["--ssl-keyfile-password", "<redacted>", "--log-level", "info"]
    assert sections["sglang"]["sglang_cli"] == expected
    assert sections["derived"]["placement"] == "colocate"
    assert sections["versions"]["megatron-core"]


def test_the_quick_start_documents_command(parse: Parse, directory: Path) -> None:
    """The arrays of the quick start, on the test's model."""
    words = """
        --ref-load model --load ckpt --save ckpt --save-interval 20
        --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler
        --num-rollout 3000 --rollout-batch-size 16 --n-samples-per-prompt 8 --num-steps-per-rollout 1
        --global-batch-size 128 --rollout-max-response-len 8192 --rollout-temperature 0.8 --balance-data
        --eval-interval 5 --eval-prompt-data aime aime.jsonl --n-samples-per-eval-prompt 16
        --eval-max-response-len 16384 --eval-top-p 0.7
        --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2
        --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --use-dynamic-batch-size --max-tokens-per-gpu 4608
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
        --eps-clip 0.2 --eps-clip-high 0.28
        --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
        --rollout-num-gpus-per-engine 2 --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
    """
    args = parse(words, "--colocate")
    assert (args.data_parallel_size, args.num_engines, args.global_batch_size) == (1, 2, 128)
    assert (args.eps_clip, args.eps_clip_high, args.kl_loss_type, args.kl_loss_coef) == (0.2, 0.28, "low_var_kl", 0)
    assert (args.lr_decay_style, args.adam_beta2, args.weight_decay) == ("constant", 0.98, 0.1)
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 1)
    assert args.ref_load == str(directory / "model")


def test_an_interrupt_while_flags_are_read_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*values: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slime.entry.arguments.assemble", interrupted)
    with pytest.raises(SystemExit) as stop:
        parse_args([])
    assert stop.value.code == 130
    assert capsys.readouterr() == ("", "")
