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

_GRACE_S = 10.0


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

    # In ray.init and ray.nodes alike: what waits there hears no signal and no exception.
    no_answer = f"{parser.prog}: error: Ray at {address} did not answer within {options.timeout:.0f} s"
    watch = threading.Timer(options.timeout + _GRACE_S, _give_up, (no_answer,))
    watch.daemon = True
    watch.start()
    try:
        ray.init(address=address, logging_level=logging.ERROR)
        _wait(options.nodes, options.timeout, address)
    except (ConnectionError, RuntimeError, TimeoutError) as error:  # no Ray there, one that wants another token, ...
        print(f"{parser.prog}: error: Ray at {address}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        watch.cancel()
    return 0


def _wait(nodes: int, timeout: float, address: str) -> None:
    """
    Raises:
        TimeoutError: they have not all joined.
    """
    import ray

    deadline, seen = time.monotonic() + timeout, 0
    while seen < nodes:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive != seen:
            print(f"{alive} of {nodes} nodes have joined Ray at {address}", flush=True)
        seen = alive
        if alive < nodes and time.monotonic() > deadline:
            raise TimeoutError(
                f"{alive} of {nodes} nodes joined within {timeout:.0f} s: start the script on the others, or extend "
                "NODES_TIMEOUT"
            )
        if alive < nodes:
            time.sleep(1)


def _give_up(why: str) -> None:
    """End the process from a thread."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
