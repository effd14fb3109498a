"""A driver as a process: its loop, what an error or a signal makes of it, its exit status, its directory's lock."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from slime.driver.preflight.dry_run import dry_run
from slime.driver.preflight.patch_report import check as check_patches
from slime.driver.schedule import NothingLeftError, check_remaining
from slime.entry.arguments import GROUPS
from slime.files.storage import StorageError, why_not_written
from slime.observability.progress import program, say, warn
from slime.options.flags.schema import flag_named
from slime.options.flags.values import shortened
from slime.ray.supervision import CallError, InputError, RayDownError, RunError
from slime.utils.command_line import strike_secrets
from slime.utils.errors import BadInputError

_CONTRACTS_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "plugin_contracts"
_DOCTOR = Path(__file__).resolve().parents[2] / "tools" / "doctor.py"
_CONTRACT = r'Contract\(\s*"%s"'
"""How the program that checks functions of a flag says so."""
_GENERATE = "--custom-generate-function-path"
_NAMED = re.compile(r"(--[a-z-]+-path) (\S*[^\s:,;])")
_READ = (
    *("prompt_data", "input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "hf_checkpoint"),
    *("reward_key", "max_turns", "custom_config_path"),
)
_LOCK = "run.lock"
_LONGEST = 1000
_terminated = threading.Event()
"""By SIGTERM. Kept here, as where Ray waits it makes a handler's SystemExit one with status 1, and of classes of
KeyboardInterrupt the plain one."""


def run_driver(train: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run a driver's loop, or only check it with ``--dry-run``; an error is one line and the process's exit status."""
    strike_secrets()
    try:
        check_patches(args, warn)
        if args.dry_run:
            dry_run(args)
        else:
            check_remaining(args)
            train(args)
    except NothingLeftError as over:
        say(str(over))
    except RayDownError as error:
        say(f"{program()}: error: {error}{doctor_hint(args)}", sys.stderr)
        # At a usual end Ray's client would look for its head for a minute. The janitor ends what is left.
        os._exit(error.exit_status)
    except (RunError, StorageError, BadInputError) as error:
        hint = ""
        if type(error) in (RunError, CallError):
            of_user = isinstance(error, CallError) and error.is_of_user
            hint = contract_hint(args, str(error)) or ("" if of_user else doctor_hint(args))
        say(f"{program()}: error: {shortened(str(error))}{hint}", sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt as error:
        sys.exit(exit_status(error))


def interrupt_on_sigterm() -> None:
    """Have SIGTERM end what the main thread does as Ctrl-C does, with a status of its own."""
    signal.signal(signal.SIGTERM, _interrupt)


def exit_status(error: KeyboardInterrupt | SystemExit) -> int:
    """128 and the signal's number, or what the program left with."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + (signal.SIGTERM if _terminated.is_set() else signal.SIGINT)
    return error.code if isinstance(error.code, int) else 1


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _terminated.set()
    raise KeyboardInterrupt


def contract_hint(args: argparse.Namespace, message: str) -> str:
    """A line with the command that checks the first of the user's functions that an error names, or nothing. A reward
    may read what a generate function wrote, so that this is called in its check, too."""
    for flag, path in _NAMED.findall(message):
        if not re.search(r"[.:]\w", path) or path.startswith("slime."):
            continue
        words = [flag, path]
        generate = getattr(args, "custom_generate_function_path", None)
        if flag == "--custom-rm-path" and generate is not None:
            words += [_GENERATE, generate]
        words += _read_by_functions(args)
        for check in _CONTRACTS_FOLDER.glob("test_plugin_*_contracts.py"):
            if re.search(_CONTRACT % flag, check.read_text()):
                return f"\ntest this function in seconds: {shlex.join(['python3', os.path.relpath(check), *words])}"
    return ""


def _read_by_functions(args: argparse.Namespace) -> list[str]:
    """The flags of a run whose values its functions find in samples, or read of ``args``."""
    defaults = {field.name: field.default for group in GROUPS for field in dataclasses.fields(group)}
    words = []
    for name in _READ:
        value = getattr(args, name, None)
        if value is not None and value != defaults[name]:
            words += [flag_named(name)] if value is True else [flag_named(name), str(value)]
    return words


def doctor_hint(args: argparse.Namespace) -> str:
    """A line with the command that looks at the host: what failed may have nothing to do with the run."""
    words = [os.path.relpath(_DOCTOR), *([args.run_dir] if getattr(args, "run_dir", None) else [])]
    return f"\nlook for what is wrong with this host: {shlex.join(['python3', *words])}"


def acquire_run_lock(directory: str | Path, flag: str) -> int:
    """Make the directory that ``flag`` names, and keep other runs from it until the returned descriptor is closed, as
    the kernel does when the driver ends; on a file system without locks it keeps nobody. InputError where another run
    has it, which, or nothing can be written there."""
    path = Path(directory, _LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = why_not_written(error, flag, directory) or f"{flag} {directory}: {error}"
        raise InputError(f"the lock of a run, {_LOCK}, cannot be made: {why}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, _LONGEST, 0).decode().strip()
        os.close(lock)
        raise InputError(
            f"{flag} {directory}: another run, {holder}, writes there: wait for its end, or name another --run-dir and "
            "--save"
        ) from None
    except OSError:
        return lock
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock
