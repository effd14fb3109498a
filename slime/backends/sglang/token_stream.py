"""A reply of an engine as it is made: server-sent events, each with new tokens, or with all so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"

OnTokens = Callable[[Sequence[int]], None]
"""Is given the ids of new tokens, on the event loop that reads them."""


class TokenStream:
    """What has come of one reply. A connection that breaks off leaves it as an abort does: what came was sampled."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._pairs: list[Any] = []
        self._meta: dict[str, Any] = {}

    async def read(self, reply: aiohttp.ClientResponse) -> str:
        """Read a reply; its text, where it is none of events. Raises as `aiohttp` does where it breaks off before the
        first token."""
        if reply.status >= 400 or "text/event-stream" not in reply.headers.get("Content-Type", ""):
            return await reply.text()
        buffer = b""
        try:
            async for data in reply.content.iter_any():
                *events, buffer = (buffer + data).split(_EVENT_END)
                for event in events:
                    self._take(event)
            if self._meta.get("finish_reason") is None:
                raise aiohttp.ClientPayloadError("the events ended before the reply did")
        except (aiohttp.ClientError, ConnectionError):
            if not self._pairs:
                raise
            self._meta["finish_reason"] = {"type": "abort", "message": "the connection broke off"}
        return ""

    def reply(self) -> dict[str, Any]:
        """As `GenerateClient.generate` gives it, without a text: whoever wants one has the tokens."""
        return {"meta_info": self._meta | {"output_token_logprobs": self._pairs}}

    def _take(self, event: bytes) -> None:
        if not event.startswith(_DATA) or event[len(_DATA) :] == _DONE:
            return
        chunk = orjson.loads(event[len(_DATA) :])
        if "error" in chunk:
            raise aiohttp.ClientPayloadError(f"the engine says: {chunk['error']}")
        meta = chunk["meta_info"]
        pairs = meta.pop("output_token_logprobs", None) or []
        # Of engines that are told to, events have what is new; of others, all so far.
        new = pairs[len(self._pairs) :] if len(pairs) == meta["completion_tokens"] else pairs
        self._meta = meta
        if new:
            self._pairs += new
            self._on_tokens([pair[1] for pair in new])
