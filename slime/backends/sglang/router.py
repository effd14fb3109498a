"""The sglang-router in front of the engines: start it, register engines, stop it."""

from __future__ import annotations

import contextlib
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import requests

from slime.backends.sglang.client import EngineError, NoAnswerError, ask_server
from slime.backends.sglang.server import Server
from slime.processes import kernel
from slime.processes.server_process import ADMIN_KEY_VARIABLE, GENERATE_KEY_VARIABLE, ServerProcess, last_value
from slime.utils.environment import server_environment
from slime.utils.http_utils import LOOPBACK, ask_directly, http_url, redact

_CALL_TIMEOUT_S = 10.0
_WORKERS = "/workers"
_CONTROL_PATHS = (_WORKERS, "/flush_cache", "/get_loads")
"""Those of the router that the key for generation does not open."""
_RESPONSES = re.compile(r"^smg_router_upstream_responses_total\{(.*)\} (\d+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_REPEATED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Of engines, after which the router tries again; 500 is also its own for an engine that it does not reach."""
_MARGIN_S = 60.0
_FLAGS = "--sglang-router-ip, --sglang-router-port"
KEY_VARIABLES = ("SLIME_ROUTER_API_KEY", "SLIME_ROUTER_ADMIN_KEY")
"""Where the driver finds the `RouterKeys` of a router that runs already."""
RouterKeys = tuple[str | None, str | None]
"""What a router asks for: with requests to generate, and where its workers are concerned; None where it does not."""


class _RefusedKeyError(EngineError):
    """A router asks for a key, or for another one."""


class Router(Server):
    """One router process."""

    is_own = True
    """Whether the run started it, and may start it again."""
    open_engines: frozenset[str]
    """URLs of engines that ask for no key; whoever adds them says so before."""

    def __init__(
        self,
        args: Namespace,
        host: str,
        api_keys: tuple[str, str] | None,
        log_path: str | Path,
        name: str = "router",
    ) -> None:
        """``host`` is the address at which it is reached, and listens. ``api_keys`` are the engines' (generate, admin):
        it asks for the first, which it shows to them, and for the second where its own workers are concerned."""
        super().__init__(name, args, host, log_path)
        self._api_keys = api_keys
        self._engine_key = api_keys[0] if api_keys else None
        self.open_engines: frozenset[str] = frozenset()
        self._prefills_apart = getattr(args, "prefills_apart", False)
        self._port, self._metrics_port = self._reserve(), self._reserve()
        self.url = http_url(host, self._port)
        self._metrics_url = ""

    def api_keys(self) -> dict[str, str]:
        """What opens it, by URL; none without keys. For `Http.add_api_keys`."""
        if self._api_keys is None:
            return {}
        generate, admin = self._api_keys
        return {self.url: generate} | {f"{self.url}{path}": admin for path in _CONTROL_PATHS}

    @property
    def generate_key(self) -> str | None:
        """What requests to it need."""
        return self._engine_key

    @property
    def metrics_url(self) -> str:
        """Where its metrics are, for whoever scrapes them on this host; empty of one that others started."""
        return self._metrics_url

    def restart(self) -> None:
        """Start one that has ended, or hangs, again at the same address, where it knows no engine yet; raises as
        `start` does, and may be called again then."""
        if self._pulse is not None:
            self._pulse.end()
        self._pulse = None
        self._halt()
        try:
            self._start()
        except BaseException:
            self._halt()
            raise
        self.listen()

    def _start(self) -> None:
        args = self._args
        flags = [
            *("--host", self._host),
            *("--port", str(self._port)),
            # Which asks for no key.
            *("--prometheus-host", LOOPBACK),
            *("--prometheus-port", str(self._metrics_port)),
            # After the clients', which say more, and have engines examined.
            *("--request-timeout-secs", str(int(args.request_timeout + _MARGIN_S))),
            # As patient as whoever starts an engine again, and as quick: of itself it looks once a minute.
            *("--health-check-interval-secs", str(max(1, int(args.rollout_health_check_interval)))),
            *("--health-check-timeout-secs", str(max(1, int(args.rollout_health_check_timeout)))),
            *("--log-level", "warn"),
            # It takes requests that a weight update turns away for failures, and shuts the engine out for a minute.
            "--disable-circuit-breaker",
        ]
        if self._prefills_apart:
            flags.append("--pd-disaggregation")
        flags += args.router_cli
        self._metrics_url = _metrics_url(flags)
        env = server_environment()
        if self._api_keys is not None:
            env[GENERATE_KEY_VARIABLE], env[ADMIN_KEY_VARIABLE] = self._api_keys
        command = [sys.executable, "-m", "slime.backends.sglang.launch_router", *flags]
        self._launch(ServerProcess(command, env, self._log_path, secrets=self._api_keys or ()))
        self._wait_until(self._answers, "answered", args.engine_start_timeout)

    def add(self, url: str) -> None:
        """Register the engine at ``url``; the router takes it into use once it has answered (`wait_registered`)."""
        engine_key = self._key_of(url)
        key: dict[str, Any] = {"api_key": engine_key} if engine_key else {}
        self._call("POST", _WORKERS, {"url": url} | key | (self._part_of(url) if self._prefills_apart else {}))

    def _key_of(self, url: str) -> str | None:
        return None if url in self.open_engines else self._engine_key

    def _part_of(self, url: str) -> dict[str, Any]:
        """Whether an engine computes prompts or goes on from there, in the words of `add`: as it says itself."""
        who = f"engine {url}"
        reply = ask_server(who, url, "GET", "/server_info", key=self._key_of(url), timeout=_CALL_TIMEOUT_S)
        if not reply.ok:
            raise EngineError(f"{who}: GET /server_info: status {reply.status_code}")
        told = reply.json()
        part = told["disaggregation_mode"]
        port = {"bootstrap_port": told["disaggregation_bootstrap_port"]} if part == "prefill" else {}
        return {"worker_type": part} | port

    def wait_registered(self, urls: list[str], timeout: float) -> None:
        """Wait until the router finds all engines healthy; EngineError, with their URLs, after ``timeout`` seconds."""
        self._wait_until(lambda: set(urls) <= self._healthy(), f"registered {', '.join(urls)}", timeout)

    def registered(self) -> set[str]:
        """The URLs of the engines that it knows, healthy or not."""
        return {worker["url"] for worker in self._workers()}

    def remove(self, url: str) -> None:
        """Deregister the engine at ``url``: no request goes there any more. One that is not registered is no error."""
        for worker in self._workers():
            if worker["url"] == url:
                # It is listed for a while after it was removed; then there is none of its name.
                self._call("DELETE", f"{_WORKERS}/{worker['id']}", also_good=(404,))

    def _ask(self, timeout: float) -> None:
        self._call("GET", "/liveness", timeout=timeout)

    def failed_tries(self) -> Counter[str]:
        """Tries at engines that failed since its start, by cause; none where it does not tell."""
        try:
            text = ask_directly("GET", self._metrics_url, timeout=_CALL_TIMEOUT_S).text
        except requests.RequestException:
            return Counter()
        failed: Counter[str] = Counter()
        for labels, count in _RESPONSES.findall(text):
            named = dict(_LABEL.findall(labels))
            if (status := int(named["status_code"])) in _REPEATED_STATUSES:
                failed[_cause(status, named["error_code"])] += int(count)
        return failed

    def _answers(self) -> bool:
        # Where somebody else has taken the port meanwhile, our question, with its key, would be theirs.
        if self._process is None or self._process.pid is None or not kernel.listens(self._process.pid, self._port):
            return False
        try:
            self._workers()
        except EngineError:
            return False
        return True

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("GET", _WORKERS).json()["workers"]
        return workers

    def _healthy(self) -> set[str]:
        return {worker["url"] for worker in self._workers() if worker["is_healthy"]}

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        also_good: Collection[int] = (),
        timeout: float = _CALL_TIMEOUT_S,
    ) -> requests.Response:
        who = f"{self._name} at {self.url}"
        reply = ask_server(who, self.url, method, path, body, key=self._control_key, timeout=timeout)
        if not reply.ok and reply.status_code not in also_good:
            text = redact(reply.text[:500], (*(self._api_keys or ()), *filter(None, [self._control_key])))
            kind = _RefusedKeyError if reply.status_code in (401, 403) else EngineError
            raise kind(f"{who}: {method} {path}: status {reply.status_code}: {text}")
        return reply

    @property
    def _control_key(self) -> str | None:
        return self._api_keys[1] if self._api_keys else None


