"""Engines over HTTP: `EngineControl` for control calls, `GenerateClient` for generation through the router."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import requests

from slime.backends.sglang.loads.loaded import ACTION, Loaded
from slime.backends.sglang.token_stream import OnTokens, TokenStream
from slime.utils.errors import SlimeError
from slime.utils.http_client import Http, RequestError, carried
from slime.utils.http_utils import ask_directly, redact

__all__ = ["ADAPTER", "EngineControl", "EngineError", "GenerateClient", "Loaded", "OnTokens", "RequestError"]

ADAPTER = "slime"
"""What engines call the adapter of ``--lora-sync adapter``."""
_CONNECT_TIMEOUT_S = 10.0
_FLUSH_POLL_S = 0.1
_ABORT_S = 0.5
_ABORT_POLL_S = 0.01
_BODY_IN_ERROR = 2000
_BEGIN, _IS_OPEN = "/begin_weight_update", "already open"
"""What opens a session, and what SGLang says where there is one."""
_BUCKET = {"load_format": "flattened_bucket", "flush_cache": False}


class EngineError(SlimeError):
    """An engine died, refused or did not answer; the message names the engine, the call and the answer."""


class HangError(EngineError):
    """A server was found to hang: it has not ended, and does not answer, or one of its processes stands still."""


class NoAnswerError(EngineError):
    """A server that took a question and did not answer it in time."""


def ask_server(
    who: str, url: str, method: str, path: str, body: Any = None, *, key: str | None, timeout: float
) -> requests.Response:
    """The answer of an engine or a router to a control call; EngineError, which begins with ``who``, without any."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = None if body is None else orjson.dumps(body)  # json takes seconds over adapters
    limits = (min(_CONNECT_TIMEOUT_S, timeout), timeout)
    try:
        return ask_directly(method, url + path, data=data, headers=headers, timeout=limits)
    except requests.Timeout as error:
        raise NoAnswerError(f"{who}: {method} {path}: no answer within {timeout:.0f} s") from error
    except requests.RequestException as error:
        raise EngineError(f"{who}: {method} {path}: {_reason(error)}") from error


