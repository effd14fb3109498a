"""Wait until a Ray has as many nodes as a run needs; scripts/launch.sh calls this before train.py.

RAY_ADDRESS=10.0.0.1:6379 python tools/wait_for_nodes.py 4 --timeout 600
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time


def main(argv: list[str] | None = None) -> int:
    """Status 0 once the nodes are there, 1 where they were not in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, help="number of nodes, the first one included")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default 600)")
    options = parser.parse_args(argv)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        parser.error("RAY_ADDRESS is not set")
    import ray

    deadline = time.monotonic() + options.timeout
    no_answer = f"{parser.prog}: error: Ray at {address} did not answer within {options.timeout:.0f} s"
    watch = threading.Timer(options.timeout, _give_up, (no_answer,))
    watch.daemon = True
    watch.start()
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:  # no Ray there, or one that wants another token
        print(f"{parser.prog}: error: Ray at {address}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        watch.cancel()
    seen = 0
    while seen < options.nodes:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive != seen:
            print(f"{alive} of {options.nodes} nodes have joined Ray at {address}", flush=True)
        seen = alive
        if alive < options.nodes and time.monotonic() > deadline:
            print(
                f"{parser.prog}: error: {alive} of {options.nodes} nodes joined Ray at {address} within "
                f"{options.timeout:.0f} s: start the script on the others, or extend NODES_TIMEOUT",
                file=sys.stderr,
            )
            return 1
        if alive < options.nodes:
            time.sleep(1)
    return 0


def _give_up(why: str) -> None:
    """End the process from a thread: ray.init waits in code that no signal and no exception reaches."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
