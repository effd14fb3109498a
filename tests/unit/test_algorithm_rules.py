"""Options of algorithms on the command line: defaults, what they imply, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.entry.arguments import parse_args
from slime.options.errors import OptionError
from slime.options.flags.schema import flag_named
from slime.options.training import check_schedule, critic_options, warmup_and_decay_steps
from tests.command_line import Fails, Flags, Parse, command, refused

NUM_GPUS = 0
PPO = "--advantage-estimator ppo"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test."""
    functions = "".join(f"def {name}(*_, **__): ...\n" for name in ("run", *HOOKS.values()))
    (launch_directory / "functions.py").write_text(functions)
    return launch_directory


HOOKS = {
    "custom_reward_post_process_path": "post_process_rewards",
    "custom_advantage_function_path": "compute_advantages",
    "custom_pg_loss_reducer_function_path": "get_pg_loss_reducer",
}
"""Hooks that go with the default loss, and the name that is looked for in a bare file."""

DEFAULTS: dict[str, Any] = {
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "ref_update_interval": None,
    "only_train_params_name_list": None,
    "freeze_params_name_list": None,
    "gamma": 1.0,
    "lambd": 1.0,
    "normalize_advantages": False,
    "disable_grpo_std_normalization": False,
    "disable_rewards_normalization": False,
    "disable_compute_advantages_and_returns": False,
    "calculate_per_token_loss": False,
    "loss_constant_length": None,
    "custom_loss_function_path": None,
    **dict.fromkeys(HOOKS),
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_level": "token",
    "tis_mode": "clip",
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "use_rs": False,
    "rs_level": "geometric",
    "rs_upper_bound": 2.0,
    "rs_lower_bound": 0.5,
    "rs_veto_threshold": None,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "mismatch_threshold": 0.1,
    "stop_on_mismatch": False,
    "value_clip": 0.2,
    "num_critic_only_steps": 0,
    "critic_lr": None,
    "critic_lr_warmup_iters": None,
    "critic_load": None,
    "critic_save": None,
    "use_critic": False,
    "needs_reference": False,
    "reward_baseline": "mean",
    "reward_std": True,
    "ci_test": False,
    "ci_disable_kl_checker": False,
    "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
}


def test_defaults(parse: Parse) -> None:
    args = parse()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("words", "derived"),
    [
        ("--advantage-estimator gspo", {"reward_baseline": "mean", "reward_std": True}),
        ("--advantage-estimator cispo", {"reward_baseline": "mean", "reward_std": True}),
        ("--advantage-estimator rloo", {"reward_baseline": "leave_one_out", "reward_std": False}),
        (
            "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
            {"reward_baseline": "mean", "reward_std": False},
        ),
        (
            "--advantage-estimator reinforce_plus_plus --normalize-advantages",
            {"reward_baseline": None, "reward_std": False},
        ),
        (PPO, {"reward_baseline": None, "reward_std": False, "use_critic": True}),
        ("--disable-grpo-std-normalization", {"reward_baseline": "mean", "reward_std": False}),
        ("--disable-rewards-normalization --n-samples-per-prompt 1", {"reward_baseline": None}),
        (
            "--loss-constant-length 64 --disable-grpo-std-normalization",
            {"loss_constant_length": 64, "reward_std": False},
        ),
        ("--use-tis --tis-threshold 0.9", {"use_tis": True, "tis_clip": 0.9}),
        ("--use-tis --tis-clip 5 --tis-clip-low 0.5 --tis-mode mask", {"tis_clip": 5.0, "tis_mode": "mask"}),
        ("--use-rs --rs-level sequence --rs-veto-threshold 1e-4", {"rs_level": "sequence", "rs_veto_threshold": 1e-4}),
        ("--eps-clip 0.1", {"eps_clip_high": 0.1}),
        ("--eps-clip 0.1 --eps-clip-high 0.28 --eps-clip-c 3", {"eps_clip_high": 0.28, "eps_clip_c": 3.0}),
        ("--use-kl-loss --ref-load model", {"needs_reference": True, "kl_loss_coef": 0.0}),
        ("--kl-coef 0.1 --ref-load model", {"needs_reference": True}),
        ("--loss-type custom_loss --custom-loss-function-path functions.py:run", {"use_critic": False}),
        *(
            (
                f"--loss-type custom_loss --custom-loss-function-path functions.py:run {PPO} {more}",
                {"use_critic": False},
            )
            for more in (
                "--custom-advantage-function-path functions.py:run",
                "--disable-compute-advantages-and-returns",
            )
        ),
        (f"--n-samples-per-prompt 1 {PPO}", {"use_critic": True}),
        ("--n-samples-per-prompt 1 --custom-advantage-function-path functions.py:run", {}),
        ("--advantage-estimator reinforce_plus_plus --custom-advantage-function-path functions.py:run", {}),
        (
            f"{PPO} --critic-lr 1e-5 --critic-lr-warmup-iters 1 --num-critic-only-steps 2",
            {"critic_lr": 1e-5, "critic_lr_warmup_iters": 1, "num_critic_only_steps": 2},
        ),
        ("--use-rollout-logprobs --use-opsm", {"use_rollout_logprobs": True}),
        ("--stop-on-mismatch --mismatch-threshold 0.02", {"mismatch_threshold": 0.02, "stop_on_mismatch": True}),
    ],
)
def test_what_options_imply(words: str, derived: dict[str, Any], parse: Parse) -> None:
    args = parse(words)
    assert {name: getattr(args, name) for name in derived} == derived


