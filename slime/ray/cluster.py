"""Connecting to Ray: our own local one, or the running one that RAY_ADDRESS names (``ray job submit`` sets it)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.files.storage import why_no_directory
from slime.observability import events, logs, trace
from slime.processes.kernel import RUN_MARK, TITLES
from slime.ray import janitor, patches
from slime.ray.supervision import InputError, RunError
from slime.utils import patching
from slime.utils.environment import bypass_proxies, guard_ray_token
from slime.utils.http_utils import LOOPBACK, host_ip
from slime.utils.redaction import is_secret

_OBJECT_STORE_WITHOUT_GPU = 512 << 20
_HOST_SWITCHES = ("NCCL_", "GLOO_", "NVSHMEM_", "UCX_", "TORCH_", "TRITON_", "CUDA_", "SGLANG_", "HF_")
"""Prefixes of variables that say how this host is to be used."""
_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Never passed on, as secrets: Ray gives each worker its devices, and shows its environment to all who may ask it."""
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal")
"""Of clouds, each on its own host: Ray asks whether it runs in one. Its metrics' client heeds proxies too."""
_ANSWER_S = 60.0
"""For the first answer of a running Ray, with the start of the program that asks it."""


def connect(slots: int) -> int:
    """Join the Ray of RAY_ADDRESS, or start a local one with room for ``slots`` slots, which ends with this process;
    what `janitor.dismiss` takes at the run's end. RunError where the running Ray could not be joined, or a local one
    not be started, InputError where that could not write where it has to."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Ray colours the prefix of workers' lines, which this process prints, in files too.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    bypass_proxies([host_ip(), *_METADATA_SERVERS])
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    if address := running_address():
        _ask(address)
        owner_end = janitor.start()
        try:
            _init(**quiet)
        except ConnectionError as error:
            raise RunError(f"connect to Ray: {error} (RAY_ADDRESS={address})") from None
        return owner_end
    # Ray warns that it will stop hiding GPUs from tasks that ask for none; no actor of ours relies on that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    check_places()
    local: dict[str, Any] = {"num_cpus": max(os.cpu_count() or 1, slots), "include_dashboard": False}
    from slime.utils import device  # and torch, three seconds of a core: the processes of engines do without it

    if not device.is_cuda():
        # Ray counts GPUs by the driver's library; a torch without CUDA cannot use them.
        local |= {"object_store_memory": _OBJECT_STORE_WITHOUT_GPU, "num_gpus": 0}
    patching.apply(patches.PRINTING, True)
    owner_end = janitor.start()
    try:
        with patching.within(patches.SESSIONS, True):
            _init(address="local", **local, **quiet)
    except Exception as error:  # Ray has no type for it
        text = " ".join(str(error).split())
        # Nothing else is mended by waiting.
        again = " A machine that is busy may need another try." if "timed out" in text or "timeout" in text else ""
        _, temporary = temporary_directory()
        raise RunError(
            f"start a local Ray: {text}{again} Ray's own logs are under {temporary}/ray/session_latest/logs"
        ) from error
    return owner_end


def running_address() -> str | None:
    """Where the Ray that the run joins is; None where it starts one of its own."""
    address = os.environ.get("RAY_ADDRESS")
    return address if address and address != "local" else None


def _init(**options: Any) -> None:
    guard_ray_token()
    try:
        ray.init(**options)
    except SystemExit:  # of Ray's own handler of SIGTERM, with status 15
        sys.exit(128 + signal.SIGTERM)
    finally:
        guard_ray_token()


@contextlib.contextmanager
def leaving_after(seconds: float, status: int) -> Iterator[None]:
    """End this process with ``status`` if the block takes longer; the janitor ends what is then left of a local Ray.

    A client of Ray whose head is gone, by a signal to every process of a batch job for one, waits for it in any call,
    and after a minute ends its process with status 1.
    """
    timer = threading.Timer(seconds, os._exit, [status])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask(address: str) -> None:
    """Raise RunError where no Ray lets us in, an InputError where the address or the token would have to be another:
    ``ray.init`` itself waits without end where nothing answers."""
    if "://" in address:
        raise InputError(
            f"RAY_ADDRESS={address}: a Ray is joined from one of its hosts, by the HOST:PORT that `ray start` printed; "
            "from elsewhere, `ray job submit --address http://HOST:8265` starts train.py in the cluster"
        )
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"connect to Ray: RAY_ADDRESS={address} has not answered in {_ANSWER_S:g} s: is it running?"
        ) from None
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "AuthToken" in why:
            why += " (a Ray that wants tokens is joined with RAY_AUTH_MODE=token)"
            raise InputError(f"connect to Ray: RAY_ADDRESS={address}: {why}")
        raise RunError(f"connect to Ray: RAY_ADDRESS={address}: {why}")


def actor_environment(extra: dict[str, str] | None = None) -> dict[str, Any]:
    """The ``runtime_env`` of our actors: the driver's import path, the host's switches, one thread unless told."""
    root = str(Path(__file__).resolve().parents[2])
    import_path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(import_path)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # SGLang turns it off in its servers. A peer that has it on hands them memory that they cannot open: the first
        # broadcast of weights then ends with NCCL's "Cuda failure 'invalid argument'".
        "NCCL_CUMEM_ENABLE": "0",
    }
    variables |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_HOST_SWITCHES) and name != _DEVICES and not is_secret(name, value)
    }
    passed = (RUN_MARK, *TITLES, patching.ALLOW_VARIABLE)
    variables |= {name: os.environ[name] for name in passed if name in os.environ}
    # Slots are placed by us, from the placement group's probe; Ray must not hide the other GPUs of an engine.
    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    return {"env_vars": variables | (extra or {})}


def on_this_host() -> dict[str, Any]:
    """Ray's options of an actor that takes no slot, and is on the host of whoever makes it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def worker_options(args: argparse.Namespace) -> argparse.Namespace:
    """The options for a process that logs no metrics: without the tracker's key."""
    return argparse.Namespace(**vars(args) | {"wandb_key": None})


