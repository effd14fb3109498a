"""Start the router: ``python -m slime.backends.sglang.launch_router <flags of `router_parser`>``.

The key comes by environment: a command line is readable by every user of the host.
"""

from __future__ import annotations

import os
import sys

from slime.backends.sglang.process import GENERATE_KEY_VARIABLE
from slime.options.sglang import router_parser
from slime.utils.http_utils import allow_open_files


def main() -> None:
    """Run the router until it is told to end."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    allow_open_files()
    flags = sys.argv[1:]
    if GENERATE_KEY_VARIABLE in os.environ:
        flags += ["--api-key", os.environ[GENERATE_KEY_VARIABLE]]
    values = router_parser(with_address=True).parse_args(flags)
    launch_router(RouterArgs.from_cli_args(values, use_router_prefix=False))


if __name__ == "__main__":
    main()