@pytest.mark.parametrize(("name", "function"), HOOKS.items())
def test_functions_in_a_bare_file(name: str, function: str, directory: Path) -> None:
    args = parse_args([*command(), flag_named(name), "functions.py"])
    assert getattr(args, name) == f"{directory}/functions.py:{function}"


@refused(
    f"""
--overlong-penalty-factor 2 -> --overlong-penalty-factor 2.0 has no effect without --overlong-buffer-len
--overlong-buffer-len 9 --rollout-max-response-len 8
    -> --overlong-buffer-len 9 is more than --rollout-max-response-len 8
--overlong-buffer-len 4 --loss-type sft_loss -> --overlong-buffer-len 4 has no effect with --loss-type sft
--overlong-buffer-len 0 -> argument --overlong-buffer-len: must be at least 1, not 0
--overlong-buffer-len 4 --overlong-penalty-factor 0 -> argument --overlong-penalty-factor: must be above 0
--overlong-buffer-len 4 --custom-reward-post-process-path functions.py:run
    -> --overlong-buffer-len 4 has no effect with --custom-reward-post-process-path, which makes the rewards
--kl-loss-coef 0.1 -> --kl-loss-coef 0.1 has no effect without --use-kl-loss
--use-unbiased-kl -> --use-unbiased-kl has no effect without --use-kl-loss
--kl-coef 0.1 -> --kl-coef 0.1 needs --ref-load
--ref-update-interval 2 -> --ref-update-interval 2 needs --use-kl-loss or --kl-coef, which have a reference
--ref-update-interval 0 -> argument --ref-update-interval: must be at least 1
--freeze-params-name-list mlp --only-train-params-name-list attention
    -> --only-train-params-name-list attention and --freeze-params-name-list mlp exclude each other
--freeze-params-name-list mlp --lora-rank 4
    -> --freeze-params-name-list mlp and --lora-rank 4 do not go together: beside adapters, nothing is trained
--only-train-params-name-list mlp foo
    -> --only-train-params-name-list foo: no parameter has that in its name, as embedding.word_embeddings.weight has
--freeze-params-name-list layers.4. -> --freeze-params-name-list layers.4.: no parameter has that in its name
--only-train-params-name-list mlp layers.[0 -> --only-train-params-name-list layers.[0: it is no regular expression:
--use-kl-loss -> --use-kl-loss needs --ref-load
--loss-constant-length 5 --calculate-per-token-loss
    -> --loss-constant-length 5 and --calculate-per-token-loss exclude each other
--loss-type custom_loss --custom-loss-function-path functions.py:run {PPO}
    -> --loss-type custom_loss trains no critic, whose values --advantage-estimator ppo needs
--loss-constant-length 5 --custom-pg-loss-reducer-function-path functions.py:run
    -> --loss-constant-length 5 would divide KL and entropy, and not what --custom-pg-loss-reducer-function-path
--rs-veto-threshold 1e-4 -> --rs-veto-threshold 0.0001 has no effect without --use-rs
--use-rs --tis-mode mask --tis-clip 5 -> --tis-mode mask has no effect without --use-tis
--use-tis --rs-level token -> --rs-level token has no effect without --use-rs
--opsm-delta 0.01 -> --opsm-delta 0.01 has no effect without --use-opsm
--loss-type custom_loss -> --loss-type custom_loss needs --custom-loss-function-path
--custom-loss-function-path functions.py:run
    -> --custom-loss-function-path has no effect without --loss-type custom_loss
--disable-compute-advantages-and-returns
    -> --disable-compute-advantages-and-returns leaves --loss-type policy_loss nothing to train
--custom-pg-loss-reducer-function-path functions.py:run --loss-type sft_loss
    -> --custom-pg-loss-reducer-function-path has no effect without --loss-type policy_loss
--n-samples-per-prompt 1 -> --n-samples-per-prompt 1 leaves --advantage-estimator grpo nothing
--n-samples-per-prompt 1 --advantage-estimator rloo
    -> --n-samples-per-prompt 1 leaves --advantage-estimator rloo nothing
--advantage-estimator reinforce_plus_plus
    -> --advantage-estimator reinforce_plus_plus is defined with whitened advantages: add --normalize-advantages
--advantage-estimator reinforce_plus_plus_baseline
    -> reinforce_plus_plus_baseline is defined with whitened advantages: add --normalize-advantages
--use-rollout-logprobs --use-tis -> which leaves --use-tis nothing to do: drop one of them
--use-rollout-logprobs --use-rs -> which leaves --use-rs nothing to do: drop one of them
--custom-tis-function-path functions.py:run -> functions.py:run has no effect without --use-tis
--use-tis --tis-clip 0.5 --tis-clip-low 0.6 -> --tis-clip-low 0.6 is above --tis-clip 0.5
--use-tis --tis-mode truncate --tis-clip-low 0.9
    -> --tis-clip-low 0.9 has no effect with --tis-mode truncate, which has an upper bound alone
--use-rs --rs-lower-bound 3 -> --rs-lower-bound 3.0 is above --rs-upper-bound 2.0
--critic-lr 1e-5 -> --critic-lr 1e-05 has no effect: only --advantage-estimator ppo has a critic
--critic-lr-warmup-iters 2 -> --critic-lr-warmup-iters 2 has no effect: only --advantage-estimator ppo
--gamma 1.5 -> argument --gamma: must be at most 1, not 1.5
--lambd 1.5 -> argument --lambd: must be at most 1, not 1.5
--eps-clip 1.5 -> argument --eps-clip: must be at most 1, not 1.5
--loss-type sft_loss --use-rollout-logprobs -> --use-rollout-logprobs has no effect without --loss-type policy_loss
--loss-type sft_loss --use-tis -> --use-tis has no effect without --loss-type policy_loss
--loss-type sft_loss --use-rs -> --use-rs has no effect without --loss-type policy_loss
--loss-type sft_loss --use-opsm -> --use-opsm has no effect without --loss-type policy_loss
--loss-type sft_loss --use-kl-loss --kl-loss-coef 0.1
    -> --kl-loss-coef 0.1 has no effect with --loss-type sft_loss: drop it
--loss-type sft_loss --use-kl-loss --kl-coef 0.1 -> --kl-coef 0.1 has no effect with --loss-type sft_loss: drop it
--loss-type sft_loss --use-kl-loss --entropy-coef 0.1
    -> --entropy-coef 0.1 has no effect with --loss-type sft_loss: drop it
--critic-load c -> --critic-load c has no effect: only --advantage-estimator ppo
{PPO} --critic-load /no/such -> --critic-load /no/such: there is no such directory
{PPO} --critic-load new --critic-save new -> /new: there is no such directory
--critic-save c -> --critic-save c has no effect: only --advantage-estimator ppo
--num-critic-only-steps 2 -> --num-critic-only-steps 2 has no effect: only --advantage-estimator ppo
{PPO} --save ckpt --critic-save ./ckpt/ -> is --save: actor and critic would overwrite each other
--lr-warmup-fraction 0.1 --lr-warmup-iters 3 -> --lr-warmup-fraction 0.1 and --lr-warmup-iters 3 exclude
{PPO} --critic-lr 1e-8 --min-lr 1e-7 -> --min-lr 1e-07 is above --critic-lr 1e-08
--advantage-estimator cispo --eps-clip-c 2 -> --eps-clip-c 2.0 has no effect with --advantage-estimator
--keep-old-actor -> --keep-old-actor only works with train_async.py
{PPO} --num-critic-only-steps 3 -> --num-critic-only-steps 3 leaves none of --num-rollout 3 to the actor
--eps-clip-c 1 -> --eps-clip-c
--rs-veto-threshold 0 -> --rs-veto-threshold
--loss-constant-length 0 -> --loss-constant-length
--tis-level word -> --tis-level
--advantage-estimator gppo -> --advantage-estimator
--custom-advantage-function-path functions.py:nothing -> functions.py has no 'nothing'
--use-critic -> --use-critic is not available: --advantage-estimator ppo has a critic; drop it
--critic-num-nodes 1 -> --critic-num-nodes is not available: the critic is on the actor's slots; drop it
--critic-num-gpus-per-node 1 -> --critic-num-gpus-per-node is not available: the critic is on the actor's
"""
)
def test_what_does_not_go_together(flags: Flags, message: str, fails: Fails) -> None:
    assert message in fails(*flags)


