"""Start one SGLang server: ``python -m slime.backends.sglang.launch <flags of sglang.launch_server>``.

It is SGLang's own launcher, with the fixes of `compat` and the configs of `configs` before it, and with keys that
come by environment, because a command line is readable by every user of the host, and that are struck from the log,
where SGLang prints them.
"""

from __future__ import annotations

from slime.utils.processes import die_with_parent

# First of all: SGLang's own processes run this module again before anything else, and then import for up to a minute
# until they ask the kernel for this themselves.
if __name__ == "__mp_main__":
    die_with_parent()

import importlib
import logging
import os
import sys
from typing import Any

from slime.backends.sglang import compat
from slime.backends.sglang.float8 import refuse_other_layouts
from slime.backends.sglang.process import (
    ADMIN_KEY_VARIABLE,
    FLOAT8_VARIABLE,
    GENERATE_KEY_VARIABLE,
    HELD_VARIABLE,
    secret_flags,
)
from slime.utils.command_line import secrets_of
from slime.utils.http_utils import redact
from slime.utils.stores import serve_stores_where_they_are_reached


def _secrets() -> tuple[str, ...]:
    keys = (os.environ.get(GENERATE_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))
    return (*filter(None, keys), *secrets_of(secret_flags()))


def _strike_keys_from_log() -> None:
    secrets = _secrets()
    make_record = logging.getLogRecordFactory()

    def make_redacted_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if secrets and any(secret in (text := record.getMessage()) for secret in secrets):
            record.msg, record.args = redact(text, secrets), None
        return record

    logging.setLogRecordFactory(make_redacted_record)


def _strike_keys_from_answers() -> None:
    """Of /server_info above all, which the key for generation opens: it would give the other one away."""
    from sglang.srt.entrypoints import http_server

    secrets, plain = _secrets(), http_server.msgspec_to_builtins

    def struck(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value, secrets)
        if isinstance(value, dict):
            return {name: struck(each) for name, each in value.items()}
        return [struck(each) for each in value] if isinstance(value, list | tuple) else value

    http_server.msgspec_to_builtins = lambda value: struck(plain(value))


def _register_configs() -> None:
    # transformers asks for packages that `compat` stands in for.
    from slime.backends.sglang import configs

    configs.register()


# At the top level: SGLang spawns its schedulers, and a spawned process runs this module again, with the same flags, but
# not `main`.
compat.install(sys.argv[1:])
compat.route_by_present_weights(sys.argv[1:])
compat.find_experts_in_turn(sys.argv[1:])
compat.sleep_when_all_do(sys.argv[1:])
serve_stores_where_they_are_reached()
_register_configs()
_strike_keys_from_log()
if FLOAT8_VARIABLE in os.environ:
    compat.keep_cache_scales()


def main() -> None:
    """Run the server until it is told to end."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if HELD_VARIABLE in os.environ:
        importlib.import_module("sglang.srt.entrypoints.http_server")  # which `run_server` imports, and takes longest
        print("imported; goes on when the trainers have taken their memory", flush=True)
        sys.stdin.readline()
    _strike_keys_from_answers()
    flags = [*sys.argv[1:], *secret_flags()]
    if "--enable-lora" in flags:
        compat.unload_adapters_at_once()
    for flag, variable in (("--api-key", GENERATE_KEY_VARIABLE), ("--admin-api-key", ADMIN_KEY_VARIABLE)):
        if variable in os.environ:
            flags += [flag, os.environ[variable]]
    server_args = prepare_server_args(flags)
    if FLOAT8_VARIABLE in os.environ:
        refuse_other_layouts(server_args)
    if server_args.node_rank > 0:
        compat.end_with_any_scheduler()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
