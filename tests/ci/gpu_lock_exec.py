#!/usr/bin/env python3
"""Run a command on GPUs that no other user of this program has.

    python tests/ci/gpu_lock_exec.py --count 2 -- python tests/test_x.py
    python tests/ci/gpu_lock_exec.py --devices 0,1 -- bash -c 'echo $CUDA_VISIBLE_DEVICES'
    python tests/ci/gpu_lock_exec.py --print-only

Waits until the GPUs that are asked for are free, takes all of them or none, and gives their names to the command in
CUDA_VISIBLE_DEVICES. Of each GPU it holds the lock of one file, for as long as anything that the command started
lives: when the command ends, or this program does, however it does, the command's whole tree of processes ends too,
and then the GPUs are free. Programs exclude each other where they use the same files: same --lock-path-pattern, in
containers a /dev/shm in common (docker run --ipc=host) and the same numbers for the same GPUs.

What to choose from: the entries of the variable that --target-env-name names, or else of CUDA_VISIBLE_DEVICES, where
it is set (an empty one leaves no GPU); or else 0 to N-1, where N is --total-gpus, or what nvidia-smi or /dev/nvidia*
show, or 8.

SIGINT, SIGTERM and SIGHUP end it: the command gets SIGTERM, then all below it do, and what is left after --grace gets
SIGKILL. SIGHUP does not where it is ignored already, as nohup has it.

Exit status: the command's; 128 + n when signal n ended the command or this program; 126 or 127 when the command
cannot be run; 2 for a request that can never be met; 1 when the GPUs were not free within --timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.processes.supervisor import Supervisor  # imports the standard library only

_PROGRAM = "gpu_lock_exec"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PLACEHOLDER = "{gpu_id}"
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w./-]+")
_DEFAULT_TOTAL = 8
_NVIDIA_SMI_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SAY_AGAIN_S = 60.0
_AFTER_GRACE_S = 15.0
"""What a supervisor may take beyond the grace period; it gives up on its own before."""
_POLL_S = 1.0
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _Refused(Exception):
    """The one line that this program ends with, and its exit status."""

    def __init__(self, line: str, status: int = 2) -> None:
        super().__init__(line)
        self.status = status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1; what needs no GPU needs no lock")


def _pattern(text: str) -> str:
    if _PLACEHOLDER not in text or set("{}") & set(text.replace(_PLACEHOLDER, "")):
        raise argparse.ArgumentTypeError(f"'{text}' must have {_PLACEHOLDER}, the place of a GPU's id, and no other")
    return text


def _variable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a name of a variable")
    return text


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the command after the first ``--``."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(
        prog=_PROGRAM,
        description=__doc__,
        usage="%(prog)s [flags] (--count N | --devices A,B | --print-only) -- COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--count", type=_positive, metavar="N", help="take this many, any that are free")
    which.add_argument("--devices", metavar="A,B", help="take these, and give their names in this order")
    total = "GPUs of this host, where no variable says which may be used; default: as many as can be found"
    parser.add_argument("--total-gpus", type=_positive, metavar="N", help=total)
    timeout = "seconds to wait for GPUs; 0 tries once; default: %(default)g"
    parser.add_argument("--timeout", type=_seconds, default=86400.0, metavar="S", help=timeout)
    grace = "seconds that a command which is to end has before SIGKILL; default: %(default)g"
    parser.add_argument("--grace", type=_seconds, default=10.0, metavar="S", help=grace)
    target = "variable that names the GPUs to the command; default: %(default)s"
    parser.add_argument("--target-env-name", type=_variable, default=_VISIBLE, metavar="NAME", help=target)
    parser.add_argument(
        "--lock-path-pattern",
        type=_pattern,
        default=f"/dev/shm/custom_gpu_lock_{_PLACEHOLDER}.lock",
        metavar="PATH",
        help="lock files, in a folder that all users of the GPUs can write to; default: %(default)s",
    )
    only = "print which of --devices, or of all to choose from, are free; take none, make no file, run nothing"
    parser.add_argument("--print-only", action="store_true", help=only)
    options, unknown = parser.parse_known_args(argv[:end])
    command = argv[end + 1 :]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; flags go before --, the command after it")
    if not options.print_only:
        if options.count is None and options.devices is None:
            parser.error("no GPUs asked for: pass --count N or --devices A,B (or --print-only)")
        if not command:
            parser.error("no command: write it after --, e.g. --count 1 -- python tests/test_x.py")
        if shutil.which(command[0]) is None:
            raise _Refused(f"cannot run '{command[0]}': no such program; see PATH and the working directory", 127)
    return options, command


def choose_from(options: argparse.Namespace) -> dict[str, str]:
    """The GPUs that may be taken, those of ``--devices`` if it is given.

    Returns:
        Name, as the variable takes it, to the path of its lock's file.
    """
    names, source = _names(options.target_env_name, options.total_gpus)
    if options.devices is not None:
        asked = [_plain(entry) for entry in options.devices.split(",") if entry.strip()]
        if not asked or not set(asked) <= set(names):
            there = f"{', '.join(names) or 'none'} ({source})"
            raise _Refused(f"--devices '{options.devices}': must be one or more of the GPUs there are: {there}")
        names, source = asked, f"--devices {options.devices}"
    if options.count is not None and options.count > len(names):
        raise _Refused(f"--count {options.count}: the GPUs to choose from are only {len(names)} ({source})")
    ids = _ids(names)
    if twice := sorted({name for name, gpu_id in zip(names, ids, strict=True) if ids.count(gpu_id) > 1}):
        raise _Refused(f"{source} names one GPU twice: {', '.join(twice)}")
    paths = [options.lock_path_pattern.replace(_PLACEHOLDER, gpu_id) for gpu_id in ids]
    return dict(zip(names, paths, strict=True))


def _names(target: str, total: int | None) -> tuple[list[str], str]:
    for variable in (target, _VISIBLE):
        if (value := os.environ.get(variable)) is not None:
            # As CUDA reads it: what follows an entry that names no GPU, such as -1, does not count.
            entries = takewhile(_NAME.fullmatch, map(_plain, value.split(",")))
            return list(entries), f"{variable}={value}"
    if total is not None:
        source = f"--total-gpus {total}"
    elif total := len(_uuids()):
        source = "nvidia-smi"
    elif total := sum(re.fullmatch(r"nvidia\d+", entry) is not None for entry in os.listdir("/dev")):
        source = "/dev/nvidia*"
    else:
        total, source = _DEFAULT_TOTAL, "the default, as no GPU was found; --total-gpus says otherwise"
    return [str(number) for number in range(total)], source


def _plain(entry: str) -> str:
    entry = entry.strip()
    return str(int(entry)) if entry.isdecimal() else entry


def _uuids() -> dict[str, str]:
    """Number to UUID of the GPUs that the driver shows; none without one."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(re.findall(r"^(\d+), (\S+)$", done.stdout, re.MULTILINE))


