"""The one way out of a jail's network: a listener inside, whose connections are carried to one address outside."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import threading

_SET_ADDRESS, _SET_FLAGS, _UP = 0x8916, 0x8914, 0x1
_CHUNK = 1 << 16
_CONNECT_S = 30
_MOST_CONNECTIONS = 64


def raise_loopback(address: str | None) -> None:
    """Bring the loopback device of this network namespace up, with another IPv4 address if one is given."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
        if address is not None and not address.startswith("127."):
            packed = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, _SET_ADDRESS, packed)


def listen(address: str, port: int) -> socket.socket:
    """A listener in this network namespace; it stays of this namespace in whatever process it is."""
    return socket.create_server((address, port), backlog=_MOST_CONNECTIONS)


def forward(listener: socket.socket, host: str, port: int) -> None:
    """Carry each connection to ``host:port``, as seen from this process; never returns. Run it in a thread."""
    places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    while True:
        places.acquire()
        try:
            inner, _ = listener.accept()
        except OSError:
            places.release()
            continue
        threading.Thread(target=_carry, args=(inner, host, port, places), daemon=True).start()


def _carry(inner: socket.socket, host: str, port: int, places: threading.BoundedSemaphore) -> None:
    try:
        with inner, contextlib.suppress(OSError), socket.create_connection((host, port), _CONNECT_S) as outer:
            outer.settimeout(None)
            _pump(inner, outer)
    finally:
        places.release()


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Both ways until both have ended; the end of one way is passed on, as clients that half-close expect."""
    reading = {one: other, other: one}
    while reading:
        for source in select.select(list(reading), [], [])[0]:
            if data := source.recv(_CHUNK):
                reading[source].sendall(data)
            else:
                reading.pop(source).shutdown(socket.SHUT_WR)
