"""Start the router: ``python -m slime.backends.sglang.launch_router <flags of `router_parser`>``.

Keys come by environment: a command line is readable by every user of the host.
"""

from __future__ import annotations

import os
import sys

from slime.options.flags.sglang import router_module, router_parser
from slime.processes.server_process import ADMIN_KEY_VARIABLE, GENERATE_KEY_VARIABLE, secret_flags
from slime.utils.http_client import allow_open_files


def main() -> None:
    """Run the router until it is told to end."""
    import setproctitle

    setproctitle.setproctitle("sglang::router")
    allow_open_files()
    flags = [*sys.argv[1:], *secret_flags()]
    if GENERATE_KEY_VARIABLE in os.environ:
        flags += ["--api-key", os.environ[GENERATE_KEY_VARIABLE]]
    values = router_parser(with_address=True).parse_args(flags)
    router = router_module("router_args").RouterArgs.from_cli_args(values, use_router_prefix=False)
    if ADMIN_KEY_VARIABLE in os.environ:
        # Else the key for generation opens /workers too, by which a stranger would come between a run and its engines.
        # The router's log of control calls has the key's id and name.
        router.control_plane_api_keys += [("slime", "slime", os.environ[ADMIN_KEY_VARIABLE], "admin")]
    router._validate_router_args()
    # Not by its `launch_router`: sglang-router's imports SGLang and torch for a balancer in Python.
    router_module("router").Router.from_args(router).start()


if __name__ == "__main__":
    main()
