"""SGLang servers that somebody else has started: what they are, whether they serve a run's model, whether they live."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from slime.backends.sglang.client import EngineControl, EngineError, NoAnswerError, ask_server
from slime.backends.sglang.server import ExitInfo, Server
from slime.files.json_file import read_object
from slime.options.serving.sglang_config import DECODE, PREFILL, REGULAR
from slime.utils.errors import BadInputError
from slime.utils.http_utils import redact

KEY_VARIABLES = ("SLIME_API_KEY", "SLIME_ADMIN_API_KEY")
"""Where the driver finds the (generate, admin) keys that an operator gives to a run and to servers outside of it."""
_ASK_S = 30.0
_NO_TOKEN = 2**31 - 1
_VOCABULARY = re.compile(r"valid range is \[0, (\d+)\)")
_WORKER_TYPES = {"null": REGULAR, "prefill": PREFILL, "decode": DECODE}
_DTYPES = {"half": "float16", "float": "float32"}
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Of config.json."""


@dataclass(frozen=True)
class ExternalEngineInfo:
    """A server as it describes itself."""

    url: str
    host: str
    port: int
    worker_type: str
    num_gpus: int
    """Its ranks."""
    disaggregation_bootstrap_port: int | None
    server_info: Mapping[str, Any] = field(repr=False)
    """What it answers to ``/server_info``; keys may be in it."""
    keyed: bool = True
    """Whether it asks for keys."""


def discover_external_engines(
    urls: Sequence[str], keys: tuple[str, str] | None, timeout: float = _ASK_S
) -> list[ExternalEngineInfo]:
    """What the servers at these addresses say of themselves. One that asks for no key is never shown any of ``keys``.
    EngineError names the first that does not answer within ``timeout`` seconds, refuses, or does not generate."""
    return [_discover(url, keys, timeout) for url in urls]


def _discover(url: str, keys: tuple[str, str] | None, timeout: float) -> ExternalEngineInfo:
    who = f"the server at {url}"
    reply = _server_info(who, url, None, timeout)
    keyed = reply.status_code in (401, 403)
    if keyed and keys is not None:
        reply = _server_info(who, url, keys[0], timeout)
    if reply.status_code in (401, 403):
        names = " and ".join(KEY_VARIABLES)
        given = "refuses that of the driver's" if keys is not None else "asks for a key: give the driver its keys in"
        raise EngineError(f"{who} {given} variables {names}")
    if not reply.ok:
        raise EngineError(
            f"{who}: GET /server_info: status {reply.status_code}: {redact(reply.text[:300], keys or ())}"
        )
    try:
        told = reply.json()
        mode = str(told["disaggregation_mode"])
        ranks = int(told.get("num_gpus") or int(told["tp_size"]) * int(told["pp_size"]))
        port = told.get("disaggregation_bootstrap_port") if mode == PREFILL else None
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{who}: its /server_info is not that of an SGLang server: {error!r}") from error
    if told.get("encoder_only") or mode not in _WORKER_TYPES:
        raise EngineError(f"{who} does not generate: it has encoder_only or disaggregation_mode {mode!r}")
    parts = urlsplit(url)
    return ExternalEngineInfo(
        url, parts.hostname or "", parts.port or 80, _WORKER_TYPES[mode], ranks, port, told, keyed
    )


def _server_info(who: str, url: str, key: str | None, timeout: float) -> requests.Response:
    """Of older releases by the path that newer ones have dropped."""
    reply = ask_server(who, url, "GET", "/server_info", key=key, timeout=timeout)
    if reply.status_code == 404:
        reply = ask_server(who, url, "GET", "/get_server_info", key=key, timeout=timeout)
    return reply


def check_serves(info: ExternalEngineInfo, model: Mapping[str, Any], vocabulary: int | None, args: Namespace) -> None:
    """Raise EngineError, with all that differs, for a server that does not serve this run's model as its own engines
    would. ``model`` is the answer to ``/model_info``, ``vocabulary`` what it takes for tokens (None: it did not say).
    Weights of other shapes than these tell would fail to load at the first push."""
    if differences := list(_differences(info, model, vocabulary, args)):
        raise EngineError(f"the server at {info.url} does not serve this run's model: {'; '.join(differences)}")


def _differences(
    info: ExternalEngineInfo, model: Mapping[str, Any], vocabulary: int | None, args: Namespace
) -> Iterator[str]:
    config = _config_of(args.hf_checkpoint)
    for name in ("model_type", "architectures"):
        ours, theirs = config.get(name), model.get(name)
        if None not in (ours, theirs) and ours != theirs:
            yield f"{name} {_plain(theirs)} instead of {_plain(ours)}"
    if not model.get("is_generation", True):
        yield "it embeds, and does not generate"
    known = config.get("vocab_size")
    if None not in (vocabulary, known) and vocabulary != known:
        yield f"a vocabulary of {vocabulary} tokens instead of {known}"
    theirs = _config_of(info.server_info.get("model_path"))  # which other hosts' are not here
    for name in _SHAPE:
        if name in theirs and name in config and theirs[name] != config[name] and name != "vocab_size":
            yield f"{name} {theirs[name]} instead of {config[name]}"
    yield from _other_settings(info.server_info, config, args)


