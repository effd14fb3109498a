"""A Ray for one run: on ports that are reserved, in a directory of its own, and ended with all that runs in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.environment import bypass_proxies, guard_ray_token
from slime.utils.errors import BadInputError, SlimeError

if TYPE_CHECKING:
    from slime.processes.server_process import ServerProcess

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCH = REPOSITORY / "scripts" / "launch.sh"
EXTERNAL = "SLIME_SCRIPT_EXTERNAL_RAY"
JOB_SERVER_PORT = 8265
"""Where a Ray has its job server unless told otherwise."""
_JOIN_PORT = "6379"
_PORTS = {
    "--port": "SLIME_SCRIPT_RAY_PORT",
    "--dashboard-port": "SLIME_SCRIPT_RAY_DASHBOARD_PORT",
    "--dashboard-agent-listen-port": "SLIME_SCRIPT_RAY_AGENT_PORT",
    "--ray-client-server-port": "SLIME_SCRIPT_RAY_CLIENT_PORT",
}
"""The ports of ``ray start`` that are the same for every Ray of a host, and variables by which one is asked for."""
_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_BELOW = len("/slime_ray_12345678/session_2025-01-01_00-00-00_000000_1234567/sockets/dash_MetricsHead")
"""What is added to the path of the place for temporary files."""
_WITHOUT_GPU = ("--num-gpus", "0", "--object-store-memory", str(512 << 20))
_DEFAULTS = {
    # The dashboard's first start after an installation compiles its modules, which takes two cores over a minute.
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
    # A driver that is told to end ends its engines first.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Without it a Ray that is told to report no usage reports that to the world.
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    # Ray warns that it will stop hiding GPUs from tasks that ask for none; no actor of ours relies on that.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Of the environment of a Ray, unless ours says otherwise."""
_START_S, _GRACE_S, _POLL_S = 240.0, 60.0, 0.2
_WITH_TOKEN = '_use_token; exec "$@"'


@dataclass(frozen=True)
class Ray:
    """A Ray that takes jobs."""

    address: str
    """The URL of its job server, which `scripts/launch.sh` takes as RAY_ADDRESS."""
    directory: Path | None = None
    """Of one of our own: where it writes."""
    process: ServerProcess | None = None

    def log_of(self, job: str) -> str:
        """Where the log of a job is: a file, or where that may be on another host, the command that prints it."""
        if self.directory is None:
            return f"`ray job logs --address {self.address} {job}`"
        return str((self.directory / "session_latest").resolve() / "logs" / f"job-driver-{job}.log")

    def wait(self) -> None:
        """Until it has ended."""
        while self.process is not None and self.process.poll() is None:
            time.sleep(1)


@dataclass(frozen=True)
class Node:
    """Which of the run's nodes this host is."""

    count: int
    rank: int
    head: str
    """The address of the first."""


def this_node(count: int | None = None) -> Node:
    """By NODE_RANK and MASTER_ADDR, or as SLURM says: SLURM_NODEID and SLURM_JOB_HOSTNAMES, names with blanks between,
    of which there are ``count``. BadInputError where it is not known which of several this is."""
    names = os.environ.get("SLURM_JOB_HOSTNAMES", "").split()
    rank = os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID")
    head = os.environ.get("MASTER_ADDR") or (names[0] if names else None)
    if count == 1:
        return Node(1, 0, os.environ.get("MASTER_ADDR") or "127.0.0.1")
    count = count or len(names)
    if not count or rank is None or head is None:
        raise BadInputError(
            "several nodes need SLURM_NODEID (or NODE_RANK) and SLURM_JOB_HOSTNAMES, as `scontrol show hostnames "
            '"$SLURM_JOB_NODELIST"` prints it (to run, MASTER_ADDR does instead), on each of them'
        )
    if not (rank.isdecimal() and int(rank) < count):
        raise BadInputError(f"node {rank} is not one of {count}: SLURM_NODEID (or NODE_RANK) is from 0 to {count - 1}")
    return Node(count, int(rank), head)