def test_no_reward(fails: Fails, parse: Parse) -> None:
    expected = "--rm-type or --custom-rm-path is missing: responses need a reward"
    assert fails(PPO, "--rm-type") == expected
    assert fails("--eval-prompt-data e data.jsonl --eval-interval 1", "--rm-type").startswith(expected)
    Path("named.jsonl").write_text('\n {"input": "p", "label": "1", "metadata": {"rm_type": "f1"}}\n')
    words = "--prompt-data named.jsonl --eval-prompt-data e named.jsonl --eval-interval 1"
    assert parse(words, "--rm-type --prompt-data").rm_type is None
    assert parse("--load-debug-rollout-data dump/{rollout_id}.pt", "--rm-type").rm_type is None
    Path("eval.yaml").write_text("datasets: [{name: e, path: named.jsonl, rm_type: remote_rm}]")
    line = fails("--eval-config eval.yaml --eval-interval 1")
    assert line == "--eval-config eval.yaml: e: rm_type remote_rm needs --rm-url"


def test_critic_directories(directory: Path, parse: Parse) -> None:
    args = parse(f"{PPO} --load ckpt --save ckpt")
    assert (args.critic_load, args.critic_save) == (f"{directory}/ckpt/critic",) * 2
    assert args.critic_source is None
    args = parse(f"{PPO} --save ckpt")
    assert (args.critic_load, args.critic_save) == (None, f"{directory}/ckpt/critic")
    args = parse(f"{PPO} --save ckpt --critic-save other --critic-load model")
    assert (args.critic_load, args.critic_save) == (f"{directory}/model", f"{directory}/other")
    assert args.critic_source == f"{directory}/model"
    args = parse(PPO)
    assert (args.critic_load, args.critic_save, args.critic_source) == (None, None, None)


