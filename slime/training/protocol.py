"""What training asks of a backend, by name: the trainer that an actor drives, and the model that a trainer drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from slime.data import TrainBatch
from slime.files.hf_writer import NamedTensors
from slime.training.memory.weight_sets import CURRENT, WeightSets
from slime.training.micro_batch import MicroBatch
from slime.utils.device import Memory

Report = dict[str, Tensor]
"""A micro-batch's share of a step's metrics, scalars without gradient (`slime.training.loss.token_loss`)."""
ColumnOf = Callable[[MicroBatch, Tensor], Tensor]
"""Makes a column of a micro-batch, [T], of what the model returned for it on the last pipeline stage."""
LossOf = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]
"""Makes of the same the micro-batch's share of the loss, a scalar with gradient, and of the metrics."""


class Trainer(Protocol):
    """One rank of the training group, as an actor drives it; every method is collective over all ranks."""

    @property
    def start_rollout_id(self) -> int:
        """The first rollout to train, one after the loaded checkpoint's."""

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint directory that training continues from, if any."""

    @property
    def dp_rank(self) -> int:
        """Which `TrainBatch` this rank takes, of `dp_size`."""

    @property
    def dp_size(self) -> int:
        """Into how many batches a rollout is divided."""

    def train(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        """Train on this rank's part of one rollout; a dict of metrics an optimizer step, the same on every rank:
        ``train/*`` and ``rollout/*``, and on the last also ``perf/*`` of the whole call, in seconds. TrainingError of
        a loss or gradient that is not finite, or a check that failed."""

    def score(self, tokens: Sequence[int]) -> list[float] | None:
        """Log-probs, by the actor as it is, of all tokens of a text but the first one; None where this rank is not of
        the last pipeline stage, or the model takes more than text. It is enough that the weights are awake."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Give back the GPU's memory, but for ``--offload-budget-gib`` of it, and the actor's weights if they are to
        stay."""

    def wake(self, *, weights_only: bool) -> Memory:
        """Undo `sleep`, or only for the actor's weights; what was in use before."""

    def pushing(self, version: int) -> AbstractContextManager[object]:
        """What is around a push of `export_buckets`, so that its memory and time are told of."""

    def export_buckets(self, version: int, *, own_experts: bool = False) -> Iterator[NamedTensors]:
        """What engines get of the actor, and will call ``version``, in Hugging Face's names; in buckets of
        ``--update-weight-buffer-size``. With ``own_experts`` without those of other expert-parallel ranks."""

    def save(self, directory: str) -> None:
        """Write everything that the actor continues from into an existing empty directory."""

    def save_critic(self, directory: str) -> None:
        """The same of the critic."""

    def go_back(self, directory: str, critic_directory: str | None) -> None:
        """Have weights, optimizers and schedules as `save` and `save_critic` wrote them, and go on from there."""

    def save_hf(self, directory: str, rollout_id: int) -> None:
        """Write the actor, as it is after a rollout, as a Hugging Face directory, complete or not at all; what is there
        is replaced."""

    def save_lora(self, directory: str, rollout_id: int) -> None:
        """Write the actor's adapters in the same way, as PEFT reads them."""


class Learner(Protocol):
    """A model that learns, the actor or the critic, with its optimizer; every method is collective over all ranks."""

    @property
    def weights(self) -> WeightSets:
        """The sets of weights that take turns in the model."""

    def compute_column(
        self, micro_batches: list[MicroBatch], name: str, column_of: ColumnOf, weights: str = CURRENT
    ) -> None:
        """Set a column of every micro-batch to what a forward pass through the set ``weights`` makes of it, on the last
        pipeline stage."""

    def forward_backward(
        self, micro_batches: list[MicroBatch], loss: LossOf, rollout_id: int, step_id: int
    ) -> list[Report]:
        """Gradients of the sum of ``loss`` over the micro-batches of all ranks; reports of this rank's micro-batches,
        on the last pipeline stage only."""

    def optimizer_step(self, where: str, why_bad: str | None = None) -> dict[str, float]:
        """One step by these gradients; its metrics, the same on every rank. A bad step, one that something was wrong
        with before (``why_bad``) or whose gradients are bad (`slime.training.bad_steps`), is not taken: ``bad_steps``
        is then among them. TrainingError, which begins with ``where``, rollout and step, of one that ends the run."""

    def gathering_parameters(self) -> AbstractContextManager[None]:
        """What is around steps, but around no other pass."""

    def head_weight(self) -> Tensor:
        """The output layer's weight [vocabulary / TP, h], on the last pipeline stage of an actor."""

    def sleep(self, *, keep_weights: bool, budget: int) -> int:
        """Give back the device memory of gradients and optimizer state, and of the weights unless they are to stay, but
        for what fits into ``budget`` bytes; how many are left of these."""

    def wake(self, *, weights_only: bool) -> None:
        """Undo `sleep`, or only for the weights."""

    def save(self, directory: str) -> None:
        """Write everything that training continues from into an existing empty directory."""

    def load(self, directory: str) -> None:
        """Continue from what `save` has written there."""

    def renew_reference(self) -> None:
        """Let the reference be the weights as they are now; it is saved and loaded with them from then on."""
