"""A proxy on loopback that serves nobody, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import socket
import threading

_NAMES = ("http_proxy", "https_proxy", "all_proxy")
_READ_S = 5.0


class RecordingProxy:
    """Listens until `close`, and answers every request with status 502."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.variables = {name: self.url for lower in _NAMES for name in (lower, lower.upper())}
        self.variables |= {"no_proxy": "localhost", "NO_PROXY": "localhost"}
        """An environment that sends everything this way, addresses of loopback too."""
        self.asked: list[str] = []
        """First lines of requests."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_READ_S)
                self.asked.append("a connection without a word")
                if line := connection.recv(4096).split(b"\r\n")[0].decode(errors="replace"):
                    self.asked[-1] = line
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    def close(self) -> list[str]:
        """Listen no more; what it was asked."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_READ_S * 2)
        return self.asked
