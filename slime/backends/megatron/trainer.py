"""One training rank of Megatron: its groups and models, and how their weights are exported and saved for others."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.backends.megatron import patches
from slime.files.checkpoints import checkpoint_directory
from slime.files.hf_writer import NamedTensors
from slime.models import family_of, hf_config, weight_shape
from slime.options.training import critic_options

patches.install()  # before anything imports megatron.core

from slime.backends.megatron import lora, model_hooks  # noqa: E402
from slime.backends.megatron.layers.attention import packed_params  # noqa: E402
from slime.backends.megatron.learner import MegatronLearner  # noqa: E402
from slime.backends.megatron.parallel import initialize_distributed, neighbours  # noqa: E402
from slime.backends.megatron.weights import lora_base, weights_io  # noqa: E402
from slime.backends.megatron.weights.checkpoint_validation import built_shape  # noqa: E402
from slime.training import checkpoint_dirs  # noqa: E402
from slime.training.trainer import RolloutTrainer  # noqa: E402


class MegatronTrainer(RolloutTrainer):
    """A rank of the training group, as `slime.training.protocol.Trainer`; every method is collective over all ranks.

    Attributes:
        model_chunks: the actor's bare model, one part a virtual pipeline stage.
        family, shape: how its weights are named in Hugging Face's format.
    """

    _actor: MegatronLearner
    _critic: MegatronLearner | None

    def __init__(self, args: Namespace) -> None:
        initialize_distributed(args)
        model_hooks.after_init(args)
        super().__init__(args, neighbours(), packed_params)
        config = hf_config(args.hf_checkpoint)
        self.family = family_of(config)
        self.shape = built_shape(weight_shape(config, with_heads=args.enable_mtp_training), args)
        found, source = self._found, args.ref_load or args.hf_checkpoint
        self._gatherers: weights_io.Gatherers = {}
        with self._memory.phase("start"):
            adapt = partial(self._adapt, source) if args.lora_rank is not None else None
            self._actor = MegatronLearner(args, "actor", source, found[0] if found else None, adapt)
            self.model_chunks = self._actor.model_chunks
            self._critic = _make_critic(args, source, found[1] if found else None) if args.use_critic else None

    def _adapt(self, source: str, chunks: list[Any]) -> None:
        args = self.args
        settings = lora.LoraSettings(args.lora_rank, args.lora_alpha, tuple(args.lora_target_modules), args.seed)
        begins = f"random weights of --seed {args.seed} and the layout" if args.random_weights else source
        lora_base.record(chunks, self.family, self.shape, f"{begins} ({args.params_dtype})")
        lora.attach(chunks, self.family, self.shape, settings)

    # ---- weights

    def export_buckets(self, version: int, *, own_experts: bool = False) -> Iterator[NamedTensors]:
        if self.args.keep_old_actor:
            self._keep_version(version)
        shape = self.shape if self.args.pushes_heads else replace(self.shape, next_token_heads=0)
        model, size = (self.model_chunks, self.family, shape), self.args.update_weight_buffer_size
        if self.args.lora_sync == "adapter":
            return weights_io.export_adapter_buckets(*model, self.args.lora_target_modules, size, self._gatherers)
        return weights_io.export_hf_buckets(*model, size, own_experts=own_experts, gatherers=self._gatherers)

    def save_hf(self, directory: str, rollout_id: int) -> None:
        origin = self.args.hf_checkpoint
        self._export(directory, rollout_id, lambda place: weights_io.save_hf(self.model_chunks, place, origin))

    def save_lora(self, directory: str, rollout_id: int) -> None:
        model = self.model_chunks, self.family, self.shape, self.args
        self._export(directory, rollout_id, lambda place: weights_io.save_adapters(*model, place))

    def _export(self, directory: str, rollout_id: int, write: Callable[[Path], None]) -> None:
        unfinished = checkpoint_dirs.staging_directory(Path(directory))
        with self._memory.phase("save"):
            write(unfinished)
        checkpoint_dirs.commit_export(Path(directory), self.args, rollout_id)


def _make_critic(args: Namespace, source: str, resumed_rollout: int | None) -> MegatronLearner:
    """The critic with its own rate, schedule and checkpoints, resumed at the actor's rollout where that is."""
    own = critic_options(args)
    if resumed_rollout is None:
        return MegatronLearner(own, "critic", args.critic_source or source, None)
    return MegatronLearner(own, "critic", source, checkpoint_directory(args.critic_load, resumed_rollout))
