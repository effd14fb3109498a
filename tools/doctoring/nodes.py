"""The hosts of a running Ray: whether it answers, and how far their clocks are apart."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from tools.doctoring.findings import Finding, Setting, fine, note, stops, warning

_ASK = """
import json, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0)
def now():
    return time.time()

found = []
for node in ray.nodes():
    if node["Alive"]:
        here = now.options(scheduling_strategy=On(node["NodeID"], soft=False))
        ray.get(here.remote(), timeout=60)
        best = None
        for _ in range(5):
            before = time.time()
            there = ray.get(here.remote(), timeout=60)
            after = time.time()
            if best is None or after - before < best[1]:
                best = there - (before + after) / 2, after - before
        found.append([node["NodeManagerAddress"], *best])
print(json.dumps(found))
"""
_ASK_S = 150.0
_FAR_S = 1.0


def clocks(setting: Setting) -> Iterator[Finding]:
    """Each host's clock against this one's, as exactly as an answer is quick; lines of hosts are compared by them."""
    address = os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        yield note("RAY_ADDRESS is not set: a run starts a Ray of its own, on this host")
        return
    if setting.version_of("ray") is None:
        return
    said = setting.printed_by([sys.executable, "-c", _ASK], _ASK_S)
    if said is None:
        yield stops(f"RAY_ADDRESS={address}: no Ray answers there, or one of its hosts runs no tasks")
        return
    hosts = [(str(host), float(ahead), float(trip)) for host, ahead, trip in json.loads(said.splitlines()[-1])]
    for host, ahead, trip in hosts:
        told = f"the clock of {host} is {abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} this one's"
        told += f" (to {trip / 2:.3f} s)"
        yield warning(told) if abs(ahead) - trip / 2 > _FAR_S else fine(told)
