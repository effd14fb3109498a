"""``--rollout-external-engine-addrs``: SGLang servers that run already, and get a run's requests and weights too."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from urllib.parse import urlsplit

from slime.options.errors import OptionError

FLAG = "--rollout-external-engine-addrs"


def normalize_external_engine_addr(addr: str) -> str:
    """``http://host:port`` of ``host:port`` or a URL; an IPv6 host has brackets. OptionError for anything else."""
    text = addr.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    rest = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or not host or not port or rest or (":" in host) != ("[" in parts.netloc):
        raise OptionError(f"{FLAG} {addr}: must be HOST:PORT or http://HOST:PORT, an IPv6 host in brackets")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def settle_external_engines(args: Namespace) -> None:
    """Set ``external_engine_urls``: none in a run that has no engines. OptionError for a bad address, or one given
    twice."""
    addrs = args.rollout_external_engine_addrs or []
    urls = [normalize_external_engine_addr(addr) for addr in addrs]
    if twice := [url for url, count in Counter(urls).items() if count > 1]:
        raise OptionError(f"{FLAG}: {twice[0].removeprefix('http://')} is named twice")
    args.external_engine_urls = [] if args.placement == "train_only" else urls
