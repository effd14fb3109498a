"""Stand-ins for an engine that weights are pushed to."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.sglang.client import EngineError
from slime.weights import EngineAddress
from slime.weights import payload as written


class FakeControl:
    """An engine that takes everything, unless told to refuse to load."""

    url = "http://127.0.0.1:1"

    def __init__(self, url: str = url) -> None:
        self.url = url
        self.loaded: list[str] = []
        self.version = ""
        self.refuses = False
        self.formats: list[str | None] = []

    def update_weights_from_disk(self, path: str, load_format: str | None) -> None:
        assert Path(path, "model.safetensors").is_file()
        self.formats.append(load_format)
        if self.refuses:
            raise EngineError("refused")
        self.loaded.append(path)

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def loads(self, number: int) -> None:
        """It takes no note of what it loads."""

    def checksums_if_told(self) -> None:
        """Nor has it checksums."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


_NO_CALLS = {"url", "calls", "version", "loaded", "refuses", "weight_version", "loads", "checksums_if_told"}


class Dying(FakeControl):
    """An engine that notes the order of its calls and dies in the one it is told."""

    def __init__(self, url: str, dies_in: str = "") -> None:
        super().__init__(url)
        self.calls: list[str] = []
        self._dies_in = dies_in

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in _NO_CALLS:
            return object.__getattribute__(self, name)

        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(name)
            if name == self._dies_in:
                raise EngineError(f"engine {self.url}: connection reset")
            if name == "set_weight_version":
                self.version = args[0]

        return call


@dataclass(frozen=True)
class FakeAddress(EngineAddress):
    """Where a stand-in is."""

    engine: Any = None

    def control(self, timeout: float) -> Any:
        return self.engine


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(written.__name__ if module.startswith("sglang.") else module, name)


def read_payload(payload: str) -> dict[str, Any]:
    """What an engine reads of a push, without SGLang: it cannot be imported where a trainer's patches are in force."""
    content: dict[str, Any] = _Reader(io.BytesIO(base64.b64decode(payload))).load()
    return content


def addresses_of(engines: Sequence[Any], sizes: Sequence[int] = ()) -> list[EngineAddress]:
    """Of stand-ins that lie side by side, each of one slot or of as many as ``sizes`` says."""
    sizes = sizes or [1] * len(engines)
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        FakeAddress(engine.url, size, first_slot=first, engine=engine)
        for engine, size, first in zip(engines, sizes, firsts, strict=True)
    ]
