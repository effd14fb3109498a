"""What is told of engines that get weights while samples are waited for."""

from __future__ import annotations

from typing import Any

import pytest

from slime.driver.meanwhile import Meanwhile

NUM_GPUS = 0


class Parts:
    """A run's pushes, requests and data side at once: what they were asked for."""

    def __init__(self, *, is_ahead: bool, reaches: bool) -> None:
        self.trained, self.pending = 4, False
        self.is_ahead, self._reaches = is_ahead, reaches
        self.asked: list[tuple[Any, ...]] = []

    def may_catch_up(self) -> bool:
        return True

    def catch_up(self) -> int:
        self.asked.append(("catch_up",))
        self.is_ahead &= not self._reaches
        return self.trained

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.asked.append((name, *values))


@pytest.mark.parametrize(
    ("is_ahead", "reaches", "says"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_weights_before_their_time_are_told_of_where_engines_have_them(
    is_ahead: bool, reaches: bool, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: Any = Parts(is_ahead=is_ahead, reaches=reaches)
    Meanwhile(parts, parts, parts).do()
    around = [("pause_generation",), ("catch_up",), ("resume_generation", 4)] if is_ahead else [("catch_up",)]
    assert [call for call in parts.asked if call[0] in {name for name, *_ in around}] == around
    assert ("have the weights of version 4 before their time" in capsys.readouterr().out) == says
