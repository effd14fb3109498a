"""One rank of one layout, under torchrun: trains on every case asked for, and writes metrics and weights of each.

``torchrun --nproc-per-node N trainer_worker.py MODEL_DIR WORK_DIR OTHER_WORK_DIR '{LAYOUT}' CASE...``
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron import parallel  # noqa: E402
from slime.backends.megatron import trainer as trainer_module  # noqa: E402
from slime.backends.megatron.optimizer import parts_of  # noqa: E402
from slime.backends.megatron.trainer import MegatronTrainer  # noqa: E402
from slime.backends.megatron.weights import gather  # noqa: E402
from slime.data import TrainBatch  # noqa: E402
from slime.files.checkpoints import COMMON  # noqa: E402
from slime.options.errors import OptionError  # noqa: E402
from slime.ray.train_actor import TrainActor  # noqa: E402
from slime.training import checkpoint_dirs  # noqa: E402
from slime.training.checks import TrainingError  # noqa: E402
from slime.utils.errors import BadInputError  # noqa: E402
from tests.parallel import gathering, rollouts  # noqa: E402
from tests.parallel.cases import CASES, Case  # noqa: E402

HOOKS = Path(__file__).parents[1] / "user_hooks.py"
OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True}
DISTRIBUTED = {True: "--use-distributed-optimizer", False: "--no-use-distributed-optimizer"}
USERS = {
    "custom_megatron_init_path": "megatron_init",
    "custom_model_provider_path": "model_provider",
    "custom_megatron_before_log_prob_hook_path": "before_log_prob",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
    "rollout_data_postprocess_path": "only_looks",
}


class Rank:
    """What this process does with one case after the other."""

    def __init__(self, model_dir: Path, work: Path, layout: dict[str, Any]) -> None:
        self.model_dir, self.work, self.layout = model_dir, work, layout

    def arguments(self, case: Case, **options: Any) -> Namespace:
        return rollouts.arguments(self.model_dir, **{**case.options, **self.layout, **options})

    def train(self, trainer: MegatronTrainer, case: Case, first: int, last: int) -> list[dict[str, float]]:
        metrics = []
        for rollout_id in range(first, last):
            rows = case.rows(rollout_id)
            batch = rollouts.batches(rows, trainer.dp_size, case.steps, case.micro_batch_size)[trainer.dp_rank]
            metrics += trainer.train(rollout_id, batch)
        return metrics

    def write(self, name: str, metrics: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> None:
        (self.work / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(metrics))
        if dist.get_rank() == 0:
            save_file({n: t.cpu().contiguous() for n, t in weights.items()}, self.work / f"{name}.safetensors")

    def run(self, name: str) -> None:
        case = CASES[name]
        trainer = MegatronTrainer(self.arguments(case))
        scores = trainer.score(rollouts.TEXT)
        (self.work / f"scores.rank{dist.get_rank()}.json").write_text(json.dumps(scores))
        self.write(name, self.train(trainer, case, 0, case.rollouts), gathering.weights(trainer))

    def resume(self) -> None:
        """Train, save half-way, go on; then the second half again from the checkpoint."""
        case, save_dir = CASES["resume"], self.work / "checkpoint"
        trainer = MegatronTrainer(self.arguments(case, save=str(save_dir)))
        assert trainer.start_rollout_id == 0
        first, second = self.train(trainer, case, 0, 2)
        assert "train/critic-value_loss" in first
        assert "train/pg_loss" not in first
        assert "train/pg_loss" in second
        assert first["train/critic-lr-pg_0"] == trainer.args.lr > trainer.args.lr_warmup_init
        assert second["train/lr-pg_0"] == trainer.args.lr_warmup_init
        self.save(trainer, 1)
        self.write("saved", [], gathering.weights(trainer))
        random = torch.rand(3)
        metrics = self.train(trainer, case, 2, 3)
        self.save(trainer, 2, dies=True)
        metrics += self.train(trainer, case, 3, 4)
        self.write("uninterrupted", metrics, gathering.weights(trainer))
        again = self.reload(save_dir)
        assert torch.equal(torch.rand(3), random)
        self.write("resumed", self.train(again, case, 2, 4), gathering.weights(again))

    def save(self, trainer: MegatronTrainer, rollout_id: int, *, dies: bool = False) -> None:
        """As the Ray actor does, which may end before the last thing that it does."""
        actor = TrainActor.__new__(TrainActor)
        actor._args, actor._rank, actor._trainer = trainer.args, dist.get_rank(), trainer
        places = [trainer.args.save, *([trainer.args.critic_save] if trainer.args.use_critic else [])]
        if not dies:
            actor.save(rollout_id, None, *places)
            return
        commit = checkpoint_dirs.commit_save

        def dying(directory: str, rollout_id: int) -> None:
            if directory == trainer.args.save:
                raise KeyboardInterrupt
            commit(directory, rollout_id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_dirs, "commit_save", dying)
            with pytest.raises(KeyboardInterrupt):
                actor.save(rollout_id, None, *places)

    def reload(self, save_dir: Path, **options: Any) -> MegatronTrainer:
        trainer = MegatronTrainer(self.arguments(CASES["resume"], load=str(save_dir), **options))
        assert trainer.start_rollout_id == 2
        assert trainer.resumed_from == str(save_dir / "iter_0000001")
        return trainer

    def reload_other(self, other: Path) -> None:
        """Go on from what another layout saved, with a distributed optimizer or without as it had."""
        distributed = torch.load(other / "checkpoint" / "iter_0000001" / COMMON)["distributed_optimizer"]
        with pytest.raises(BadInputError, match=f"was saved with {DISTRIBUTED[distributed]}"):
            self.reload(other / "checkpoint", use_distributed_optimizer=not distributed)
        trainer = self.reload(other / "checkpoint", use_distributed_optimizer=distributed)
        self.write("reloaded", self.train(trainer, CASES["resume"], 2, 4), gathering.weights(trainer))

    def unstepped(self) -> None:
        """Go on from a checkpoint of before the actor's first step."""
        case, saved = CASES["resume"], self.work / "unstepped"
        trainer = MegatronTrainer(self.arguments(case, save=str(saved)))
        self.train(trainer, case, 0, 1)
        self.save(trainer, 0)
        again = MegatronTrainer(self.arguments(case, load=str(saved)))
        assert again.start_rollout_id == 1
        expected, found = (self.train(each, case, 1, 3) for each in (trainer, again))
        for mine, theirs in zip(expected, found, strict=True):
            assert mine["train/grad_norm"] == theirs["train/grad_norm"]
        weights = gathering.weights(again)
        assert all(torch.equal(weights[name], tensor) for name, tensor in gathering.weights(trainer).items())

    def rates(self) -> None:
        """A resumed run has the rates of its own options, of each group, and the optimizer state of the checkpoint."""
        case, saved = CASES["resume"], self.work / "rates"
        halves = {"lr_decay_style": "linear", "lr_warmup_iters": 0, "lr_warmup_init": 0.0, "num_critic_only_steps": 0}
        first = {"lr": 1e-3, "min_lr": 0.0, "decoupled_lr": 0.01, "adam_beta2": 0.95, "weight_decay": 0.1}
        other = {"lr": 1e-4, "min_lr": 2e-5, "adam_beta1": 0.7, "adam_eps": 1e-5, "weight_decay": 0.3}
        trainer = MegatronTrainer(self.arguments(case, save=str(saved), **halves, **first))
        self.train(trainer, case, 0, 2)
        self.save(trainer, 1)

        def resumed(**options: Any) -> list[dict[str, Any]]:
            again = MegatronTrainer(self.arguments(case, load=str(saved), **halves, **options))
            assert again.start_rollout_id == 2
            for mine, theirs in ((again._actor, trainer._actor), (again._critic, trainer._critic)):
                assert state_of(mine._optimizer) == state_of(theirs._optimizer)
            assert rates_of(again._critic)[0] == rates_of(again._actor)[0]
            return rates_of(again._actor)

        def of(groups: list[dict[str, Any]], name: str) -> list[float]:
            return [pytest.approx(group[name]) for group in groups]

        groups = resumed(**first)
        assert groups == rates_of(trainer._actor)
        assert of(groups, "lr") == [5e-4, 5e-3, 5e-4]
        groups = resumed(**other)
        assert of(groups, "lr") == [6e-5, 6e-5]
        assert of(groups, "weight_decay") == [0.3, 0.0]
        assert [(group["betas"], group["eps"]) for group in groups] == [((0.7, 0.95), 1e-5)] * 2
        groups = resumed(**other, decoupled_lr=4e-4, use_checkpoint_opt_param_scheduler=True)
        assert of(groups, "lr") == [5e-4, 2e-4, 5e-4]
        assert of(groups, "weight_decay") == [0.1, 0.1, 0.0]

    def sgd(self) -> None:
        """SGD goes on exactly from a checkpoint, with momentum and without."""
        for momentum in (0.9, 0.0):
            case, saved = CASES["grpo"], self.work / f"sgd{momentum}"
            options = {"optimizer": "sgd", "sgd_momentum": momentum, "use_distributed_optimizer": False}
            trainer = MegatronTrainer(self.arguments(case, save=str(saved), **options))
            self.train(trainer, case, 0, 2)
            self.save(trainer, 1)
            again = MegatronTrainer(self.arguments(case, load=str(saved), **options))
            assert again.start_rollout_id == 2
            for each in (trainer, again):
                self.train(each, case, 2, 3)
            weights = gathering.weights(again)
            assert all(torch.equal(weights[name], tensor) for name, tensor in gathering.weights(trainer).items())

        sgd = "--optimizer sgd with --sgd-momentum"
        for other, kind in ((options | {"sgd_momentum": 0.9}, f"{sgd} above 0"), ({}, "--optimizer adam")):
            with pytest.raises(BadInputError, match=f"was saved by {sgd} 0, and this run has {kind}: take the former"):
                MegatronTrainer(self.arguments(case, load=str(self.work / "sgd0.0"), **other))

    def lora(self, name: str) -> None:
        """Adapters, and beside what they become what they were at first: by what ranks have agreed on then."""
        case = CASES[name]
        trainer = MegatronTrainer(self.arguments(case))
        self.write(f"{name}_first", [], gathering.adapters(trainer))
        metrics = self.train(trainer, case, 0, case.rollouts)
        with mock.patch.object(gather, "union", side_effect=AssertionError("ranks ask each other again")):
            self.write(name, metrics, gathering.adapters(trainer))

    def other_base(self) -> None:
        """Adapters go on with the values that they were trained on, wherever these are, and with no others."""
        case, saved = CASES["lora"], self.work / "adapters"
        trainer = MegatronTrainer(self.arguments(case, save=str(saved)))
        self.train(trainer, case, 0, 1)
        self.save(trainer, 0)
        merged, same = self.work / "merged", self.model_dir / ".." / self.model_dir.name
        trainer.save_hf(str(merged), 0)
        again = MegatronTrainer(self.arguments(case, load=str(saved), ref_load=str(same)))
        assert again.start_rollout_id == 1
        random = {"random_weights": True}
        for other, name in (({"ref_load": str(merged)}, merged), (random, "random weights of --seed 1234 and the l")):
            with pytest.raises(OptionError, match=f"holds adapters of {self.model_dir} .float32., .* run, {name}"):
                MegatronTrainer(self.arguments(case, load=str(saved), **other))
        trainer = MegatronTrainer(self.arguments(case, save=str(saved), **random))
        self.train(trainer, case, 1, 2)
        self.save(trainer, 1)
        assert MegatronTrainer(self.arguments(case, load=str(saved), **random)).start_rollout_id == 2
        with pytest.raises(OptionError, match=r"of random weights of --seed 1234 .* random weights of --seed 1235 "):
            MegatronTrainer(self.arguments(case, load=str(saved), seed=1235, **random))

    def offload(self) -> None:
        """The optimizer in host memory: the same steps as without, asleep in between, and on from either's state."""
        case = CASES["resume"]
        bf16 = {"params_dtype": "bfloat16", "ci_test": False}
        kinds = {"resident": bf16, "host": bf16 | OFFLOAD}
        trainers, saved = {}, {name: str(self.work / f"saved_{name}") for name in kinds}
        for name, options in kinds.items():
            trainers[name] = trainer = MegatronTrainer(self.arguments(case, save=saved[name], **options))
            self.train(trainer, case, 0, 2)
            self.save(trainer, 1)
            for gib in (1.0, 1e-4, 0.0):  # all that sleeps stays, then some of it, then nothing
                trainer.args.offload_budget_gib = gib
                trainer.sleep(keep_weights=True)
                trainer.sleep(keep_weights=False)
                trainer.wake(weights_only=False)
            self.train(trainer, case, 2, 3)
        for name, options in kinds.items():
            for other, directory in saved.items():
                again = MegatronTrainer(self.arguments(case, load=directory, **options))
                self.train(again, case, 2, 3)
                trainers[f"{name} from {other}"] = again
        for trainer in trainers.values():
            for mine, wanted in zip(learners(trainer), learners(trainers["resident"]), strict=True):
                assert state_of(mine._optimizer) == state_of(wanted._optimizer)
            weights = gathering.weights(trainers["resident"])
            assert all(torch.equal(weights[name], tensor) for name, tensor in gathering.weights(trainer).items())

    def nan(self) -> None:
        """A step that is not finite stops with its place, on every rank."""
        case = CASES["grpo"]
        trainer = MegatronTrainer(self.arguments(case))
        rows = case.rows(0)
        rows.rewards[-1] = float("nan")
        batch = rollouts.batches(rows, trainer.dp_size, case.steps)[trainer.dp_rank]
        with pytest.raises(TrainingError, match="rollout 7, step 2 of 2, actor: the train/loss is nan"):
            trainer.train(7, batch)

    def bad_steps(self) -> None:
        """Steps of a loss or a gradient that is not finite leave weights, optimizer and rates as they were; a trainer
        that goes back to a checkpoint is as it was then."""
        case, saved = CASES["grpo"], self.work / "bad_steps"
        usual, skips = (
            MegatronTrainer(self.arguments(case, on_bad_step=what, save=str(saved))) for what in ("stop", "skip")
        )
        rows = case.rows(5)
        rows.rewards[:] = float("nan")
        batch = rollouts.batches(rows, skips.dp_size, case.steps)[skips.dp_rank]
        for metrics in skips.train(5, batch):
            assert (metrics["train/bad_steps"], "train/grad_norm" in metrics) == (1.0, False)
        spoilt = next(skips.model_chunks[0].parameters()).register_hook(lambda grad: grad * float("inf"))
        for metrics in self.train(skips, case, 6, 7):
            assert (metrics["train/bad_steps"], math.isfinite(metrics["train/grad_norm"])) == (1.0, False)
            assert math.isfinite(metrics["train/loss"])
        spoilt.remove()
        assert metrics["perf/trained_tokens"] == 0
        expected, found = (of_training(self.train(trainer, case, 0, 1)) for trainer in (usual, skips))
        assert found == expected
        weights = gathering.weights(usual)
        assert all(torch.equal(weights[name], tensor) for name, tensor in gathering.weights(skips).items())

        self.save(usual, 0)
        expected = of_training(self.train(usual, case, 1, 2))
        usual.go_back(str(saved / "iter_0000000"), None)
        assert of_training(self.train(usual, case, 1, 2)) == expected
        usual.args = Namespace(**vars(usual.args) | {"on_bad_step": "restore"})
        usual._actor.args = usual.args
        assert len(usual.train(5, batch)) == 1, "the rest of the rollout is left out"

    def mismatch(self) -> None:
        """The engine's log-probs, which are random here, stop the run where asked."""
        case = CASES["grpo"]
        trainer = MegatronTrainer(self.arguments(case, stop_on_mismatch=True))
        batch = rollouts.batches(case.rows(0), trainer.dp_size, case.steps)[trainer.dp_rank]
        expected = "rollout 7, step 1 of 2, actor: the trainer's and the engine's log-probs of the same tokens differ"
        with pytest.raises(TrainingError, match=expected):
            trainer.train(7, batch)

    def hooks(self) -> None:
        """Users' functions around the model, which change nothing; and one over a rollout's columns, which does."""
        case = CASES["grpo"]
        options = {option: f"{HOOKS}:{name}" for option, name in USERS.items()}
        trainer = MegatronTrainer(self.arguments(case, **options))
        stages = [call for call in trainer.args.calls if call[0] == "stage"]
        assert trainer.args.calls == ["init", *stages]
        chunks = self.layout.get("virtual_pipeline_model_parallel_size")
        assert [stage[3] for stage in stages] == (list(range(chunks)) if chunks else [None])
        trainer.args.calls.clear()
        self.write("hooks", self.train(trainer, case, 0, case.rollouts), gathering.weights(trainer))
        reference, present, *others = trainer.args.calls
        assert (reference[:2], present[:2]) == (("log_prob", "ref_"), ("log_prob", ""))
        assert reference[2] == present[2], "the first rollout is made by the reference's weights"
        looked = [("postprocess", 0)] if parallel_state.is_pipeline_last_stage() else []
        assert others == [*looked, ("step", 0, 0, 0), ("step", 0, 1, 1)]

        def doubled(rows: TrainBatch) -> TrainBatch:
            return rows.changed(rewards=rows.rewards * 2)

        twice = replace(case, rows=lambda rollout_id: doubled(case.rows(rollout_id)))
        for name, of, path in (("twice_by_rewards", twice, None), ("twice_by_hook", case, "doubles_advantages")):
            option = {"rollout_data_postprocess_path": f"{HOOKS}:{path}"} if path else {}
            trainer = MegatronTrainer(self.arguments(case, **option))
            self.write(name, self.train(trainer, of, 0, 1), gathering.weights(trainer))
        with pytest.raises(
            BadInputError, match=r"--custom-model-provider-path \S+: it must return a megatron.core GPTModel"
        ):
            MegatronTrainer(self.arguments(case, custom_model_provider_path=f"{HOOKS}:no_model"))

    def profile(self) -> None:
        """The first of two rollouts, in two parts and as a whole."""
        case, rank = CASES["grpo"], dist.get_rank()
        parts = {"train_actor": "autograd::engine", "train_log_probs": "aten::mm", "train_overall": "autograd::engine"}
        for targets in (["train_actor", "train_log_probs"], ["train_overall"]):
            span = {"profile_step_start": 0, "profile_step_end": 1, "profile_target": targets}
            trainer = MegatronTrainer(self.arguments(case, run_dir=str(self.work / "profile"), **span))
            self.train(trainer, case, 0, 2)
        traces = sorted((self.work / "profile" / "traces").glob(f"*rank{rank}.json.gz"))
        assert [path.name for path in traces] == [f"{part}_0_rank{rank}.json.gz" for part in parts]
        for path, operation in zip(traces, parts.values(), strict=True):
            assert operation in gzip.decompress(path.read_bytes()).decode()

    def reference(self) -> None:
        """A reference from a torch_dist directory, and both sets of weights in turns."""
        directory = str(self.work / "checkpoint" / "iter_0000001")
        trainer = MegatronTrainer(self.arguments(CASES["grpo"], ref_load=directory))
        before = gathering.weights(trainer)
        case = CASES["grpo"]
        self.train(trainer, case, 0, 1)
        after = gathering.weights(trainer)
        trainer._actor.weights.switch("ref")
        assert all(torch.equal(t, before[n]) for n, t in gathering.weights(trainer).items())
        trainer._actor.weights.switch("current")
        assert all(torch.equal(t, after[n]) for n, t in gathering.weights(trainer).items())
        assert not all(torch.equal(t, before[n]) for n, t in after.items())
        target = self.work / "hf"
        trainer.save_hf(str(target), 0)
        trainer.save_hf(str(target), 0)
        assert sorted(p.name for p in self.work.glob("*hf*")) == ["hf"]

    def frozen(self) -> None:
        """What is frozen stays, whatever the weight decay, without optimizer state; what is trained makes the step that
        it makes beside the others; and a resumed run goes on."""
        case, saved = replace(CASES["grpo"], steps=1), self.work / "frozen"
        options = {"clip_grad": 1e9, "num_steps_per_rollout": 1}
        lists = {
            "freeze_params_name_list": [r"layers\.0\.", "^embedding", "q_layernorm"],
            "only_train_params_name_list": [r"layers\.[1-9].*(?<!q_layernorm)\.weight", "^output_layer", "final_layer"],
        }
        usual = MegatronTrainer(self.arguments(case, **options))
        before = gathering.weights(usual)
        self.train(usual, case, 0, 1)
        moved, stay = gathering.weights(usual), re.compile(r"layers\.0\.|embed_tokens|q_norm")
        for name, patterns in lists.items():
            some = {name: patterns, "save": str(saved / name)}
            trainer = MegatronTrainer(self.arguments(case, **options, **some))
            self.train(trainer, case, 0, 1)
            for weight, tensor in gathering.weights(trainer).items():
                assert torch.equal(tensor, (before if stay.search(weight) else moved)[weight]), weight
                assert not torch.equal(moved[weight], before[weight]), weight
            parameters = [p for chunk in trainer.model_chunks for p in chunk.parameters()]
            assert not any(hasattr(p, "main_grad") for p in parameters if not p.requires_grad)
            assert numel_of(trainer) == sum(p.numel() for p in parameters if p.requires_grad) < numel_of(usual)
            self.save(trainer, 0)
            again = MegatronTrainer(self.arguments(case, load=str(saved / name), **options, **some))
            assert again.start_rollout_id == 1
            for each in (trainer, again):
                self.train(each, case, 1, 2)
            weights = gathering.weights(again)
            assert all(torch.equal(weights[name], tensor) for name, tensor in gathering.weights(trainer).items())
        with pytest.raises(BadInputError, match="--freeze-params-name-list lay3r: no parameter has that in its name"):
            MegatronTrainer(self.arguments(case, freeze_params_name_list=["layers", "lay3r"]))
        with pytest.raises(BadInputError, match=r"--freeze-params-name-list \.: rank 0 has nothing to train"):
            MegatronTrainer(self.arguments(case, freeze_params_name_list=["."]))

    def moving_reference(self) -> None:
        """The reference becomes the actor after every second rollout, also of adapters, and after a resume."""
        for name in ("grpo", "lora"):
            case, saved = CASES[name], self.work / f"moving_{name}"
            options = {"ref_update_interval": 2, "save": str(saved)}
            trainer = MegatronTrainer(self.arguments(case, **options))
            first = self.reference_of(trainer)
            metrics = self.train(trainer, case, 0, 1)
            assert same(self.reference_of(trainer), first)
            metrics += self.train(trainer, case, 1, 2)
            last = [step for step in metrics if "perf/train_time" in step]
            assert ["perf/ref_model_update_time" in step for step in last] == [False, True]
            second = gathering.weights(trainer)
            self.train(trainer, case, 2, 3)
            assert same(self.reference_of(trainer), second)
            assert not same(second, first)
            self.save(trainer, 2)
            expected = of_training(self.train(trainer, case, 3, 4))
            again = MegatronTrainer(self.arguments(case, load=str(saved), **options))
            assert same(self.reference_of(again), second)
            assert of_training(self.train(again, case, 3, 4)) == expected
            assert same(self.reference_of(again), gathering.weights(again))
            again.go_back(str(saved / "iter_0000002"), None)
            assert same(self.reference_of(again), second)
            still = MegatronTrainer(self.arguments(case, **options | {"ref_update_interval": None}))
            assert of_training(self.train(still, case, 0, 4))[-1]["train/kl_loss"] != expected[-1]["train/kl_loss"]

    def reference_of(self, trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
        with trainer._actor.weights.switched("ref"):
            return gathering.weights(trainer)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def of_training(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics but for times."""
    return [{name: value for name, value in step.items() if not name.startswith("perf/")} for step in steps]


def rates_of(learner: Any) -> list[dict[str, Any]]:
    """What the optimizer steps by, of each group."""
    names = ("lr", "weight_decay", "betas", "eps")
    return [{name: group.get(name) for name in names} for group in learner._optimizer.param_groups]


def learners(trainer: MegatronTrainer) -> list[Any]:
    """The actor, and the critic if there is one."""
    return [learner for learner in (trainer._actor, trainer._critic) if learner is not None]


def numel_of(trainer: MegatronTrainer) -> int:
    """How many numbers the actor's optimizer moves, of this rank or, where they are shared out, of all."""
    inner = [part.optimizer for part in parts_of(trainer._actor._optimizer)]
    count = torch.tensor(sum(p.numel() for one in inner for group in one.param_groups for p in group["params"]))
    if trainer.args.use_distributed_optimizer:
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return int(count)


def state_of(optimizer: Any) -> list[bytes]:
    """The state of all parameters, in an order that does not depend on their groups."""
    inner = [part.optimizer for part in parts_of(optimizer)]
    return sorted(
        tensor.numpy().tobytes() for one in inner for state in one.state.values() for tensor in state.values()
    )


def main() -> None:
    model_dir, work, other = (Path(name) for name in sys.argv[1:4])
    layout = json.loads(sys.argv[4])
    rank = Rank(model_dir, work, layout)
    parallel.initialize_distributed(rollouts.arguments(model_dir, **layout))
    # Trainers follow one another here, and a process can join the rendezvous of torchrun only once.
    trainer_module.initialize_distributed = lambda args: parallel.set_seeds(args.seed)
    for name in sys.argv[5:]:
        if name.startswith("lora"):
            rank.lora(name)
        elif name in CASES and name != "resume":
            rank.run(name)
        elif name == "reload_other":
            rank.reload_other(other)
        else:
            getattr(rank, name)()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
