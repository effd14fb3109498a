"""The Ray actor of one engine: it owns one SGLang server tree and tells when that dies."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future

import ray

from slime.backends.sglang.engine import Engine
from slime.ray.cluster import enter_actor

_POLL_S = 0.5


class EngineActor:
    """One engine; ``start`` returns its address when it answers."""

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        api_keys: tuple[str, str] | None,
        gpus: list[str] | None,
        name: str = "engine",
    ) -> None:
        enter_actor(args)
        self._args = args
        self._engine = Engine(
            args,
            rank=rank,
            host=ray.util.get_node_ip_address() if api_keys is not None else "127.0.0.1",
            api_keys=api_keys,
            log_path=f"{args.run_dir}/logs/{name.replace(' ', '_')}_{rank}.log",
            cuda_devices=gpus,
            name=name,
        )
        self._started: Future[None] = Future()

    def start(self) -> str:
        """Start the server; its URL once it is ready."""
        try:
            self._engine.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        return self._engine.url

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return, by raising EngineError with the log's last lines, when the server does not start or dies."""
        self._started.result()
        while True:
            self._engine.check()
            time.sleep(_POLL_S)

    def release_memory(self) -> None:
        """Give the GPU memory back, when no request runs."""
        control = self._engine.control(self._args.weight_update_timeout)
        control.flush_cache()
        control.release_memory()

    def resume_memory(self, tags: list[str]) -> None:
        """Take the memory of ``tags`` again."""
        self._engine.control(self._args.weight_update_timeout).resume_memory(tags)

    def stop(self) -> None:
        """End the server tree."""
        self._engine.stop()
