"""Start one SGLang server: ``python -m slime.backends.sglang.launch <flags of sglang.launch_server>``.

It is SGLang's own launcher, with what `patches` changes before it, and with keys that come by environment, because a
command line is readable by every user of the host, and that are struck from the log, where SGLang prints them.
"""

from __future__ import annotations

from slime.processes import heartbeat
from slime.processes.kernel import die_with_parent

# First of all: processes that SGLang spawns run this module again before anything else, and then import for up to a
# minute until they ask the kernel for this themselves.
if __name__ == "__mp_main__":
    die_with_parent()

import importlib
import logging
import os
import sys
from typing import Any

from slime.backends.sglang import patches
from slime.backends.sglang.fixes import is_worth_a_line, refuse_other_layouts
from slime.processes.server_process import (
    ADMIN_KEY_VARIABLE,
    FLOAT8_VARIABLE,
    GENERATE_KEY_VARIABLE,
    HELD_VARIABLE,
    secret_flags,
    server_secrets,
)
from slime.utils import patching
from slime.utils.http_utils import redact

_ACCESS_LOG_FLAG = "--uvicorn-access-log-exclude-prefixes"
"""Whoever passes it says by it which requests the log is to have."""


def _strike_keys_from_log() -> None:
    secrets = server_secrets()
    make_record = logging.getLogRecordFactory()

    def make_redacted_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if secrets and any(secret in (text := record.getMessage()) for secret in secrets):
            record.msg, record.args = redact(text, secrets), None
        return record

    logging.setLogRecordFactory(make_redacted_record)


def _patch(*tables: tuple[patching.Patch[patches.ServerFacts], ...]) -> None:
    server = patches.ServerFacts.of_command(sys.argv[1:])
    try:
        for table in tables:
            patching.apply(table, server)
    except patching.UntestedVersionError as error:
        sys.exit(f"error: {error}")


# At the top level: on hosts with CUDA SGLang spawns its schedulers, and a spawned process runs this module again, with
# the same flags, but not `main`. On others they are forked from the first process, after all of this.
heartbeat.begin()
_patch(patches.CPU_STAND_INS, patches.EVERY_PROCESS)
_strike_keys_from_log()


def main() -> None:
    """Run the server until it is told to end."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if HELD_VARIABLE in os.environ:
        importlib.import_module("sglang.srt.entrypoints.http_server")  # which `run_server` imports, and takes longest
        print("imported; goes on when the run starts it", flush=True)
        sys.stdin.readline()
    _patch(patches.SERVER_PROCESS)
    flags = [*sys.argv[1:], *secret_flags()]
    for flag, variable in (("--api-key", GENERATE_KEY_VARIABLE), ("--admin-api-key", ADMIN_KEY_VARIABLE)):
        if variable in os.environ:
            flags += [flag, os.environ[variable]]
    if _ACCESS_LOG_FLAG not in flags:
        logging.getLogger("uvicorn.access").addFilter(is_worth_a_line)
    server_args = prepare_server_args(flags)
    if FLOAT8_VARIABLE in os.environ:
        refuse_other_layouts(server_args)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
