"""Generation ahead of training: which rollouts may begin, under a bound on how old their weights get."""

from __future__ import annotations

import ray

from slime.driver.run import Run


def first_to_wait(front: int, version: int, *, buffer_size: int, max_staleness: int) -> int:
    """The first rollout that may not begin yet, while rollout ``front`` is trained or waited for and engines have
    ``version``.

    Rollout k is trained by weights of version k, so it begins when the engines have version k - ``max_staleness`` or a
    newer one: then nothing that it generates can be too old. ``buffer_size`` complete ones may wait, while another is
    generated.
    """
    return min(front + buffer_size + 2, version + max_staleness + 1)


class Pipeline:
    """The rollouts of a run that has started, begun in order and as early as they may."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._go_to(run.args.start_rollout_id)
        run.when_going_back(self._go_to)

    def _go_to(self, rollout_id: int) -> None:
        """None from this rollout on is begun, and the engines have its version."""
        self._begun = self._front = self._version = rollout_id

    def push_weights(self, version: int) -> None:
        """Interrupt generation, give every engine the trainers' weights, and go on; rollouts may begin that waited.

        Requests that are running keep their tokens and go on under the new weights; an evaluation under way is waited
        for, since its scores are those of one version.
        """
        self._run.finish_evaluation()
        self._run.pause_generation()
        self._run.push_weights(version)
        self._run.resume_generation(version)
        self._version = version
        self._begin_rollouts()

    def next(self, rollout_id: int) -> list[ray.ObjectRef]:
        """The batches of the next rollout to train, while those after it are generated."""
        self._front = rollout_id
        self._begin_rollouts()
        return self._run.take_rollout(rollout_id)

    def _begin_rollouts(self) -> None:
        args = self._run.args
        limit = first_to_wait(
            self._front, self._version, buffer_size=args.async_buffer_size, max_staleness=args.max_weight_staleness
        )
        while self._begun < min(limit, args.num_rollout):
            self._run.begin_rollout(self._begun)
            self._begun += 1
