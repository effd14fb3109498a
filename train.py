"""Train a model with reinforcement learning: generate, train, push the new weights, and again.

`python3 train.py --help` lists every option; `--dry-run` checks them and prints what would run.
"""

import argparse

from slime.entry.installation import check_installation

check_installation()

from slime.driver.process import run_driver  # noqa: E402
from slime.driver.run import Run  # noqa: E402
from slime.driver.schedule import is_due  # noqa: E402
from slime.entry.arguments import parse_args  # noqa: E402


def main() -> None:
    """Run the synchronous loop."""
    run_driver(train, parse_args())


def train(args: argparse.Namespace) -> None:
    """Rollout after rollout, from the checkpoint's to ``--num-rollout``; again from an earlier one if trainers die."""
    with Run(args) as run:
        args = run.start()

        with run.first_push():
            run.push_weights(version=args.start_rollout_id)

            if run.scores_its_start():
                run.evaluate(version=args.start_rollout_id)

        for rollout_id in run.rollouts():
            with run.step(rollout_id):
                batches = run.generate(rollout_id)
                run.train(rollout_id, batches)

                if is_due(rollout_id, args.save_interval, last=args.num_rollout):
                    run.save(rollout_id)

                run.push_weights(version=rollout_id + 1)

                if is_due(rollout_id, args.eval_interval):
                    run.evaluate(version=rollout_id + 1)


if __name__ == "__main__":
    main()
