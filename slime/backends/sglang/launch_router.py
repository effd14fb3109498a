"""Start the router: ``python -m slime.backends.sglang.launch_router <flags of sglang_router.launch_router>``.

The key comes by environment: a command line is readable by every user of the host.
"""

from __future__ import annotations

import os
import sys

from slime.backends.sglang.process import GENERATE_KEY_VARIABLE
from slime.utils.http_utils import allow_open_files


def main() -> None:
    """Run the router until it is told to end."""
    from sglang_router.launch_router import launch_router, parse_router_args

    allow_open_files()
    flags = sys.argv[1:]
    if GENERATE_KEY_VARIABLE in os.environ:
        flags += ["--api-key", os.environ[GENERATE_KEY_VARIABLE]]
    launch_router(parse_router_args(flags))


if __name__ == "__main__":
    main()
