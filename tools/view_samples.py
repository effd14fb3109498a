#!/usr/bin/env python3
"""Read rollouts in a browser: prompts, responses token by token, masks, log-probs, weight versions, rewards.

    python3 tools/view_samples.py outputs/run/rollout_data --hf-checkpoint MODEL_DIR

serves one page to this machine and prints its address. It takes files of --save-debug-rollout-data, a directory of
them, or the directory of --dump-details, of which it shows the trainer's log-probs beside the engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.files.model_directory import model_directory  # noqa: E402
from slime.rollout.tokenizer import load_tokenizer  # noqa: E402
from slime.utils.errors import BadInputError  # noqa: E402
from tools.samples.rollouts import Query, Rollout, list_samples, read_rollout, show_sample  # noqa: E402

PAGE = ROOT / "tools" / "samples" / "page.html"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "script-src 'nonce-{0}'; style-src 'nonce-{0}'"
)


class Library:
    """The files that the command line names; directories are looked through again at every list."""

    def __init__(self, paths: list[Path], train_paths: list[Path], tokenizer: Any) -> None:
        self._paths = paths
        self._train_paths = [*train_paths, *(p for p in paths if (p / "train_data").is_dir())]
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        # What a rollout was read from may be written again, so that it is told apart by its time, too.
        self._read = functools.lru_cache(maxsize=2)(self._read_file)

    def files(self) -> dict[str, Path]:
        """By the name that the page shows: the file's, or its path where two files have one name.

        Raises:
            BadInputError: there are none.
        """
        found = [file for path in self._paths for file in _files_of(path, "rollout_data")]
        if not found:
            raise BadInputError(f"no *.pt files of saved rollouts in {', '.join(map(str, self._paths))}")
        names = [file.name for file in found]
        return {str(f) if names.count(f.name) > 1 else f.name: f for f in found}

    def rollout(self, name: str) -> Rollout:
        """The rollout of one of the `files`."""
        file = self.files().get(name)
        if file is None:
            raise BadInputError(f"there is no rollout {name!r}")
        train_files = tuple(file for path in self._train_paths for file in _files_of(path, "train_data"))
        with self._lock:
            return self._read(file, file.stat().st_mtime_ns, train_files)

    def _read_file(self, file: Path, changed: int, train_files: tuple[Path, ...]) -> Rollout:
        return read_rollout(file, train_files)

    def answer(self, route: str, values: dict[str, str]) -> Any:
        """What the page asks for."""
        if route == "/api/rollouts":
            return {"names": list(self.files())}
        rollout = self.rollout(values.pop("rollout", ""))
        if route == "/api/samples":
            return list_samples(rollout, Query.parse(values))
        place = values.get("place", "")
        if not place.isdecimal():
            raise BadInputError(f"place={place!r} is not a number")
        return show_sample(rollout, int(place), self._tokenizer)


def _files_of(path: Path, inside: str) -> list[Path]:
    """A file itself; of a directory, or its subdirectory ``inside``, the ``*.pt`` in the order of their numbers."""
    if path.is_file():
        return [path]
    directory = path / inside if (path / inside).is_dir() else path
    if not directory.is_dir():
        raise BadInputError(f"{path}: no such file or directory")
    files = [file for file in directory.glob("*.pt") if not file.name.startswith(".")]
    return sorted(files, key=lambda file: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", file.name)])


class Handler(BaseHTTPRequestHandler):
    """Answers one request; ``server`` is a `Server`."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # of a connection that asks nothing more
    server: Server

    def handle(self) -> None:
        """Every request of one connection; a reader may leave before an answer is complete."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self.server.is_ours(self.headers.get("Host", "")):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to its own address only")
        if url.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
            return self._send(HTTPStatus.OK, "text/html", page, _POLICY.format(nonce))
        if url.path not in ("/api/rollouts", "/api/samples", "/api/sample"):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here")
        status, answer = HTTPStatus.OK, None
        try:
            answer = self.server.library.answer(url.path, dict(parse_qsl(url.query)))
        except (BadInputError, OSError) as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:  # a sample's values may be of any kind; the page says what it stumbled over
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        return self._send(status, "application/json", json.dumps(answer))

    def _send(self, status: HTTPStatus, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }
        headers |= {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


class Server(ThreadingHTTPServer):
    """Serves a library's page."""

    daemon_threads = True

    def __init__(self, host: str, port: int, library: Library) -> None:
        self.library = library
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def is_ours(self, host: str) -> bool:
        """Whether a request means this server: another site's name that resolves to loopback must not read samples."""
        own = str(self.server_address[0])
        return own not in LOOPBACK or urlsplit(f"//{host}").hostname in LOOPBACK


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="saved rollouts, or a directory of them")
    parser.add_argument("--hf-checkpoint", help="the model's directory: its tokenizer gives the tokens' text")
    parser.add_argument(
        "--train-data", type=Path, nargs="+", default=[], metavar="PATH", help="the trainer's data of them"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    return parser.parse_args(argv)


def _tokenizer_directory(checkpoint: str) -> str:
    """A directory with a tokenizer, which needs no model's configuration; of a hub id the download's."""
    return checkpoint if Path(checkpoint).is_dir() else model_directory(checkpoint, with_weights=False)


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C; 2 where something that was given cannot be used."""
    options = parse(argv)
    try:
        tokenizer = options.hf_checkpoint and load_tokenizer(_tokenizer_directory(options.hf_checkpoint))
        library = Library(options.paths, options.train_data, tokenizer)
        names = list(library.files())
        library.rollout(names[-1])  # which the page opens first
    except (BadInputError, OSError) as error:
        return _fail(error)
    try:
        server = Server(options.host, options.port, library)
    except (OSError, OverflowError) as error:
        return _fail(f"--host {options.host} --port {options.port}: {error}")
    print(f"{len(names)} rollout{'s' * (len(names) != 1)} at {server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def _fail(reason: object) -> int:
    print(f"view_samples.py: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
