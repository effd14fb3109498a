"""What the driver does for engines while it waits for samples, and trainers are idle."""

from __future__ import annotations

from slime.driver.control.engine_requests import EngineRequests
from slime.driver.data_side import DataSide
from slime.driver.pushes import Pushes
from slime.observability.progress import say
from slime.observability.trace import span


class Meanwhile:
    """Adds and removes those that an operator asks for, and gives weights to those that joined or came back."""

    def __init__(self, pushes: Pushes, requests: EngineRequests, data: DataSide) -> None:
        self._pushes, self._requests, self._data = pushes, requests, data

    def is_due(self) -> bool:
        """Whether there is anything to do."""
        return self._requests.pending or self._pushes.may_catch_up()

    def do(self) -> None:
        """Do it."""
        self._requests.serve()
        if self._pushes.may_catch_up():
            self._catch_up()

    def _catch_up(self) -> None:
        pushes = self._pushes
        is_newer = pushes.is_ahead
        if is_newer:
            self._data.pause_generation()
        with span("driver/push_weights", version=pushes.trained):
            version = pushes.catch_up()
        if is_newer:
            if not pushes.is_ahead:
                say(f"no engine served: those that came back have the weights of version {version} before their time")
            self._data.resume_generation(version)
        self._data.note_version()
