"""What an operator asks of a run's engines, one more or one less; done by the driver when nothing else is under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from slime.fleet.engines import Engines
from slime.fleet.roster import RefusedError
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
        return any(True for _ in self._waiting())

    def serve(self) -> None:
        """Do all that wait. What goes wrong with one is told to whoever asked for it; what ends the run is raised."""
        for request in self._waiting():
            request.state = "under way"
            try:
                request.told = self._do(request)
                request.state = "done"
            except RefusedError as refused:
                request.told = str(refused)
                request.state = "refused"
                warn(f"not done, as asked for: {str(refused).splitlines()[0]}")

    def close(self) -> None:
        """The run is over."""
        for request in self._waiting():
            request.state, request.told = "refused", "the run has ended"

    def _waiting(self) -> Iterator[EngineRequest]:
        with self._changing:
            waiting = [each for each in self._all.values() if each.state == "waits"]
        yield from waiting

    def _do(self, request: EngineRequest) -> str:
        if request.kind == "remove":
            self._engines.remove(request.subject)
            say(f"{request.subject} was removed, as asked")
            return request.subject
        url = None
        if request.subject:
            try:
                url = normalize_external_engine_addr(request.subject)
            except OptionError as error:
                raise RefusedError(str(error).removeprefix(f"{FLAG} ")) from None
        name = self._engines.add(url=url, slots_within=_SLOTS_WITHIN_S)
        say(f"{name} was added, as asked" + (f": {url}" if url else ""))
        return name
