"""One hub's environments in a Python of their own: its module's ``run``, called by `agent.run` of the training side.

What the hubs' packages need differs from what an engine needs (`openai`, Python itself), and an agent needs nothing of
the training side but the address of its session. This file and the modules ``with_*.py`` import nothing of slime but,
for Harbor, its sandbox.

    HUB_KEY=... HUB_PYTHON examples/environment_hubs/server.py verifiers --port 8770
                                                                           serve, after one line that says where
    HUB_PYTHON examples/environment_hubs/server.py verifiers --tasks DIR   write tasks.jsonl and demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib
import json
import os
import random
import socket
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

REQUIREMENTS = {
    "verifiers": "verifiers==0.4.0",
    "openenv": "openenv==0.10.0",
    "nemo_gym": "nemo-gym==0.7.0",
    "harbor": "harbor==0.26.0",
}
"""What a hub is installed by; the examples were written for these releases."""
_NUM_TASKS, _NUM_DEMONSTRATIONS = 464, 6000


def load(hub: str) -> ModuleType:
    """The module of a hub, once its package is known to be installed.

    Raises:
        SystemExit: it is not; one line says what to install.
    """
    requirement = REQUIREMENTS[hub]
    try:
        version(requirement.partition("==")[0])
    except PackageNotFoundError:
        sys.exit(
            f"environment_hubs: error: {sys.executable} has no {hub}: make a virtual environment of its own, "
            f"`pip install {requirement}` there, and set HUB_PYTHON to its python"
        )
    return importlib.import_module(f"with_{hub}")


def write_tasks(module: ModuleType, output: Path, seed: int) -> None:
    """Rows of prompts, some of what the hub has, and conversations for a model that has yet to learn how one goes."""
    rng = random.Random(seed)
    tasks = module.tasks(output)
    lines = {
        "tasks": rng.sample(tasks, min(_NUM_TASKS, len(tasks))),
        "demonstrations": [{"messages": module.demonstration(rng)} for _ in range(_NUM_DEMONSTRATIONS)],
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in lines.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_app(module: ModuleType, key: str, concurrency: int = 16) -> Any:
    """``POST /run``, a call of the module's, at most so many at a time: environments have deadlines of their own, which
    hundreds that begin at once would miss. What one raises is status 500, and its words the body. Whoever does not
    bring the key as a bearer token gets 401: an episode runs programs, and talks to the address that it is given."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    places = asyncio.Semaphore(concurrency)

    async def run(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
            return PlainTextResponse("HUB_KEY of the training side is not the server's", status_code=401)
        asked: dict[str, Any] = await request.json()
        try:
            async with places:
                return JSONResponse(await module.run(**asked))
        except Exception as error:
            traceback.print_exc()
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=500)

    return Starlette(routes=[Route("/run", run, methods=["POST"])])


def serve(module: ModuleType, host: str, port: int, concurrency: int) -> None:
    """Serve until a signal; one line says where, once it is so."""
    import uvicorn

    if not (key := os.environ.get("HUB_KEY", "")):
        sys.exit("environment_hubs: error: HUB_KEY is not set: a word that nobody guesses, here and on the other side")
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        sys.exit(f"environment_hubs: error: the server cannot listen on {host}:{port}: {error.strerror}")
    print(f"{module.__name__} listens on http://{host}:{listening.getsockname()[1]}/run", flush=True)
    uvicorn.Server(uvicorn.Config(make_app(module, key, concurrency), log_level="warning")).run(sockets=[listening])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", choices=sorted(REQUIREMENTS))
    parser.add_argument("--tasks", type=Path, help="directory to write rows to, instead of serving")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=8770, help="default: %(default)s; 0 is any")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at a time; default: %(default)s")
    args = parser.parse_args()
    module = load(args.hub)
    if args.tasks is not None:
        write_tasks(module, args.tasks, args.seed)
    else:
        serve(module, args.host, args.port, args.concurrency)


if __name__ == "__main__":
    main()
