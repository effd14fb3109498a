"""Writes every generation request of a run beside this file, as it is sent, into one file a process.

A copy of this file is put first on a run's PYTHONPATH: Python imports it at its start, in each process of the run, and
the run's own code needs to know nothing of it. It wraps the HTTP clients of aiohttp and httpx when they are imported.
Of a header only the name is written, and of a request's id only that there is one.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

_HERE = Path(__file__).resolve().parent
_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Where samples are asked for; other requests hold keys and ports."""
_IDS = ("rid",)


def _record(method: str, url: object, headers: Iterable[str], body: Any) -> None:
    path = urlsplit(str(url)).path
    if method.upper() != "POST" or path not in _PATHS:
        return
    if hasattr(body, "decode"):  # bytes, or what aiohttp makes of an object: its form before it is sent
        body = body.decode()
    if isinstance(body, str):
        body = json.loads(body)
    if isinstance(body, dict):
        body = body | {name: "an id" for name in _IDS if body.get(name) is not None}
    line = {"path": path, "headers": sorted({name.lower() for name in headers}), "body": body}
    with open(_HERE / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _watch_aiohttp(module: ModuleType) -> None:
    original = module.ClientSession._request

    @functools.wraps(original)
    async def request(self: Any, method: str, url: Any, **options: Any) -> Any:
        body = options.get("data") if options.get("json") is None else options["json"]
        _record(method, url, [*self.headers, *(options.get("headers") or ())], body)
        return await original(self, method, url, **options)

    module.ClientSession._request = request


def _watch_httpx(module: ModuleType) -> None:
    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def send(self: Any, request: Any, **options: Any) -> Any:
            _record(request.method, request.url, request.headers, request.content)
            return original(self, request, **options)

        return send

    module.Client.send = watched(module.Client.send)
    module.AsyncClient.send = watched(module.AsyncClient.send)


_WATCHED: dict[str, Callable[[ModuleType], None]] = {"aiohttp.client": _watch_aiohttp, "httpx": _watch_httpx}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as they are found otherwise, and wraps their clients once they are there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        watch = _WATCHED.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if watch else None
        if watch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _run_hidden() -> None:
    """The module of this name that this one hides, if there is one."""
    places = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.origin is not None:
        runpy.run_path(spec.origin)


sys.meta_path.insert(0, _Finder())
_run_hidden()