@contextlib.contextmanager
def own_ray(slots: int, node: Node) -> Iterator[Ray]:
    """Within the block a Ray runs of which this host, the first node, has ``slots`` slots. It ends with the block, or
    with this process, however that ends, and with it all that it has started. Its logs stay. SlimeError where it did
    not start, other nodes did not join it, or a port that it has to have is taken."""
    from slime.processes.server_process import ServerProcess

    bypass_proxies([node.head, "169.254.169.254", "metadata.google.internal"])
    with contextlib.ExitStack() as held:
        ports = _reserve(node, held)
        directory = _directory(held)
        command = [*_ray("start"), "--head", "--block", "--disable-usage-stats", "--log-color", "false"]
        command += ["--node-ip-address", _ip(node.head), "--dashboard-host", "127.0.0.1", "--temp-dir", str(directory)]
        # Workers take any free port: the range that they have by default is the same for every Ray of the host.
        command += ["--min-worker-port", "0", "--max-worker-port", "0", *slot_flags(slots)]
        command += [word for flag, port in ports.items() for word in (flag, str(port))]
        guard_ray_token()
        process = ServerProcess(command, _DEFAULTS | _environment(), directory / "ray.log", grace=_GRACE_S)
        try:
            process.start()
            server, agent = ports["--dashboard-port"], ports["--dashboard-agent-listen-port"]
            _wait_until_ready(process, directory, [("127.0.0.1", server), (node.head, agent)])
            guard_ray_token()
            _wait_for_nodes(node, ports["--port"])
            ray = Ray(f"http://127.0.0.1:{server}", directory, process)
            print(f"execute_train: Ray started for this run; job server {ray.address}, logs {directory}", flush=True)
            yield ray
        finally:
            process.stop()


def join_head(slots: int, node: Node) -> None:
    """Have this host be a further node of the first node's Ray until that ends; SlimeError if there was none."""
    from slime.processes.server_process import ServerProcess

    nodes = {"NUM_NODES": str(node.count), "NODE_RANK": str(node.rank), "MASTER_ADDR": node.head}
    words = f"{os.environ.get('RAY_START_ARGS', '')} {' '.join(slot_flags(slots))}"
    nodes |= {
        "RAY_PORT": os.environ.get(_PORTS["--port"]) or _JOIN_PORT,
        "RAY_START_ARGS": words,
        "PYTHON": sys.executable,
    }
    directory = _new_directory()
    process = ServerProcess(bash("launch train.py"), os.environ | nodes, directory / "ray.log", grace=_GRACE_S)
    here = f"node {node.rank} of {node.count}"
    print(f"execute_train: {here} joins {node.head}; its log is {directory}/ray.log", flush=True)
    try:
        process.start()
        Ray("", directory, process).wait()
    finally:
        process.stop()
    if "Ray runtime started" not in (said := process.tail(400)):
        raise SlimeError(f"node {node.rank} did not join the Ray of {node.head}: {_last_line(said)}")


def bash(program: str, *words: str) -> list[str]:
    """The command line of a shell that has `scripts/launch.sh`, and ``words`` as ``$@``."""
    return ["bash", "-c", f'source "$0"; {program}', str(LAUNCH), *words]


def stop_job(ray: Ray, job: str) -> None:
    """Have a job end, and wait for it; one that has ended, or was never taken, is left alone."""
    words = [*_ray("job"), "stop", "--address", ray.address, job]
    with contextlib.suppress(subprocess.TimeoutExpired):  # Ray itself is ended next, if it is ours
        subprocess.run(bash(_WITH_TOKEN, *words), env=_environment(), capture_output=True, timeout=_GRACE_S + 30)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}


def slot_flags(slots: int) -> tuple[str, ...]:
    """Words of ``ray start``: slots are GPUs, or CPUs on a host without."""
    if _has_gpu():
        return "--num-gpus", str(slots)
    return "--num-cpus", str(max(os.cpu_count() or 1, slots)), *_WITHOUT_GPU


