"""One SGLang server: its command line and environment, its start, and whether it lives."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from slime.backends.sglang.client import EngineControl, EngineError
from slime.backends.sglang.process import ADMIN_KEY_VARIABLE, FLOAT8_VARIABLE, GENERATE_KEY_VARIABLE, ServerProcess
from slime.backends.sglang.server import Server
from slime.utils.http_utils import http_url

__all__ = ["Engine", "EngineError"]

_CPU_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--grammar-backend", "none"),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "64"),
    "--sleep-on-idle",
]
"""What a server without GPUs needs: kernels that exist there, a bounded cache, and no core burnt while idle."""

_SERVER_ENVIRONMENT = {
    # /health then says that the server lives, without generating a token, which a paused engine cannot do. The router
    # asks it all the time.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # A server whose scheduler has died waits 65 s for core dumps before it ends, unless told not to make any.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    # Ranks of one engine compare the free memory of their GPUs: trainers that share these take theirs one by one.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
"""Defaults; what the host's environment sets counts more."""
_CPU_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_SCRATCH = "/dev/shm/sglang_loads_"
"""SGLang 0.5.17 leaves a file of 16 KiB a rank behind, by which its processes tell each other their load."""
_PORT_TRIES = 3
_DP_ATTENTION_PORTS = 7
"""With DP attention SGLang derives six ports from that of --dist-init-addr, which follow it."""
_PORT_TAKEN = ("address already in use", "Address already in use", "EADDRINUSE", "Port is already in use")


class Engine(Server):
    """One engine: a server process of ``rollout_num_gpus_per_engine`` ranks on this host."""

    def __init__(
        self,
        args: Namespace,
        rank: int,
        host: str,
        api_keys: tuple[str, str] | None,
        log_path: str | Path,
        cuda_devices: list[str] | None,
        name: str = "engine",
    ) -> None:
        """
        Args:
            args: the run's options.
            rank: which engine of the run this is; it shifts the sampling seed.
            host: the address at which others reach the engine; it listens on no other.
            api_keys: (generate, admin), or None for an open server on loopback.
            log_path: the server's log.
            cuda_devices: the GPUs it may use, as CUDA_VISIBLE_DEVICES names them; None without GPUs.
            name: what messages call it, before its rank.
        """
        super().__init__(f"{name} {rank}", args, host, log_path)
        self._rank = rank
        self._api_keys = api_keys
        self._cuda_devices = cuda_devices

    def start(self) -> None:
        """Start the server; returns when it is ready.

        Raises:
            EngineError: it died or was not ready within ``--engine-start-timeout``; with the last lines of its log.
        """
        try:
            for attempt in range(_PORT_TRIES):
                try:
                    self._start_once()
                    return
                except EngineError as error:
                    if attempt == _PORT_TRIES - 1 or not any(sign in str(error) for sign in _PORT_TAKEN):
                        raise
                    # Its ports stay reserved until `stop`: another attempt must not find the same ones.
                    if self._process is not None:
                        self._process.stop()
        except BaseException:
            self.stop()
            raise

    def _start_once(self) -> None:
        serving, collective = self._reserve(), self._reserve()
        self.url = http_url(self._host, serving)
        command, environment = self._command(serving, collective), self._environment()
        self._launch(
            ServerProcess(command, environment, self._log_path, secrets=self._api_keys or (), scratch=_SCRATCH)
        )
        self._wait_until(self.control(timeout=5.0).health, "answered", self._args.engine_start_timeout)

    def _command(self, port: int, collective_port: int) -> list[str]:
        args = self._args
        flags = [
            *("--model-path", str(args.hf_checkpoint)),
            *("--host", self._host),
            *("--port", str(port)),
            *("--nccl-port", str(collective_port)),
            *("--tp-size", str(args.rollout_num_gpus_per_engine)),
            *("--dtype", args.params_dtype),
            *("--random-seed", str(args.seed + self._rank)),
            "--skip-server-warmup",
        ]
        if self._cuda_devices is None:
            flags += _CPU_FLAGS
        elif args.offload_rollout:
            flags.append("--enable-memory-saver")
            if getattr(args, "sglang_speculative_algorithm", None) is not None and not args.pushes_heads:
                # Asleep the engine would lose the weights that it drafts by: nobody pushes them again.
                flags.append("--enable-draft-weights-cpu-backup")
        if args.lora_sync == "adapter":
            flags += self._adapter_flags()
        if args.random_weights:
            flags += ["--load-format", "dummy"]
        if "--enable-dp-attention" in args.sglang_cli:
            flags += ["--dist-init-addr", f"127.0.0.1:{self._reserve(_DP_ATTENTION_PORTS)}"]
        # The user's flags come last: where argparse sees a flag twice, the later one counts.
        return [sys.executable, "-m", "slime.backends.sglang.launch", *flags, *args.sglang_cli]

    def _adapter_flags(self) -> list[str]:
        args = self._args
        flags = [
            "--enable-lora",
            *("--max-lora-rank", str(args.lora_rank)),
            *("--lora-target-modules", *args.lora_modules),
            # One place for the adapter, and one for requests without.
            *("--max-loras-per-batch", "2"),
        ]
        if self._cuda_devices is None:
            return [*flags, "--lora-backend", "torch_native"]
        # An engine that sleeps keeps its own weights in host memory: nobody pushes them again.
        return [*flags, "--enable-weights-cpu-backup"] if args.offload_rollout else flags

    def _environment(self) -> dict[str, str]:
        env = {**_SERVER_ENVIRONMENT, **os.environ}
        if self._api_keys is not None:
            env[GENERATE_KEY_VARIABLE], env[ADMIN_KEY_VARIABLE] = self._api_keys
        if self._args.pushes_float8:
            env[FLOAT8_VARIABLE] = "1"
        if self._cuda_devices is None:
            return {**_CPU_ENVIRONMENT, **env}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._cuda_devices))
        return env

    def control(self, timeout: float) -> EngineControl:
        """A client for control calls to this engine, each within ``timeout`` seconds."""
        generate_key, admin_key = self._api_keys or (None, None)
        return EngineControl(self.url, admin_key, generate_key, timeout)
