#!/usr/bin/env python3
"""Answer like an SGLang server, at next to no cost: what the rollout path is loaded against.

    python tools/benchmarks/stub_engine.py --hold-until 10000

prints its address and answers ``POST /generate`` with as many tokens as are asked for, which follow from the prompt and
the ``sampling_seed`` (`reply_key`): a sample that got another's reply is seen. No request is answered before so many
are in flight, so that they really all are at once. ``GET /counts`` tells what came.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import resource
import socket
import struct
import sys
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

STARTS = 1 << 16
"""Places at which a reply may begin: two samples have the same tokens with this probability."""
LONGEST = 1 << 15
VOCABULARY = 150_000
VERSION = "7"
_WORDS = (" the", " of", "ing", " 12", "+", " =", "\n", "é", " therefore", ' "', "\\", " x", "答", ".")
_SENT_AT_ONCE = 16
"""Replies between two looks at what has come: ten thousand at once would keep new requests waiting."""
FAULTS = ("refused", "reset", "broken_off")
"""Status 503; the connection reset before the reply; the connection closed in the middle of the reply."""


def reply_key(input_ids: Sequence[int], seed: int) -> int:
    """Where in the script the reply to this request begins."""
    return zlib.crc32(b"%d:" % seed + struct.pack(f"{len(input_ids)}i", *input_ids)) % STARTS


class Script:
    """One long sequence of tokens, log-probs and texts, and its JSON: a reply is a part of it, which costs a copy."""

    def __init__(self) -> None:
        rng = random.Random(0)
        count = STARTS + LONGEST
        self.tokens = [rng.randrange(VOCABULARY) for _ in range(count)]
        # As engines print them: float32 in the digits of a float64.
        self.log_probs = [struct.unpack("f", struct.pack("f", -rng.expovariate(2.0)))[0] for _ in range(count)]
        self.texts = [rng.choice(_WORDS) for _ in range(count)]
        pairs = zip(self.log_probs, self.tokens, strict=True)
        self._triples = _Joined([f"[{log_prob!r},{token},null]," for log_prob, token in pairs])
        self._ids = _Joined([f"{token}," for token in self.tokens])
        self._escaped = _Joined([json.dumps(text, ensure_ascii=False)[1:-1] for text in self.texts])

    def reply(self, key: int, length: int, prompt_length: int, rid: str) -> bytes:
        """The body for a request whose `reply_key` is ``key``."""
        meta = (
            f'"meta_info":{{"id":"{rid}","finish_reason":{{"type":"length","length":{length}}},'
            f'"prompt_tokens":{prompt_length},"weight_version":"{VERSION}","num_retractions":0,'
            '"input_token_logprobs":[],"output_token_logprobs":['
        )
        end = (
            f'],"output_token_logprobs_length":{length},"reasoning_tokens":0,"completion_tokens":{length},'
            f'"cached_tokens":0,"e2e_latency":1.2345678901234567}}}}'
        )
        return b"".join(
            (
                *(b'{"text":"', self._escaped.part(key, length), b'","output_ids":['),
                *(self._ids.part(key, length)[:-1], b"],", meta.encode()),
                *(self._triples.part(key, length)[:-1], end.encode()),
            )
        )


class _Joined:
    def __init__(self, parts: list[str]) -> None:
        encoded = [part.encode() for part in parts]
        self._bytes = b"".join(encoded)
        self._offsets = [0, *accumulate(map(len, encoded))]

    def part(self, start: int, length: int) -> bytes:
        return self._bytes[self._offsets[start] : self._offsets[start + length]]


@functools.cache
def script() -> Script:
    """The script, equal in every process."""
    return Script()


class Stub:
    """What all connections share."""

    def __init__(self, hold_until: int, hold_s: float, error_rate: float) -> None:
        self.counts: Counter[str] = Counter()
        self.in_flight = 0
        self._hold_until = hold_until
        self._hold_s = hold_s
        self._error_rate = error_rate
        self._rng = random.Random(1)
        self._held: deque[tuple[Connection, dict[str, Any], bool]] = deque()
        self._sending = False
        self._open = False

    def fault(self) -> str | None:
        """What happens to a request, if anything."""
        return self._rng.choice(FAULTS) if self._rng.random() < self._error_rate else None

    def take(self, connection: Connection, request: dict[str, Any], breaks_off: bool) -> None:
        """Answer a request as soon as enough are in flight."""
        if self.in_flight == 0 and not self._open:
            asyncio.get_running_loop().call_later(self._hold_s, self._answer)
        self.in_flight += 1
        self.counts["most_in_flight"] = max(self.counts["most_in_flight"], self.in_flight)
        self._held.append((connection, request, breaks_off))
        if self._open or self.in_flight >= self._hold_until:
            self._answer()

    def _answer(self) -> None:
        self._open = True
        if not self._sending:
            self._sending = True
            self._send_some()

    def _send_some(self) -> None:
        for _ in range(min(_SENT_AT_ONCE, len(self._held))):
            connection, request, breaks_off = self._held.popleft()
            self.in_flight -= 1
            connection.answer(request, breaks_off)
        if self._held:
            asyncio.get_running_loop().call_soon(self._send_some)
        else:
            self._sending = False


class Connection(asyncio.Protocol):
    """One connection, kept alive; HTTP/1.1 as far as slime's client speaks it: bodies with a length, no pipelining."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._received = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self._transport = transport
        self._stub.counts["connections"] += 1

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        line, _, headers = bytes(self._received[:end]).lower().partition(b"\r\n")
        _, found, length = headers.partition(b"content-length:")
        body_end = end + 4 + (int(length.partition(b"\r\n")[0]) if found else 0)
        if len(self._received) < body_end:
            return
        body = bytes(self._received[end + 4 : body_end])
        del self._received[:body_end]
        if line.startswith(b"get /counts"):
            self._send(b"200 OK", orjson.dumps(self._stub.counts))
        else:
            self._generate(orjson.loads(body))

    def _generate(self, request: dict[str, Any]) -> None:
        self._stub.counts["requests"] += 1
        fault = self._stub.fault()
        if fault is not None:
            self._stub.counts[fault] += 1
        if fault == "refused":
            self._send(b"503 Service Unavailable", b'{"error":"no worker is available"}')
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)  # with no time to linger, closing resets
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        else:
            self._stub.take(self, request, fault == "broken_off")

    def answer(self, request: dict[str, Any], breaks_off: bool) -> None:
        """Send the reply, or half of it."""
        params, ids = request["sampling_params"], request["input_ids"]
        key = reply_key(ids, params["sampling_seed"])
        body = script().reply(key, params["max_new_tokens"], len(ids), request["rid"])
        if breaks_off:
            self._send(b"200 OK", body, len(body) // 2)
            self._transport.close()
            return
        self._stub.counts["answered"] += 1
        self._send(b"200 OK", body)

    def _send(self, status: bytes, body: bytes, sent: int | None = None) -> None:
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body[:sent])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold-until", type=int, default=1, help="requests in flight; default: %(default)s")
    parser.add_argument("--hold-s", type=float, default=120.0, help="hold them no longer; default: %(default)s")
    parser.add_argument("--error-rate", type=float, default=0.0, help="of requests; default: %(default)s")
    return parser.parse_args(argv)


async def serve(stub: Stub) -> None:
    """Answer on a free port of loopback, which is printed, until standard input ends, as it does with our parent."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stub), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when standard input ends."""
    options = parse(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    script()
    asyncio.run(serve(Stub(options.hold_until, options.hold_s, options.error_rate)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
