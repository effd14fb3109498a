"""What other processes get of this one's environment, and which requests go through the host's proxies.

A run's own traffic never does: prompts, responses and keys would pass by whoever runs the proxy. Its servers get no
proxy variables at all. Processes that run users' code keep them, for calls to the world, and list the run's own hosts
in ``no_proxy``, which every HTTP client heeds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from slime.utils.redaction import is_secret

_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_PROXY = re.compile(r"(all|ftp|grpc|https?|socks[45]?|wss?)_proxy", re.IGNORECASE)
_BYPASS = ("no_proxy", "NO_PROXY")
_PORTS = {"http": 80, "https": 443}


def server_environment(needs: Collection[str] = ()) -> dict[str, str]:
    """This process's environment for a program that runs no code of users and asks nobody outside the run: without
    proxies, and without secrets such as WANDB_API_KEY and HF_TOKEN, by their names, but for ``needs``."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _PROXY.fullmatch(name) and (name in needs or not is_secret(name, value))
    }


DETERMINISTIC: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Variables by which cuBLAS, NCCL and Transformer Engine compute the same each time, read when a device is first used.
Of the values that do, the first stands where nobody has set one; NCCL's are those that Megatron-LM takes."""


def deterministic_variables() -> dict[str, str]:
    """What trainers of a deterministic run have in their environment before they start."""
    chosen = {name: os.environ.get(name, values[0]) for name, values in DETERMINISTIC.items()}
    return chosen | kernels_of_any_shape()


def rows_alone_by_mkl() -> bool:
    """Whether `kernels_of_any_shape` does what it says on this host: MKL promises it on Intel's processors."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def kernels_of_any_shape() -> dict[str, str]:
    """Variables by which each row of a product is computed as it is alone, so that its bits do not depend on what is in
    the batch: by MKL, with the widest instructions that this host has, and on GPUs by the one of SGLang's two kernels
    that it was shown of. They are read when torch and SGLang are loaded."""
    try:
        widest = "AVX512" if " avx512f" in Path("/proc/cpuinfo").read_text() else "AVX2"
    except OSError:
        widest = "AVX2"
    return {"MKL_CBWR": f"{widest},STRICT", "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}


def forget_secrets() -> None:
    """Remove the variables whose names call them secrets from this process's environment, but Ray's: it is a worker."""
    for name, value in list(os.environ.items()):
        if is_secret(name, value) and not name.startswith("RAY_"):
            del os.environ[name]


def guard_ray_token() -> None:
    """Keep other users of the host from Ray's token, which Ray writes for all to read: who has it, commands the run."""
    with contextlib.suppress(OSError, RuntimeError):  # Ray itself says better what is wrong with the home directory
        token = Path.home() / ".ray" / "auth_token"
        token.parent.mkdir(mode=0o700, exist_ok=True)
        if token.exists() and token.stat().st_mode & 0o077:
            token.chmod(0o600)


def as_environment(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Numbers and truth values of a JSON object as they are written there."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in (values or {}).items()}


def bypass_proxies(hosts: Iterable[str]) -> None:
    """Have HTTP clients, also of programs that this process starts, use no proxy to these hosts and to loopback."""
    known = _exceptions()
    if "*" in known:
        return
    # An IPv6 address without brackets, though urllib compares it with them: httpx fails at any entry that has some.
    os.environ |= dict.fromkeys(_BYPASS, ",".join(dict.fromkeys([*known, *_THIS_HOST, *hosts])))


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a URL; None where there is none, or not for this host.

    An entry of ``no_proxy`` is ``*``, a domain with or without a leading ``.`` or ``*.``, an address, or a network such
    as 10.0.0.0/8, which a URL with an address, not a name, may be of. All but the network may have a port. SOCKS is
    left out, which aiohttp does not speak.
    """
    parts, proxies = urlsplit(url), getproxies()
    host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)
    address = address_of(host)
    if host == "localhost" or (address and address.is_loopback):
        return None
    if any(_is_for(entry, host, address, port) for entry in _exceptions()):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    return proxy if proxy.lower().startswith(("http://", "https://")) else None


def _exceptions() -> list[str]:
    return [entry for name in _BYPASS for entry in re.split(r"[,\s]+", os.environ.get(name, "")) if entry]


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_of(host: str) -> _Address | None:
    """The IP address that a host is written as, in brackets or not; None of a name."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_for(entry: str, host: str, address: _Address | None, port: int | None) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    own = address_of(entry)
    if own is None and (found := re.fullmatch(r"(.+):(\d+)", entry)):
        if int(found[2]) != port:
            return False
        entry = found[1]
        own = address_of(entry)
    if own is not None or address is not None:
        return own == address
    domain = entry.lower().removeprefix("*").strip(".")
    return bool(domain) and f".{host}".endswith(f".{domain}")
