"""The routers of a run, one a model, and which engines each sends requests to."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.router import Router, RouterKeys, RunningRouter
from slime.fleet.membership import Membership
from slime.fleet.resend_log import ResendLog
from slime.fleet.spec import ModelSpec
from slime.observability import events
from slime.observability.prometheus.files import write_targets
from slime.ray.budget import Budget, pause_before
from slime.ray.cluster import serving_host
from slime.ray.examination import Examiner
from slime.rollout.engine.gate import PauseSwitch
from slime.rollout.engine.state import place_of_request
from slime.rollout.model_urls import ACTOR
from slime.rollout.runtime import RolloutRuntime
from slime.utils.environment import bypass_proxies
from slime.utils.http_client import router_variable

_POLL_S = 0.5
_CONFIRM_S = 10.0
logger = logging.getLogger(__name__)


class Routers:
    """Those of a run. One that dies, or hangs, is started again at its address by whoever calls `check`, and is told of
    the engines; requests wait meanwhile, and while no engine is there for them."""

    def __init__(
        self,
        args: argparse.Namespace,
        api_keys: tuple[str, str] | None,
        runtime: RolloutRuntime,
        models: Sequence[ModelSpec] = (),
        running_keys: RouterKeys = (None, None),
    ) -> None:
        """``running_keys`` are those of a router that runs already (``--sglang-router-ip``)."""
        self._running_keys = running_keys
        self._args, self._api_keys, self._runtime = args, api_keys, runtime
        self._models = {model.name: model for model in models}
        self._generating = next((model.name for model in models if model.generates), ACTOR)
        self._routers = {model.name: self._router_of(model) for model in models}
        """By the name of the model behind it."""
        self._engines: dict[str, dict[str, Any]] = {}
        """The actors of those that get requests, by model and URL."""
        self._open: frozenset[str] = frozenset()
        """URLs of engines that ask for no key."""
        self._hanging: set[str] = set()
        """URLs of engines that were left out before whoever says who is there knew."""
        self._joining: dict[str, list[str]] = {}
        """URLs of the engines that joined last, by model: those that the router is waited for to find healthy."""
        self._examiners: list[Examiner] = []
        self._resend_log: ResendLog | None = None
        self._version = 0
        self._changing = threading.Lock()
        self._holds = {model: PauseSwitch() for model in self._models}
        """Of requests, by model."""
        self._down: set[str] = set()
        """Models whose router starts again."""
        self._out_of_step: set[str] = set()
        """Models whose router could not be told who is there."""
        self._budget = Budget(0)
        self._stopped = False

    def _router_of(self, model: ModelSpec) -> Router:
        own = {"router_cli": list(model.router_flags), "prefills_apart": model.prefills_apart}
        its_args = argparse.Namespace(**vars(self._args) | own)
        if model.generates and self._args.sglang_router_ip is not None:
            address = self._args.sglang_router_ip, self._args.sglang_router_port
            return RunningRouter(its_args, address, self._api_keys, self._running_keys)
        name = model.called("router")
        log_path = f"{self._args.run_dir}/logs/{name.replace(' ', '_')}.log"
        return Router(its_args, serving_host(self._api_keys), self._api_keys, log_path, name)

    def options(self) -> dict[str, Any]:
        """Where they are, as users' functions find it among the options."""
        if not self._routers:
            return {}
        addresses = {model: _address(router) for model, router in self._routers.items()}
        ip, port = addresses[self._generating]
        key = self._routers[self._generating].generate_key
        of_actor = {"sglang_router_ip": ip, "sglang_router_port": port, "sglang_router_api_key": key}
        return {"sglang_model_routers": addresses} | of_actor

    def open(self) -> None:
        """Start them."""
        args, http = self._args, self._runtime.http
        self._budget = Budget(args.engine_restart_limit if args.use_fault_tolerance else 0)
        hosts = {urlsplit(router.url).hostname or "" for router in self._routers.values()}
        bypass_proxies([serving_host(self._api_keys), *hosts])  # hooks may ask routers by clients of their own
        for model in self._models.values():
            router = self._routers[model.name]
            router.start()
            router.listen()
            http.add_api_keys(router.api_keys())
            self._engines[model.name] = {}
            if model.trained or model.generates:
                http.limit_posts(router.url, place_of_request)
            if model.generates:
                self._resend_log = ResendLog(http, router.url)
            come_back = args.use_fault_tolerance
            if come_back:
                http.hold_by(router.url, self._holds[model.name].wait_until_resumed)
            if model.tolerates_loss or come_back:
                engines = functools.partial(self._engines.__getitem__, model.name)
                leave_out, limit = functools.partial(self.leave_out, model.name), args.rollout_health_check_timeout
                self._examiners.append(Examiner(engines, limit, leave_out, come_back=come_back))
                http.examine_by(router.url, self._examiners[-1])
        write_targets(Path(args.run_dir), "routers", [r.metrics_url for r in self._routers.values() if r.metrics_url])
        if self._routers and (key := self._routers[self._generating].generate_key):
            # For programs that hooks start: `http_utils.post` there adds the key for these addresses only.
            os.environ |= {"SLIME_ROUTER_API_KEY": key}
            opened = {name: router.url for name, router in self._routers.items() if router.generate_key == key}
            os.environ |= {router_variable(None if n == self._generating else n): url for n, url in opened.items()}

    def serve(self, membership: Membership) -> None:
        """Send requests to a membership's engines that are to get some, and no others; limits and aborts follow."""
        deadline, joined = time.monotonic() + self._args.engine_start_timeout, dict[str, list[str]]()
        with self._changing:
            if membership.version < self._version:
                return
            self._version = membership.version
            self._open = membership.open_urls
            self._hanging &= {url for model in self._routers for url in membership.serving(model)}
            for model in self._routers:
                engines = membership.serving(model)
                for url in self._engines[model].keys() - engines.keys():
                    self._leave_out(model, url)
                known = self._engines[model].keys() | self._hanging
                urls = [url for url in engines if url not in known]
                bypass_proxies([urlsplit(url).hostname or "" for url in urls])
                self._engines[model] |= {url: engines[url] for url in urls}
                self._routers[model].open_engines = self._open
                joined |= {model: urls} if urls else {}
            self._joining |= joined
            self._make_known()
            for model, urls in joined.items():
                for url in urls:
                    self._tell(model, "add", url)
        # Who finds that an engine hangs, or has died, need not wait for that, and ends it.
        for model, urls in joined.items():
            self._wait_registered(model, urls, deadline)

    def _tell(self, model: str, what: str, url: str) -> None:
        """Have a model's router `add` or `remove` an engine. One that does not answer hears it later, from `check`."""
        try:
            getattr(self._routers[model], what)(url)
        except EngineError:
            if not self._budget.limit:
                raise
            self._out_of_step.add(model)

    def _wait_registered(self, model: str, urls: list[str], deadline: float) -> None:
        """Until the router finds these healthy, be it that it starts again meanwhile."""
        while True:
            try:
                self._routers[model].wait_registered(urls, timeout=max(0.0, deadline - time.monotonic()))
                return
            except EngineError:
                if not self._budget.limit or self._stopped or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    def leave_out(self, model: str, url: str) -> None:
        """Send nothing more to an engine that hangs, and have fewer requests in flight."""
        with self._changing:
            if url in self._engines[model]:  # its end may have been known before
                self._leave_out(model, url)
                self._hanging.add(url)
                self._make_known()

    def _leave_out(self, model: str, url: str) -> None:
        self._tell(model, "remove", url)
        # Last: where the router fails, the next who finds out tries again.
        del self._engines[model][url]
        if url in self._joining.get(model, ()):
            self._joining[model].remove(url)

    def _make_known(self) -> None:
        """To whoever ends requests, to the bound on those in flight, and to requests that nobody is there for."""
        for model, hold in self._holds.items():
            hold.resume() if self._engines.get(model) and model not in self._down else hold.pause()
        key = self._api_keys[1] if self._api_keys else None
        self._runtime.set_engines(list(self._engines[self._generating]), key, self._open)

    def check(self, phase: str) -> None:
        """Start those again that have died or hang, as is told of with the ``phase``; EngineError where that fails, or
        is not to be tried."""
        for model, router in list(self._routers.items()):
            try:
                router.check()
            except EngineError as error:
                if self._stopped:
                    return
                if model not in self._engines or not router.is_own:  # it was never open
                    raise
                self._restart(model, router, error, phase)
        for model in [*self._out_of_step]:
            with contextlib.suppress(EngineError), self._changing:
                self._reconcile(model)
                self._out_of_step.discard(model)

    def _restart(self, model: str, router: Router, error: EngineError, phase: str) -> None:
        noticed, name, attempt, problem = time.monotonic(), self._models[model].called("router"), 0, str(error)
        with self._changing:
            self._down.add(model)
            self._make_known()
        while True:
            time.sleep(pause_before(attempt))
            if not self._budget.take(name):
                raise error
            events.add("router_died", name, phase=phase, cause=problem, action="it is started again")
            logger.warning("%s; it is started again, and requests wait", problem.splitlines()[0])
            try:
                router.restart()
                with self._changing:
                    self._reconcile(model)
                    self._out_of_step.discard(model)
                    urls = self._joining[model] = list(self._engines[model])
                router.wait_registered(urls, self._args.engine_start_timeout)
                break
            except EngineError as failure:
                attempt, problem = attempt + 1, str(failure)
        if self._resend_log is not None and self._models[model].generates:
            self._resend_log.restarted()
        with self._changing:
            self._down.discard(model)
            self._make_known()
        seconds = time.monotonic() - noticed
        action = f"it knows {len(urls)} engines"
        events.add("router_back", name, phase=phase, cause="", action=action, seconds=seconds)
        logger.warning("the %s is back after %.0f s, at %s", name, seconds, router.url)

    def _reconcile(self, model: str) -> None:
        """Have a model's router know the engines that are to get requests, and no others."""
        router, wanted = self._routers[model], self._engines[model].keys()
        known = router.registered()
        for url in known - wanted:
            router.remove(url)
        for url in wanted - known:
            router.add(url)

    def confirm(self, membership: Membership) -> None:
        """That each router has a membership's engines that are to get requests, and no others; EngineError where one
        does not within seconds. What is being mended is left to `check`, and what has changed meanwhile to the next."""
        deadline = time.monotonic() + _CONFIRM_S
        while wrong := self._wrong(membership):
            if time.monotonic() > deadline:
                raise EngineError("; ".join(wrong))
            time.sleep(_POLL_S)  # one that was removed is listed for a while

    def _wrong(self, membership: Membership) -> list[str]:
        with self._changing:
            if membership.version != self._version:
                return []
            wanted = {model: membership.serving(model).keys() - self._hanging for model in self._routers}
            mended = self._down | self._out_of_step
        found = []
        for model, router in self._routers.items():
            try:
                known = set() if model in mended else router.registered()
            except EngineError:
                continue
            missing, others = wanted[model] - known, known - wanted[model] if router.is_own else set()
            if model not in mended and (missing or others):
                lacks = [f"does not know {url}" for url in sorted(missing)]
                lacks += [f"sends requests to {url}, which is none of its engines" for url in sorted(others)]
                found.append(f"the {self._models[model].called('router')} at {router.url} {', '.join(lacks)}")
        return found

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Within, engines generate, and may be examined."""
        with contextlib.ExitStack() as stack:
            for examiner in self._examiners:
                stack.enter_context(examiner.working())
            yield

    def hold(self, hold: bool) -> None:
        """Have no engine examined while weights are pushed, or again."""
        for examiner in self._examiners:
            examiner.forbid() if hold else examiner.allow()

    def resends(self, rollout_id: int) -> dict[str, float]:
        """Metrics of requests of the trained model that were sent again; none where there is no router."""
        if self._resend_log is None:
            return {}
        return self._resend_log.metrics(rollout_id, self._routers[self._generating].failed_tries())

    def stop(self) -> None:
        """End them."""
        self._stopped = True
        while self._routers:
            self._routers.popitem()[1].stop()


def _address(router: Router) -> tuple[str, int]:
    """An IPv6 host keeps its brackets, which hooks that put host and port together would forget."""
    address, port = router.url.removeprefix("http://").rsplit(":", 1)
    return address, int(port)