def test_a_critic_that_a_dead_run_left_is_no_source(directory: Path, fails: Fails, parse: Parse) -> None:
    (directory / "ckpt" / "critic" / "iter_0000000").mkdir(parents=True)
    for given in ("", "--critic-load ckpt/critic"):
        args = parse(f"{PPO} --load ckpt --save ckpt {given}")
        assert args.critic_load == f"{directory}/ckpt/critic"
        assert args.critic_source is None
    expected = "ckpt/critic: there is no checkpoint (no latest_checkpointed_iteration.txt) and no model (no config.json"
    assert expected in fails(f"{PPO} --critic-load ckpt/critic")


def test_schedules_count_the_rollouts_that_a_model_learns_from(parse: Parse) -> None:
    args = parse(f"{PPO} --num-rollout 10 --num-critic-only-steps 4 --lr-warmup-fraction 0.5")
    assert warmup_and_decay_steps(args) == (3, 6)
    assert warmup_and_decay_steps(critic_options(args)) == (5, 10)
    args.num_rollout = 4  # as with --num-epoch, once the prompts are counted
    with pytest.raises(OptionError, match="--num-critic-only-steps 4 leaves none of --num-rollout 4 to the actor"):
        check_schedule(args)


def test_supervised_training_needs_no_advantages(parse: Parse) -> None:
    words = "--loss-type sft_loss --debug-train-only --n-samples-per-prompt 1 --use-kl-loss --kl-loss-coef 0"
    args = parse(words, "--rm-type")
    assert args.disable_compute_advantages_and_returns
    assert not args.needs_reference
    assert not args.use_critic


def test_from_yaml(directory: Path, parse: Parse) -> None:
    settings = {"advantage_estimator": "rloo", "use_tis": True, "tis_threshold": 3, "loss_constant_length": 9}
    (directory / "c.yaml").write_text(json.dumps(settings))
    args = parse("--custom-config-path c.yaml --advantage-estimator grpo")
    assert (args.reward_baseline, args.tis_clip, args.loss_constant_length) == ("leave_one_out", 3.0, 9)
