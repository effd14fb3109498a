"""Where the agents' gateway listens, and what is wrong with their flags."""

from __future__ import annotations

import errno
import socket
from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.rules import check
from slime.options.serving.agents import EVERY_INTERFACE, RULES


def gateway_host(args: Namespace) -> str:
    """The address of this host at which the gateway listens: the one that was named, else the router's. Of a router
    that is still to be started the one that it will have."""
    # Later than the options, whose pages are made where there is no client of HTTP.
    from slime.utils.http_utils import LOOPBACK, host_ip, is_own_address

    if args.agent_host is not None:
        return str(args.agent_host)
    router = args.sglang_router_ip
    if router is None:
        return LOOPBACK if args.no_api_keys else host_ip()
    return str(router) if is_own_address(router) else host_ip()


def check_agents(args: Namespace) -> None:
    """OptionError for flags that nothing heeds, and for an address at which no agent would reach the gateway or where
    it cannot listen: on this host, where the rollout manager runs; only a ``--dry-run`` may be elsewhere."""
    check(args, RULES)
    host, port = args.agent_host, args.agent_port
    if host in EVERY_INTERFACE:
        raise OptionError(f"--agent-host {host} is every interface: name the address at which agents reach this host")
    if host is None and not port:
        return
    listens_at = gateway_host(args)
    family = socket.AF_INET6 if ":" in listens_at else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway does
        try:
            probe.bind((listens_at, port))
        except OSError as error:
            if port and error.errno in (errno.EADDRINUSE, errno.EACCES):
                line = f"--agent-port {port} at {listens_at}: {error.strerror}; name another, or 0 for any"
                raise OptionError(line) from error
            if not args.dry_run:
                raise OptionError(
                    f"--agent-host {listens_at}, where the gateway would listen: {error.strerror}"
                ) from error