def _has_gpu() -> bool:
    """Whether trainers will compute on GPUs; torch, which says so, takes seconds to import, and is not needed here."""
    if not (Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")):
        return False
    code = "import sys; from slime.utils import device; sys.exit(not device.is_cuda())"
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}).returncode == 0


def _ip(host: str) -> str:
    return host if ":" in host else socket.gethostbyname(host)


def _ray(command: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", command]


def _reserve(node: Node, held: contextlib.ExitStack) -> dict[str, int]:
    """Ports for the flags of `_PORTS`, which no other run takes until ``held`` is closed; or BadInputError."""
    from slime.utils.http_utils import PortReservation

    wanted = {flag: os.environ.get(variable, "") for flag, variable in _PORTS.items()}
    if node.count > 1:
        wanted["--port"] = wanted["--port"] or _JOIN_PORT
    reservations: dict[str, PortReservation] = {}
    # Those that have to be certain ones come first: any other flag might get these.
    for flag in sorted(_PORTS, key=lambda flag: not wanted[flag]):
        port, variable = wanted[flag], _PORTS[flag]
        if port and not (port.isdecimal() and 0 < int(port) < 2**16):
            raise BadInputError(f"{variable}={port} is not a port")
        try:
            reservations[flag] = PortReservation(node.head, port=int(port) if port else None)
        except OSError as error:
            if not port or error.strerror:
                why = error.strerror or error
                raise BadInputError(f"a Ray cannot be started at MASTER_ADDR={node.head}: {why}") from error
            raise BadInputError(
                f"port {port} of this host is taken, perhaps by a Ray that runs: set {variable} to another one, or "
                f"{EXTERNAL}=1 to use the Ray that runs (RAY_ADDRESS says where, if not at port {JOB_SERVER_PORT})"
            ) from error
        held.callback(reservations[flag].close)
    for reservation in reservations.values():
        reservation.release()
    return {flag: reservation.port for flag, reservation in reservations.items()}


def _directory(held: contextlib.ExitStack) -> Path:
    """Of one that is made for the Ray only logs are left when ``held`` is closed."""
    if given := os.environ.get("SLIME_SCRIPT_RAY_TEMP_DIR"):
        directory = Path(given).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    directory = _new_directory()
    held.callback(_keep_logs, directory)
    return directory


def _new_directory() -> Path:
    base = os.path.abspath(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    fits = len(os.fsencode(base)) + _BELOW <= _SOCKET_BYTES
    return Path(tempfile.mkdtemp(prefix="slime_ray_", dir=base if fits else "/tmp"))


def _keep_logs(directory: Path) -> None:
    for path in [*directory.glob("session_2*/*"), *directory.glob("*.json")]:
        if path.name != "logs":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _wait_until_ready(process: ServerProcess, directory: Path, places: Sequence[tuple[str, int]]) -> None:
    """Until all ``places`` take connections; the agent's, the last part of a Ray, is among them."""
    deadline = time.monotonic() + _START_S
    while not all(map(_listens, places)):
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            how = f"did not start within {_START_S:g} s" if ended is None else f"ended with status {ended}"
            raise SlimeError(f"the Ray of this run {how}: {_last_line(process.tail())}; its logs are in {directory}")
        time.sleep(_POLL_S)


def _listens(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place, timeout=2):
            return True
    except OSError:
        return False


def _wait_for_nodes(node: Node, port: int) -> None:
    if node.count == 1:
        return
    words = [sys.executable, str(REPOSITORY / "tools" / "wait_for_nodes.py"), str(node.count)]
    words += ["--timeout", os.environ.get("NODES_TIMEOUT", "600")]
    there = {"RAY_ADDRESS": f"{node.head}:{port}"}
    if subprocess.run(bash(_WITH_TOKEN, *words), env=os.environ | there).returncode:
        raise SlimeError(f"not all of {node.count} nodes have joined the Ray at {node.head}:{port}")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