def _reason(error: requests.RequestException) -> str:
    """Without the layers of clients that it came through, which name the server again and count tries."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return str(error) if reason is None else str(reason).partition("): ")[2] or str(reason)


class EngineControl:
    """Control calls to one engine, straight to it (the router forwards none); synchronous, usable from any thread."""

    def __init__(self, url: str, admin_key: str | None, generate_key: str | None, timeout: float) -> None:
        """``admin_key`` opens what changes the engine, ``generate_key`` what reads it; ``timeout`` is a call's."""
        self.url = url
        self._admin_key = admin_key
        self._generate_key = generate_key
        self.timeout = timeout
        self._capabilities: frozenset[str] | None = None

    def health(self) -> bool:
        """Whether the server answers its health check; False too where nothing listens."""
        try:
            return self._request("GET", "/health", key=self._generate_key).ok
        except EngineError:
            return False

    def ask(self, path: str, *, succeeds: bool = False) -> None:
        """Raise EngineError, naming the question, without an answer in time or, if it ``succeeds``, at an error."""
        reply = self._request("GET", path, key=self._generate_key)
        if succeeds and not reply.ok:
            raise EngineError(f"engine {self.url}: GET {path}: status {reply.status_code}")

    def pause(self, mode: str = "abort") -> None:
        """Stop generating. ``abort`` ends the running requests with what they have; ``retract`` and ``in_place`` keep
        them, and make `flush_cache` fail while there are any."""
        self._post("/pause_generation", {"mode": mode})

    def abort_all(self) -> None:
        """End the running requests with what they have, and wait, not for long, until they have left.

        `pause` does so too, but looks only once a second whether they have. Others may come meanwhile: no promise.
        """
        self._post("/abort_request", {"abort_all": True})
        deadline = time.monotonic() + _ABORT_S
        while not self._request("POST", "/flush_cache", {}).ok and time.monotonic() < deadline:
            time.sleep(_ABORT_POLL_S)

    def continue_(self) -> None:
        """Generate again after `pause`."""
        self._post("/continue_generation", {})

    def flush_cache(self) -> None:
        """Forget every cached key and value; waits, until the deadline, while aborted requests are still leaving."""
        deadline = time.monotonic() + self.timeout
        while True:
            reply = self._request("POST", "/flush_cache", {})
            if reply.ok:
                return
            if reply.status_code != 400 or time.monotonic() > deadline:
                raise self._refusal("POST", "/flush_cache", reply)
            time.sleep(_FLUSH_POLL_S)

    def freeze_garbage_collection(self) -> None:
        """Have all processes of the engine leave out what they have now when they look for garbage, and so what they
        have imported. A release that cannot is slower and not wrong: whatever it answers is good."""
        self._request("POST", "/freeze_gc", {})

    def release_memory(self) -> None:
        """Give the GPU memory of weights, cache and CUDA graphs back; the engine must be idle, and forgets its cache. A
        server that was started without a memory saver answers, and keeps it."""
        self._post("/release_memory_occupation", {})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory of ``tags`` (``weights``, ``kv_cache``, ``cuda_graph``) again, its content undefined."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    def weight_version(self) -> str:
        """The version of the weights that the engine says it has."""
        return str(self.model_info()["weight_version"])

    def model_info(self) -> dict[str, Any]:
        """What the engine says of its model: ``architectures``, ``model_type``, ``weight_version``, ..."""
        told: dict[str, Any] = self._get("/model_info", key=self._generate_key)
        return told

    def set_weight_version(self, version: str) -> None:
        """Give the present weights a version; running requests are left alone."""
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def weight_checksums(self) -> list[dict[str, str]]:
        """A 64-bit digest of each parameter's bytes: one dict a tensor-parallel rank, by the engine's own names."""
        reply = self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in reply["ranks"]]

    def checksums_if_told(self) -> list[dict[str, str]] | None:
        """`weight_checksums`; None of a server that has none, as one without GPUs."""
        ranks = self._of_ranks("checksum", "")
        return None if ranks is None else [ranks[rank] for rank in sorted(ranks)]

    def loads(self, number: int) -> list[Loaded] | None:
        """What each rank has loaded since this was last asked, in the ranks' order, and samples of ``number`` of what
        it has; None of a server that takes no note of it."""
        ranks = self._of_ranks(f"{ACTION}{number}", "Unsupported action")
        return None if ranks is None else [Loaded.of_strings(ranks[rank]) for rank in sorted(ranks)]

    def _of_ranks(self, action: str, unknown: str) -> dict[int, dict[str, str]] | None:
        """What ranks answer by name; None where the server knows no such question, and says what ``unknown`` is."""
        reply = self._request("POST", "/weights_checker", {"action": action})
        if reply.status_code == 404 or (reply.status_code == 400 and unknown in reply.text):
            return None
        if not reply.ok:
            raise self._refusal("POST", "/weights_checker", reply)
        # With attention by data parallelism each group of ranks answers for all.
        return {_tp_rank(rank["parallelism_info"]): rank["checksums"] for rank in reply.json()["ranks"]}

    def update_weights_from_tensor(self, payloads: Sequence[str], *, leaves_draft: bool = False) -> None:
        """Load a flattened bucket, a base64 pickle a rank, also into a model to draft by, unless ``leaves_draft``."""
        body: dict[str, Any] = {"serialized_named_tensors": list(payloads)}
        if leaves_draft:  # releases with sessions have another word for it
            body |= {"selector": "target"} if self.has_sessions else {"disable_draft_model": True}
        self._post("/update_weights_from_tensor", body | _BUCKET)

    def init_weights_update_group(self, **group: str | int) -> None:
        """Have the engine's ranks join a collective group, in order from ``rank_offset`` on; rank 0 sends. SGLang's
        fields: master_address, master_port, rank_offset, world_size, group_name, backend."""
        self._post("/init_weights_update_group", group)

    def update_weights_from_distributed(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> None:
        """Have the engine receive one broadcast, a flattened bucket of these tensors, and load it."""
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        self._post("/update_weights_from_distributed", body | _BUCKET)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Have the engine leave a collective group."""
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_disk(self, path: str, load_format: str | None = None) -> None:
        """Have the engine load a Hugging Face directory that it can read under this path, in the format that it started
        with or another ``load_format`` of SGLang's ``--load-format``."""
        body = {"model_path": path, "flush_cache": False, "load_format": load_format}
        self._post("/update_weights_from_disk", body)

    def score(self, tokens: Sequence[int], *, adapter: bool = False) -> list[float]:
        """Log-probs, at temperature 1, of all of some tokens but the first one; with the ``adapter`` of `load_adapter`.
        The engine must not be paused."""
        body: dict[str, Any] = {"input_ids": list(tokens), "return_logprob": True, "logprob_start_len": 0}
        # One token is made and dropped: of none, SGLang 0.5.17 was seen to answer nothing. It is drawn from all: a
        # request that is greedy, or has a top-k of its own, has the others of its batch drawn in another way, which
        # makes other tokens of the same seeds.
        body |= {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}}
        reply = self._post("/generate", body | ({"lora_path": ADAPTER} if adapter else {}), key=self._generate_key)
        of_tokens = reply["meta_info"]["input_token_logprobs"]
        return [float("nan") if of_token[0] is None else float(of_token[0]) for of_token in of_tokens[1:]]

    def load_version(self, path: str, version: str) -> None:
        """Have a server that no run pushes to load such a directory as this version, when the requests that it has are
        done; others wait."""
        body = {"model_path": path, "weight_version": version, "flush_cache": True, "load_format": "auto"}
        self._post("/update_weights_from_disk", body)

    def has_adapter(self) -> bool:
        """Whether `load_adapter` has given the engine one."""
        models = self._get("/v1/models", key=self._generate_key)["data"]
        return any(model["id"] == ADAPTER and model.get("parent") for model in models)

    def load_adapter(
        self, config: Mapping[str, Any], payloads: Sequence[str], checksums: Mapping[str, str] | None = None
    ) -> None:
        """Give the engine, which has none, an adapter; requests get it by ``"lora_path": ADAPTER``. ``config`` is
        PEFT's, ``payloads`` are all tensors as one flat bucket, a base64 pickle for each rank, ``checksums`` SHA-256 by
        tensor: an engine that has received anything else says so in its log and ends."""
        body: dict[str, Any] = {"lora_name": ADAPTER, "config_dict": dict(config), "load_format": "flattened_bucket"}
        body |= {"serialized_named_tensors": list(payloads), "expected_checksums": checksums}
        # Before releases with sessions not one of SGLang's control calls, though it changes the engine.
        key = None if self.has_sessions else self._generate_key
        self._post("/load_lora_adapter_from_tensors", body, key=key)

    def unload_adapter(self) -> None:
        """Take the adapter away; nothing may be using it."""
        self._post("/unload_lora_adapter", {"lora_name": ADAPTER})

    def begin_weight_update(self) -> None:
        """Open an update session, on releases that demand one (0.5.17 has none, 0.5.23 answers 400 without); one that a
        push left open when it failed is closed before."""
        if not self.has_sessions:
            return
        reply = self._request("POST", _BEGIN, {})
        if reply.status_code == 400 and _IS_OPEN in reply.text:
            self.end_weight_update()
            reply = self._request("POST", _BEGIN, {})
        if not reply.ok:
            raise self._refusal("POST", _BEGIN, reply)

    def end_weight_update(self) -> None:
        """Close the session of `begin_weight_update`."""
        if self.has_sessions:
            self._post("/end_weight_update", {})

    @property
    def has_sessions(self) -> bool:
        """Whether the release loads weights in sessions only."""
        return _BEGIN in self.capabilities

    @property
    def capabilities(self) -> frozenset[str]:
        """The paths that the server has, from its OpenAPI document; asked for once."""
        if self._capabilities is None:
            self._capabilities = frozenset(self._get("/openapi.json", key=self._generate_key)["paths"])
        return self._capabilities

    def _get(self, path: str, key: str | None) -> Any:
        reply = self._request("GET", path, key=key)
        if not reply.ok:
            raise self._refusal("GET", path, reply)
        return reply.json()

    def _post(self, path: str, body: dict[str, Any], key: str | None = None) -> Any:
        reply = self._request("POST", path, body, key=key)
        if not reply.ok:
            raise self._refusal("POST", path, reply)
        try:
            return reply.json()
        except ValueError:
            return reply.text

    def _request(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> requests.Response:
        key = key or self._admin_key or self._generate_key
        return ask_server(f"engine {self.url}", self.url, method, path, body, key=key, timeout=self.timeout)

    def _refusal(self, method: str, path: str, reply: requests.Response) -> EngineError:
        secrets = tuple(key for key in (self._admin_key, self._generate_key) if key)
        body = redact(reply.text[:_BODY_IN_ERROR], secrets)
        return EngineError(f"engine {self.url}: {method} {path}: status {reply.status_code}: {body}")


class GenerateClient:
    """Generation requests through the router."""

    def __init__(
        self, http: Http, router_url: str, api_key: str | None, retries: int, *, adapter: bool = False
    ) -> None:
        """``retries`` is as of `Http.send`; with ``adapter`` the engines' adapter answers, not the model without it."""
        self._http = http
        self._url = f"{router_url}/generate"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retries = retries
        self._fields = {"lora_path": ADAPTER} if adapter else {}

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        on_tokens: OnTokens | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """One completion of ``input_ids`` with its tokens' log-probs, in SGLang's reply (``text``, ``output_ids``,
        ``meta_info``); RequestError where it failed for good. Further ``headers``, such as the router's routing key,
        and ``fields`` (``rid``, ...) are the request's. With ``on_tokens``, which is called as they are made, the reply
        is that of a `TokenStream`."""
        payload = {
            "input_ids": list(input_ids),
            "sampling_params": dict(sampling_params),
            "return_logprob": True,
            **self._fields,
            **fields,
        }
        all_headers = {**self._headers, **(headers or {})}
        how: dict[str, Any] = {"headers": all_headers, "retries": self._retries, "dumps": _dumps, "loads": _loads}
        stream = None if on_tokens is None else TokenStream(on_tokens)
        if stream is not None:
            how["read"], payload["stream"] = stream.read, True
        reply = await self._http.send("POST", self._url, carried(payload), **how)
        if stream is not None and reply == "":
            return stream.reply()
        if not isinstance(reply, dict):
            raise RequestError(f"POST {self._url}: the reply is not a JSON object: {str(reply)[:200]}")
        return reply


def _tp_rank(places: Any) -> int:
    """Of a rank's places, which 0.5.23 tells of each of its models."""
    place = places[0] if isinstance(places, list) else places
    rank: int = place["tp_rank"]
    return rank


def _dumps(payload: Any) -> bytes:
    """JSON of a request; keys may be numbers, as those of a logit bias are."""
    return orjson.dumps(payload, option=orjson.OPT_NON_STR_KEYS)


def _loads(text: str) -> Any:
    """A reply; several times as fast as `json`, which alone knows integers beyond 64 bits."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)  # it knows NaN
