"""A driver as a process: its loop, what an error or a signal makes of it, and its exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from slime.driver.preflight.contract_hint import contract_hint
from slime.driver.preflight.dry_run import dry_run
from slime.driver.preflight.patch_report import check as check_patches
from slime.driver.schedule import NothingLeftError, check_remaining
from slime.files.storage import StorageError
from slime.observability.console import program, say, warn
from slime.options.flags.values import shortened
from slime.ray.supervision import RayDownError, RunError
from slime.utils.command_line import strike_secrets
from slime.utils.errors import BadInputError

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
        say(f"{program()}: error: {error}", sys.stderr)
        # At a usual end Ray's client would look for its head for a minute. The janitor ends what is left.
        os._exit(error.exit_status)
    except (RunError, StorageError, BadInputError) as error:
        hint = contract_hint(args, str(error)) if type(error) is RunError else ""
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
