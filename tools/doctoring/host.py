"""What the host gives a run: shared memory, limits, ports, the way to the network."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from slime.files.storage import amount
from slime.utils.environment import proxy_of
from slime.utils.redaction import redacted_line
from tools.doctoring.findings import Finding, Setting, fine, note, stops, warning

_LEAST_SHARED, _MUCH_SHARED = 64 << 20, 1 << 30
_FEW_FILES, _ENOUGH_FILES = 1024, 65536
_FEW_TASKS = 4096
_PORT_OPTIONS = ("sglang_router_port", "agent_port", "master_port")
_ANSWER_S = 3.0
_OUTSIDE = ("http://huggingface.co", "https://huggingface.co")
_CGROUP = Path("/sys/fs/cgroup")


def shared_memory(setting: Setting) -> Iterator[Finding]:
    """Tensors between processes of a host, Ray's objects and NCCL's buffers are there."""
    place = setting.shared_memory
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        yield stops(f"{place}: {error.strerror}: processes of a host cannot share tensors")
        return
    told = f"{amount(usage.free)} of {amount(usage.total)} are free in {place}"
    if usage.free < _LEAST_SHARED:
        yield stops(f"{told}: NCCL, Ray and pushes on a CPU fail for want of it")
    elif usage.free < _MUCH_SHARED:
        yield warning(f"{told}: Ray then keeps its objects on the disk, and a push must fit")
    else:
        yield fine(told)


def limits(setting: Setting) -> Iterator[Finding]:
    """Files and processes that may be open, and the memory that a container may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"open files: {_number(soft)}, at most {_number(hard)}"
    if 0 <= hard <= _FEW_FILES:
        yield stops(f"{told}: Ray and hundreds of requests in flight need more")
    elif 0 <= hard < _ENOUGH_FILES:
        yield warning(f"{told}: many requests in flight may need more")
    else:
        yield fine(told)
    tasks = min((each for each in (_tasks_of_user(), _of_cgroup("pids.max")) if each is not None), default=None)
    if tasks is not None and tasks < _FEW_TASKS:
        yield warning(f"processes and threads: {tasks} at most: on a host of many cores a run has thousands")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound, used = _of_cgroup("memory.max"), _of_cgroup("memory.current")
    if bound is not None and bound < memory:
        yield note(f"this container may take {amount(bound)} of the host's {amount(memory)}, {amount(used or 0)} are")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if any(Path("/sys/class/infiniband").glob("*")) and locked != resource.RLIM_INFINITY:
        yield warning(f"locked memory: {_number(locked)} bytes: RDMA needs it without a bound")


def ports(setting: Setting) -> Iterator[Finding]:
    """Whether those that were named are free, and connections can be made at all."""
    given = {name: setting.options.get(name, "") for name in _PORT_OPTIONS}
    named = {**dict.fromkeys(setting.ports, "--port")}
    named |= {int(port): f"--{name.replace('_', '-')}" for name, port in given.items() if port.isdigit() and int(port)}
    for port, flag in named.items():
        if why := _why_not_bound(port):
            yield stops(f"port {port} ({flag}): {why}")
        else:
            yield fine(f"port {port} ({flag}) is free")
    if why := _why_not_bound(0):
        yield stops(f"no port of loopback can be bound: {why}")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield warning(f"the host's own name, {name}, has no address: add it to /etc/hosts, where several hosts run")
    else:
        if address.startswith("127.") and setting.options.get("actor_num_nodes", "1") != "1":
            yield warning(f"the host's own name, {name}, is {address}, which other hosts do not reach")


def proxies(setting: Setting) -> Iterator[Finding]:
    """Whether the proxies that the environment names answer; a run asks its own processes without them."""
    found = {proxy for url in _OUTSIDE if (proxy := proxy_of(url))}
    for proxy in sorted(found):
        shown, parts = redacted_line(proxy), urlsplit(proxy)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_ANSWER_S):
                yield fine(f"the proxy {shown} takes connections")
        except OSError as error:
            yield warning(
                f"the proxy {shown} does not answer ({error.strerror or error}): downloads, trackers and judges "
                "behind it will hang or fail"
            )


def _why_not_bound(port: int) -> str:
    try:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("", port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _tasks_of_user() -> int | None:
    bound = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return None if bound == resource.RLIM_INFINITY else bound


def _of_cgroup(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((_CGROUP / name).read_text())
    return None


def _number(count: int) -> str:
    return "without a bound" if count == resource.RLIM_INFINITY else str(count)
