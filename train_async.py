"""Train a model with reinforcement learning while the next rollouts are generated on slots of their own.

`python3 train_async.py --help` lists every option; `--dry-run` checks them and prints what would run.
"""

import argparse

from slime.entry.installation import check_installation

check_installation()

from slime.driver.pipeline import Pipeline  # noqa: E402
from slime.driver.process import run_driver  # noqa: E402
from slime.driver.run import Run  # noqa: E402
from slime.driver.schedule import is_due  # noqa: E402
from slime.entry.arguments import parse_args  # noqa: E402


def main() -> None:
    """Run the asynchronous loop."""
    run_driver(train, parse_args(asynchronous=True))


def train(args: argparse.Namespace) -> None:
    """Rollout after rollout, from the checkpoint's to ``--num-rollout``; others are generated meanwhile."""
    with Run(args) as run:
        args = run.start()
        pipeline = Pipeline(run)

        with run.first_push():
            pipeline.push_weights(version=args.start_rollout_id)

            if run.scores_its_start():
                run.begin_evaluation(version=args.start_rollout_id)

        for rollout_id in run.rollouts():
            with run.step(rollout_id):
                batches = pipeline.next(rollout_id)
                run.train(rollout_id, batches)
                evaluates = is_due(rollout_id, args.eval_interval)

                if evaluates or is_due(rollout_id, args.update_weights_interval):
                    pipeline.push_weights(version=rollout_id + 1)

                if evaluates:
                    run.begin_evaluation(version=rollout_id + 1)

                if is_due(rollout_id, args.save_interval, last=args.num_rollout):
                    run.save(rollout_id)


if __name__ == "__main__":
    main()
