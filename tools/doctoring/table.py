"""The table of checks: a check is declared here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tools.doctoring import gpus, host, nodes, packages, places, self_test
from tools.doctoring.findings import Check, Finding, Level, Setting

_INSTALL = "bash scripts/install.sh installs the tested set (docs/install.md)"

CHECKS = (
    Check("python", packages.python, "install Python 3.11 or 3.12 and a C compiler (docs/install.md)"),
    Check("packages", packages.versions, f"{_INSTALL}; activate its environment: source .venv/bin/activate"),
    Check("optional packages", packages.optional, "pip install the package, where you want what it is for"),
    Check("GPUs", gpus.devices, "the driver and torch must fit: SLIME_CUDA=12.9 for older drivers (docs/install.md)"),
    Check("links", gpus.links, "nvidia-smi topo -m and ibstat show them; NCCL_DEBUG=INFO says which NCCL takes"),
    Check("GPU memory", gpus.strangers, "end those processes, or leave their GPUs out by CUDA_VISIBLE_DEVICES"),
    Check("/dev/shm", host.shared_memory, "give the container more: docker run --ipc=host, or --shm-size 32g"),
    Check(
        "limits", host.limits, "ulimit -n 65536; docker run --ulimit nofile=65536 --ulimit memlock=-1 --pids-limit -1"
    ),
    Check("ports", host.ports, "end what listens there (ss -ltnp), name another, or leave the flag out: any is taken"),
    Check("proxies", host.proxies, "unset http_proxy, https_proxy and all_proxy, or add hosts to no_proxy"),
    Check("directories", places.directories, "free some space, or name directories of a faster disk"),
    Check("caches", places.caches, "set the variable to a directory that can be written"),
    Check("Ray's nodes", nodes.clocks, "ray status; set the clocks of all hosts by NTP (chronyc tracking)"),
)
SELF_TEST = Check("self-test", self_test.run_in_small, "run scripts/quickstart.sh for all that it prints, and its logs")


def findings_of(check: Check, setting: Setting) -> list[Finding]:
    """What it sees; a check that fails is a finding, too."""
    found: list[Finding] = []
    try:
        found.extend(check.look(setting))
    except Exception as error:  # of a host that is stranger than it knows
        found.append(Finding(Level.WARNING, f"this check could not be made: {type(error).__name__}: {error}"))
    return found


def lines_of(results: Iterable[tuple[Check, list[Finding]]]) -> Iterator[str]:
    """One line a finding, and the advice below those that need it."""
    for check, found in results:
        for finding in found:
            yield f"{finding.level.value:<8} {check.name}: {finding.text}"
        if any(finding.level in (Level.WARNING, Level.STOPS) for finding in found):
            yield f"{'':<8} -> {check.advice}"
