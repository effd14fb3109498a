"""A stand-in for router and engine: an HTTP server of this process that answers generation requests as SGLang does.

No two of its tokens have the same log-prob, so that a token of a sample can be traced back to its answer.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from argparse import Namespace
from typing import Any

from aiohttp import web

from slime.rollout.tokenizer import load_tokenizer

ANSWERS = (
    "<think>One and one.</think> The answer is \\boxed{2}.",
    "<think>Let me guess.</think> The answer is \\boxed{3}.",
)
_KEY = "contract"
_NO_KEY = (
    "a run's router wants its key: slime.utils.http_utils.post adds it, another client sends the header "
    "'Authorization: Bearer ' + args.sglang_router_api_key"
)
_START_S = 60.0
_STEP = 2.0**-16
"""Between log-probs: exact in float32 too."""


class StandInEngine:
    """Listens at ``port`` of the loopback for as long as the process lives."""

    def __init__(self) -> None:
        self.answers: tuple[str, ...] = ANSWERS
        """Texts that are given in turn."""
        self.aborts = 0
        """So many of the next requests are interrupted after three tokens, as by a weight update."""
        self.splits = False
        """Whether answers have tokens that the tokenizer does not make of their text, as models' responses may."""
        self.num_split = 0
        """So many tokens were split for that."""
        self.made: dict[float, int] = {}
        """The token of every log-prob that was given."""
        self.finishes: list[str] = []
        """How requests ended, in their order."""
        self.port = 0
        self._tokenizer_of = ""
        self._numbers, self._turns = itertools.count(1), itertools.count()
        self._listening = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="stand-in engine", daemon=True).start()
        if not self._listening.wait(_START_S):
            raise TimeoutError(f"the stand-in engine did not start within {_START_S:g} s")

    def begin(self, args: Namespace) -> None:
        """Forget earlier requests, and serve those of a rollout with these options."""
        self.made, self.finishes, self.aborts = {}, [], 0
        self.splits, self.num_split = False, 0
        self._turns = itertools.count()
        self._tokenizer_of = args.hf_checkpoint
        args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", self.port
        args.sglang_router_api_key = _KEY

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/workers", self._workers)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._listening.set()
        await asyncio.Event().wait()

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": []})

    async def _generate(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {_KEY}":
            return web.json_response({"error": _NO_KEY}, status=401)
        body = await request.json()
        given = body.get("input_ids") or body.get("text")
        if not given:
            return web.json_response({"error": "neither input_ids nor text"}, status=400)
        tokens, finish = self._tokens(body.get("sampling_params") or {})
        log_probs = [-_STEP * next(self._numbers) for _ in tokens]
        self.made |= dict(zip(log_probs, tokens, strict=True))
        self.finishes.append(finish)
        meta = {
            "finish_reason": {"type": finish},
            "weight_version": "1",
            "prompt_tokens": len(given),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(log_probs, tokens, strict=True)]
        text = load_tokenizer(self._tokenizer_of).decode(tokens, skip_special_tokens=True)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})

    def _tokens(self, params: dict[str, Any]) -> tuple[list[int], str]:
        """The next answer, as far as there is room, and why it ends."""
        tokenizer = load_tokenizer(self._tokenizer_of)
        answer = self.answers[next(self._turns) % len(self.answers)]
        tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if self.splits:
            whole, tokens = tokens, split_tokens(tokenizer, tokens)
            self.num_split += len(tokens) - len(whole)
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        if self.aborts:
            self.aborts -= 1
            return tokens[:3], "abort"
        room = params.get("max_new_tokens")
        return (tokens, "stop") if room is None or len(tokens) <= room else (tokens[:room], "length")


def split_tokens(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Other tokens of the same text: each as two where the vocabulary has the parts; added tokens stay whole."""
    known, added = tokenizer.get_vocab(), set(tokenizer.get_added_vocab())
    split: list[int] = []
    for token, name in zip(tokens, tokenizer.convert_ids_to_tokens(tokens), strict=True):
        cuts = range(1, 1 if name in added else len(name))
        cut = next((i for i in cuts if name[:i] in known and name[i:] in known), None)
        split += [token] if cut is None else [known[name[:cut]], known[name[cut:]]]
    return split if tokenizer.decode(split) == tokenizer.decode(tokens) else tokens