def enter_actor(args: argparse.Namespace, role: str) -> None:
    """First call in every actor process: its files, by its role, and the driver's directory, for hooks' own paths."""
    logging.basicConfig(level=logging.WARNING, format=logs.FORMAT)
    logs.begin(args, role)
    trace.begin(args.run_dir, role)
    events.begin(args.run_dir, role)
    if os.path.isdir(args.launch_dir):
        os.chdir(args.launch_dir)
        if args.launch_dir not in sys.path:
            sys.path.insert(0, args.launch_dir)


def serving_host(api_keys: tuple[str, str] | None) -> str:
    """The address of this host at which servers of a run listen: without keys, one that no other host reaches."""
    return LOOPBACK if api_keys is None else ray.util.get_node_ip_address()


def as_actor(cls: type, **threads: int) -> Any:
    """``cls`` as a Ray actor whose ``watch``, and each group of ``threads``, waits for none of its other methods."""
    return ray.remote(concurrency_groups={"watch": 1, **threads})(cls)


_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_RAYS_SHARE = "/ray/session_2025-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""What Ray adds to its temporary directory."""


def check_places() -> None:
    """Raise InputError, with what to set, where HOME or the temporary directory does not do for a local Ray."""
    variable, temporary = temporary_directory()
    given = f"{variable}={temporary}"
    path, added = os.path.abspath(temporary), len(_RAYS_SHARE.format(pid=os.getpid()))
    if (length := len(os.fsencode(path)) + added) > _SOCKET_BYTES:
        raise InputError(
            f"{given}: Ray's sockets there would have paths of {length} bytes, and the kernel takes {_SOCKET_BYTES}: "
            f"set RAY_TMPDIR to a directory whose path has at most {_SOCKET_BYTES - added}, such as /tmp"
        )
    if why := why_no_directory(path):
        raise InputError(f"{given}: Ray's sessions are written there, and {why}: set RAY_TMPDIR to another directory")
    home = os.path.expanduser("~")
    if why := why_no_directory(home):
        raise InputError(
            f"HOME={home}: Ray keeps its token there, and {why}: set HOME to a directory that can be written to"
        )


def temporary_directory() -> tuple[str, str]:
    """The variable that says where a local Ray has its sessions, and the directory."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "RAY_TMPDIR", "/tmp"