def _ids(names: list[str]) -> list[str]:
    """What stands for each GPU in its lock's path: its number, so that one named by UUID is not taken a second time."""
    known = {} if all(name.isdecimal() for name in names) else _uuids()
    ids = []
    for name in names:
        # CUDA takes the beginning of a UUID for all of it.
        numbers = [number for number, uuid in known.items() if uuid.startswith(name)]
        ids.append(numbers[0] if len(numbers) == 1 else name.replace("/", "_"))
    return ids


def open_lock(path: str) -> int:
    """A descriptor of a lock file, which is made if need be, writable by every user."""
    mask = os.umask(0)
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o666)
    finally:
        os.umask(mask)
    # Without O_CREAT, which the kernel (fs.protected_regular) denies for others' files in folders such as /dev/shm.
    try:
        return os.open(path, os.O_RDWR | _OPEN)
    except PermissionError:  # made by another program for its own user; who may read it may lock it
        return os.open(path, os.O_RDONLY | _OPEN)


def _try_lock(path: str) -> int | None:
    try:
        descriptor = open_lock(path)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _unusable(path: str, error: OSError) -> _Refused:
    return _Refused(f"--lock-path-pattern: cannot open {path}: {error.strerror}; name a folder that all can write to")


def _is_free(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        # Shared, so that two who only look are not in each other's way.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _holder(path: str) -> str:
    """What the holder of a lock wrote into its file."""
    try:
        with open(path, errors="replace") as file:
            note = file.readline(200).strip()
    except OSError:
        note = ""
    return note if note.startswith("pid ") and note.isprintable() else "a process that left no note"


def _write_note(descriptor: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    note = f"pid {os.getpid()} (user {os.getuid()}, host {socket.gethostname()}, since {since})\n"
    with contextlib.suppress(OSError):  # it may be open for reading only, or the file system full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)


def acquire(paths: dict[str, str], count: int, timeout: float, stop: set[signal.Signals], asked: str) -> dict[str, int]:
    """Lock ``count`` of the GPUs, all or none at a time.

    ``paths`` are what `choose_from` gives, ``stop`` signals, blocked, that end the wait of ``timeout`` seconds, and
    ``asked`` is the flag for messages. Returns name to the descriptor whose closing frees the GPU.
    """
    deadline, pause, say_next = time.monotonic() + timeout, _FIRST_PAUSE_S, 0.0
    while True:
        held, busy = _lock_some(paths, count)
        if len(held) == count:
            for descriptor in held.values():
                _write_note(descriptor)
            return held
        for descriptor in held.values():
            os.close(descriptor)
        holders = ", ".join(f"GPU {name} is held by {_holder(paths[name])}" for name in busy)
        left = deadline - time.monotonic()
        if left <= 0:
            advice = "wait longer, or end what holds them"
            raise _Refused(f"{asked}: not free within --timeout {timeout:g} s: {holders}; {advice}", status=1)
        if time.monotonic() >= say_next:
            kind = asked.split()[0].strip("-")
            _say(f"try_acquire_{kind} failed, sleep and retry (only got: {','.join(held) or 'none'}; {holders})")
            say_next = time.monotonic() + _SAY_AGAIN_S
        # Of random length: two that take and put back what the other needs do not go on in step.
        if got := signal.sigtimedwait(stop, min(left, pause * random.uniform(0.5, 1.0))):
            raise _Refused(f"{asked}: ended by {signal.Signals(got.si_signo).name} while waiting", 128 + got.si_signo)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _lock_some(paths: dict[str, str], count: int) -> tuple[dict[str, int], list[str]]:
    """Up to ``count`` locks, and the GPUs whose locks others hold."""
    held: dict[str, int] = {}
    busy: list[str] = []
    for name, path in paths.items():
        if len(held) == count:
            break
        if (descriptor := _try_lock(path)) is None:
            busy.append(name)
        else:
            held[name] = descriptor
    return held, busy


def _say(line: str) -> None:
    print(f"[{_PROGRAM}] {line}", flush=True)


def supervise(command: list[str], owner_fd: int, grace: float) -> int:
    """In a process of its own, with the owner's locks: run the command until it ends or the owner does."""
    os.setsid()
    supervisor = Supervisor(owner_fd, grace, None)  # handles signals from here on
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return supervisor.run(command)
    except OSError as error:
        raise _Refused(f"cannot run '{command[0]}': {error.strerror}", 126) from error


def run(command: list[str], grace: float, stop: set[signal.Signals]) -> int:
    """Run the command, and end all of its tree at its end, or at a signal's.

    The supervisor and its guard keep the descriptors of the locks, and the command has none: the GPUs are taken until
    the last of the three processes that see to the tree's end has ended, which one however killed leaves to the rest.

    Returns:
        The exit status.
    """
    owner_fd, our_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(our_end)
        return supervise(command, owner_fd, grace)
    os.close(owner_fd)
    stopped: int | None = None
    deadline = math.inf
    while True:
        got = signal.sigtimedwait({*stop, signal.SIGCHLD}, _POLL_S)
        if got and got.si_signo in stop and stopped is None:
            stopped = got.si_signo
            deadline = time.monotonic() + grace + _AFTER_GRACE_S
            _say(f"{signal.Signals(stopped).name}: ending the command")
            os.close(our_end)
        done, status = os.waitpid(supervisor, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return 128 + stopped if stopped is not None else code if code >= 0 else 128 - code
        if time.monotonic() > deadline:
            os.kill(supervisor, signal.SIGKILL)  # its guard then kills what is left


def main(argv: list[str] | None = None) -> int:
    """Exit status: see the top."""
    try:
        options, command = parse(sys.argv[1:] if argv is None else argv)
        paths = choose_from(options)
        if options.print_only:
            print("Free GPUs:", ",".join(name for name, path in paths.items() if _is_free(path)), flush=True)
            return 0
        # Blocked and waited for, never handled: none gets lost between the lock and the command's start.
        stop = {signal.SIGINT, signal.SIGTERM}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            stop.add(signal.SIGHUP)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how the command ended
        signal.pthread_sigmask(signal.SIG_BLOCK, {*stop, signal.SIGCHLD})
        asked = f"--count {options.count}" if options.count else f"--devices {options.devices}"
        taken = acquire(paths, options.count or len(paths), options.timeout, stop, asked)
        os.environ[options.target_env_name] = ",".join(taken)
        _say(f"Acquired GPUs: {','.join(taken)}")
        return run(command, options.grace, stop)
    except _Refused as refused:
        print(f"{_PROGRAM}: error: {refused}", file=sys.stderr, flush=True)
        return refused.status


if __name__ == "__main__":
    sys.exit(main())
