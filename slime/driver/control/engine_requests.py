"""What an operator asks of a run's engines, one more or one less; done, or begun, by the driver when nothing else is
under way."""

from __future__ import annotations

import functools
import threading
from dataclasses import asdict, dataclass
from typing import Literal

from slime.fleet.engines import Engines
from slime.fleet.joining import RefusedError
from slime.observability.progress import say, warn
from slime.options.errors import OptionError
from slime.options.serving.external import FLAG, normalize_external_engine_addr

_SLOTS_WITHIN_S = 10.0
"""A run is not held up for slots that are not free."""
_MOST = 1000
"""Requests that are remembered."""


@dataclass
class EngineRequest:
    """One, and what became of it."""

    number: int
    kind: Literal["add", "remove"]
    subject: str
    """An address, or nothing for a free slot; an engine's name."""
    state: Literal["waits", "under way", "done", "refused"] = "waits"
    told: str = ""
    """The engine's name, or why nothing was done."""


class EngineRequests:
    """Those of a run. They come from any thread; `serve` is called by the driver."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._all: dict[int, EngineRequest] = {}
        self._changing = threading.Lock()

    def put(self, kind: Literal["add", "remove"], subject: str) -> int:
        """Ask for something; its number."""
        with self._changing:
            number = max(self._all, default=0) + 1
            self._all[number] = EngineRequest(number, kind, subject)
            for old in [each for each in self._all.values() if each.state in ("done", "refused")][:-_MOST]:
                del self._all[old.number]
        return number

    def get(self, number: int) -> dict[str, object] | None:
        """What has become of one so far; None of one that is not known."""
        found = self._all.get(number)
        return None if found is None else asdict(found)

    @property
    def pending(self) -> bool:
        """Whether any waits."""
        return bool(self._waiting())

    def serve(self) -> None:
        """Do all that wait, or begin it: an engine starts while the run goes on. What goes wrong with one is told to
        whoever asked for it; what ends the run is raised."""
        for request in self._waiting():
            request.state = "under way"
            try:
                self._do(request)
            except RefusedError as refused:
                self._settle(request, request.subject, str(refused))

    def close(self) -> None:
        """The run is over."""
        for request in self._those("waits", "under way"):
            request.told, request.state = "the run has ended", "refused"

    def _waiting(self) -> list[EngineRequest]:
        return self._those("waits")

    def _those(self, *states: str) -> list[EngineRequest]:
        with self._changing:
            return [each for each in self._all.values() if each.state in states]

    def _do(self, request: EngineRequest) -> None:
        if request.kind == "remove":
            self._engines.remove(request.subject)
            self._settle(request, request.subject, "")
            return
        url = None
        if request.subject:
            try:
                url = normalize_external_engine_addr(request.subject)
            except OptionError as error:
                raise RefusedError(str(error).removeprefix(f"{FLAG} ")) from None
        told = functools.partial(self._settle, request)
        self._engines.add(url=url, slots_within=_SLOTS_WITHIN_S, told=told)

    def _settle(self, request: EngineRequest, name: str, why_not: str) -> None:
        """It is done, or refused for a reason."""
        if why_not:
            request.told, request.state = why_not, "refused"
            warn(f"not done, as asked for: {why_not.splitlines()[0]}")
            return
        request.told, request.state = name, "done"
        what = "removed" if request.kind == "remove" else "added"
        at = f": {request.subject}" if request.kind == "add" and request.subject else ""
        say(f"{name} was {what}, as asked{at}")
