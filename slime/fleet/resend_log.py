"""How often requests to a router failed and were made again."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from slime.utils.http_client import Http

_SHARE, _FEWEST = 0.01, 5
logger = logging.getLogger(__name__)


class ResendLog:
    """Of the requests to one router."""

    def __init__(self, http: Http, router_url: str) -> None:
        self._http, self._url = http, router_url
        self._failed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def restarted(self) -> None:
        """The router counts from 0 again."""
        with self._lock:
            self._failed = Counter()

    def metrics(self, rollout_id: int, failed: Counter[str]) -> dict[str, float]:
        """Counts since the last call, an evaluation's included; a warning where they pass one request in a hundred.
        ``failed`` are the tries at engines that failed, by cause, since the router's start (`Router.failed_tries`)."""
        with self._lock:
            requests, resent = self._http.take_counts(self._url)
            by_router, self._failed = failed - self._failed, failed
        total = resent.total() + by_router.total()
        if total >= max(_FEWEST, _SHARE * requests):
            causes = ", ".join(f"{n} {cause}" for cause, n in (resent + by_router).most_common())
            logger.warning(
                "rollout %d: %d tries at %d requests to engines failed and were made again (%s): the samples are "
                "whole, but see the network and the logs of router and engines",
                *(rollout_id, total, requests, causes),
            )
        counts = {f"rollout/resent/{cause}": n for cause, n in sorted(resent.items())}
        counts |= {f"rollout/resent_by_router/{cause}": n for cause, n in sorted(by_router.items())}
        return {"rollout/resent_requests": float(total)} | {name: float(n) for name, n in counts.items()}