class RunningRouter(Router):
    """A router that somebody else has started: it gets this run's engines, and is never ended."""

    is_own = False

    def __init__(
        self, args: Namespace, address: tuple[str, int], api_keys: tuple[str, str] | None, keys: RouterKeys
    ) -> None:
        """``api_keys`` are the engines', as of `Router`; ``keys`` are its own, where it asks for any."""
        host, port = address
        Server.__init__(self, "router", args, host, "")
        self._engine_key = api_keys[0] if api_keys else None
        self._keys, self._api_keys = keys, None
        self.open_engines = frozenset()
        self._prefills_apart = getattr(args, "prefills_apart", False)
        self.url = http_url(host, port)
        self._metrics_url = ""
        self._added: set[str] = set()

    def api_keys(self) -> dict[str, str]:
        """As of `Router`."""
        generate, control = self._keys[0], self._control_key
        opened = {self.url: generate} | {f"{self.url}{path}": control for path in _CONTROL_PATHS}
        return {place: key for place, key in opened.items() if key}

    @property
    def generate_key(self) -> str | None:
        """What requests to it need."""
        return self._keys[0]

    def _start(self) -> None:
        try:
            there = self._workers()
        except _RefusedKeyError as error:
            keys = f"its keys are taken from the variables {' and '.join(KEY_VARIABLES)} of the driver"
            raise EngineError(f"{_FLAGS}: {error} ({keys})") from error
        except EngineError as error:
            raise EngineError(f"{_FLAGS}: {error}") from error
        if there:
            urls = ", ".join(sorted(worker["url"] for worker in there))
            raise EngineError(f"{_FLAGS}: the router at {self.url} has engines that are not this run's: {urls}")

    def add(self, url: str) -> None:
        """As of `Router`."""
        super().add(url)
        self._added.add(url)

    def stop(self) -> None:
        """Take this run's engines out of it; may be called again."""
        super().stop()
        while self._added:
            with contextlib.suppress(EngineError):
                self.remove(self._added.pop())

    @property
    def _control_key(self) -> str | None:
        return self._keys[1] or self._keys[0]

    def _ask(self, timeout: float) -> None:
        try:
            super()._ask(timeout)
        except EngineError as error:  # nobody else tells of its end
            raise NoAnswerError(str(error)) from error

    def _log_tail(self) -> str:
        return ""


def _metrics_url(flags: Sequence[str]) -> str:
    """Where the router's metrics are; of a flag that is given twice the later one counts."""
    host, port = (last_value(flags, name) or "" for name in ("--prometheus-host", "--prometheus-port"))
    return http_url({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), int(port)) + "/metrics"


def _cause(status: int, code: str) -> str:
    if "body" in code or code.startswith("read_response"):
        return "cut_body"
    return "connection" if code.startswith("call_upstream") else f"status_{status}"
