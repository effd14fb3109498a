"""List the engines of a run that is under way, add one, or remove one.

python3 tools/engines.py RUN_DIR list
python3 tools/engines.py RUN_DIR add HOST:PORT    # an SGLang server that runs already
python3 tools/engines.py RUN_DIR add              # one more of the run's own, on free slots
python3 tools/engines.py RUN_DIR remove N         # engine N, or another by its name

A change is made when the run next waits for samples; an engine then starts while the run goes on. This program waits
for that, and for the weights of one that was added, up to --timeout seconds. Status 1 where the run refuses it, or did
not make it in time, 2 where there is no run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import requests  # noqa: E402

from slime.files.control_file import read_control_file  # noqa: E402
from slime.utils.errors import BadInputError  # noqa: E402
from slime.utils.http_utils import ask_directly  # noqa: E402

_ANSWER_S = 30.0
_POLL_S = 0.5
_COLUMNS = ("name", "url", "model", "kind", "state")


class RefusedError(Exception):
    """The run did not do it, or is not there; the message says why."""


class RunControl:
    """The server of a run."""

    def __init__(self, run_dir: Path) -> None:
        """BadInputError where no run is under way there."""
        self._url, key = read_control_file(run_dir)
        self._headers = {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer; RefusedError without one."""
        data = None if body is None else json.dumps(body).encode()
        try:
            reply = ask_directly(method, self._url + path, data=data, headers=self._headers, timeout=_ANSWER_S)
        except requests.RequestException as error:
            raise RefusedError(f"the run at {self._url} does not answer: has it ended? {error}") from None
        if not reply.ok:
            raise RefusedError(f"the run at {self._url}: {method} {path}: status {reply.status_code}: {reply.text}")
        return reply.json()

    def engines(self) -> dict[str, Any]:
        """``engines``, and the ``version`` of their weights."""
        found: dict[str, Any] = self.ask("GET", "/engines")
        return found


def main(words: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("action", choices=("list", "add", "remove"))
    parser.add_argument("subject", nargs="?", default="", metavar="ADDR|N")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait for a change (default 3600)")
    args = parser.parse_args(words)
    if (args.action == "remove") != bool(args.subject) and args.action != "add":
        parser.error("list takes no further word" if args.subject else "remove: name the engine: remove 1")
    try:
        control = RunControl(args.run_dir)
        if args.action == "list":
            print(*_table(control.engines()), sep="\n")
            return 0
        if args.action == "add":
            asked = control.ask("POST", "/engines", {"addr": args.subject})
        else:
            name = f"engine {args.subject}" if args.subject.isdecimal() else args.subject
            asked = control.ask("DELETE", f"/engines/{quote(name)}")
        name = _done(control, asked["request"], time.monotonic() + args.timeout)
        if args.action == "remove":
            print(f"{name} was removed")
            return 0
        print(f"{name} was added, and gets requests when it has the weights", flush=True)
        version = _serves(control, name, time.monotonic() + args.timeout)
        print(f"{name} serves, with the weights of version {version}")
    except BadInputError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except RefusedError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _table(found: dict[str, Any]) -> list[str]:
    rows = [_COLUMNS, *(tuple(engine[name] for name in _COLUMNS) for engine in found["engines"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [f"weights of version {found['version']}", *lines]


def _wait(look: Callable[[], str | None], deadline: float, what: str) -> str:
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise RefusedError(f"{what} in time (--timeout)")
        time.sleep(_POLL_S)
    return found


def _done(control: RunControl, number: int, deadline: float) -> str:
    def look() -> str | None:
        request = control.ask("GET", f"/requests/{number}")
        if request["state"] == "refused":
            raise RefusedError(request["told"])
        return str(request["told"]) if request["state"] == "done" else None

    return _wait(look, deadline, "the run has not made the change")


def _serves(control: RunControl, name: str, deadline: float) -> str:
    def look() -> str | None:
        found = control.engines()
        states = [engine["state"] for engine in found["engines"] if engine["name"] == name]
        if not states:
            raise RefusedError(f"{name} was lost again: the run's output says of what")
        return str(found["version"]) if states == ["serves"] else None

    return _wait(look, deadline, f"{name} did not get the weights")


if __name__ == "__main__":
    sys.exit(main())