def _other_settings(told: Mapping[str, Any], config: Mapping[str, Any], args: Namespace) -> Iterator[str]:
    """What of its flags differs from those of the run's own engines, so far as pushes and requests count on it."""
    dtype = str(told.get("dtype", "auto"))
    if dtype == "auto":  # SGLang takes float16 for float32
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto").replace("float32", "float16")
    if _DTYPES.get(dtype, dtype) not in (args.params_dtype, "auto"):
        yield f"dtype {dtype} instead of {args.params_dtype}: start it with --dtype {args.params_dtype}"
    room, needed = told.get("max_req_input_len"), _longest(args)
    if isinstance(room, int) and room < needed:
        yield f"prompt and response may have {room} tokens together, and the run's have up to {needed}"
    to_disk = args.update_weight_transport == "disk"
    ranks_apart = int(told.get("pp_size") or 1) > 1 or (
        int(told.get("dp_size") or 1) > 1 and not told.get("enable_dp_attention")
    )
    if ranks_apart and not to_disk:
        yield "its ranks are not all tensor-parallel ones of one model: use --update-weight-transport disk"
    for name in ("quantization", "speculative_algorithm"):
        ours, theirs = getattr(args, f"sglang_{name}", None), told.get(name)
        if theirs != ours and not (name == "quantization" and args.pushes_float8):
            yield f"{name} {theirs or 'none'} instead of {ours or 'none'}"
    if args.pushes_float8 and not to_disk:
        yield "blocks of float8 are pushed, which a server that slime has not started takes by disk only"
    if getattr(args, "pushes_heads", False) and not to_disk:
        yield "heads to draft by are pushed, which it takes by --update-weight-transport disk only"
    if args.use_rollout_routing_replay:
        yield "--use-rollout-routing-replay asks through the router, which only servers that slime starts understand"
    if args.deterministic_mode and not (told.get("enable_deterministic_inference") and told.get("disable_radix_cache")):
        yield "--deterministic-mode: start it with --enable-deterministic-inference --disable-radix-cache"
    if args.lora_sync == "adapter" and not told.get("enable_lora"):
        yield "adapters are pushed: start it with --enable-lora"


def _longest(args: Namespace) -> int:
    limits = (getattr(args, name, None) for name in ("rollout_max_context_len", "eval_max_context_len"))
    return max((limit for limit in limits if limit is not None), default=0)


def _config_of(directory: Any) -> dict[str, Any]:
    """config.json of a model's directory; empty where it is not on this host, EngineError where it is damaged."""
    try:
        return read_object(Path(str(directory), "config.json"))
    except OSError:
        return {}
    except BadInputError as error:
        raise EngineError(str(error)) from error


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class ExternalEngine(Server):
    """One server that runs already: it is checked, asked whether it lives, and never ended."""

    def __init__(self, args: Namespace, url: str, name: str, keys: tuple[str, str] | None) -> None:
        """``keys`` are (generate, admin), where it asks for them."""
        super().__init__(name, args, "", "")
        self._keys = keys
        self.url = url
        self._version = ""
        """The last that it was seen to have, a number as soon as it has been pushed to."""

    def prepare(self) -> None:
        """As of `Engine`: nothing is to be started."""

    def _start(self) -> None:
        (info,) = discover_external_engines([self.url], self._keys)
        control = self.control(_ASK_S)
        # One that another run has left in the midst of a push would keep every request waiting.
        control.continue_()
        check_serves(info, control.model_info(), self._vocabulary(), self._args)

    def _vocabulary(self) -> int | None:
        """Told by its refusal of a token that no model has. As a prompt that would end SGLang 0.5.17's scheduler."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        key = self._keys[0] if self._keys else None
        asked = body | {"token_ids_logprob": [_NO_TOKEN]}
        reply = ask_server(self._who, self.url, "POST", "/generate", asked, key=key, timeout=_ASK_S)
        found = _VOCABULARY.search(reply.text)
        return int(found[1]) if found else None

    def hang(self) -> ExitInfo | None:
        """That it is lost: it does not answer, or was started again by whoever has it."""
        told = self._silence()
        return ExitInfo(time.time(), f"{self._who} is lost: {told}") if told else None

    def examine_all(self, because: str, *, paused: bool) -> None:
        """As of `Engine`."""
        path = "/server_info" if paused else "/health_generate"
        self.examine(because, lambda timeout: self.control(timeout).ask(path, succeeds=True))

    def control(self, timeout: float) -> EngineControl:
        """A client for control calls to it, each within ``timeout`` seconds."""
        generate_key, admin_key = self._keys or (None, None)
        return EngineControl(self.url, admin_key, generate_key, timeout)

    def _ask(self, timeout: float) -> None:
        """Not its ``/health``, for which a server of its own accord generates a token: a paused one could not."""
        try:
            version = self.control(timeout).weight_version()
        except EngineError as error:  # nobody else tells of its end
            raise NoAnswerError(str(error)) from error
        if self._version.isdecimal() and not version.isdecimal():
            raise NoAnswerError(f"it has weights of version {version!r} after {self._version}: it was started again")
        self._version = version

    @property
    def _who(self) -> str:
        return f"{self._name} at {self.url}"

    def _log_tail(self) -> str:
        return ""
