"""One SGLang engine: the command line and environment of its server, its start, and whether it lives."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Protocol

from slime.backends.sglang.client import EngineControl, EngineError
from slime.backends.sglang.server import ExitInfo, Server
from slime.options.checks.determinism import engines_are_deterministic
from slime.processes.server_process import (
    ADMIN_KEY_VARIABLE,
    EQUAL_BITS_VARIABLE,
    FLOAT8_VARIABLE,
    GENERATE_KEY_VARIABLE,
    SAME_KERNELS_VARIABLE,
    ServerProcess,
    last_value,
)
from slime.utils.environment import DETERMINISTIC, kernels_of_any_shape, rows_alone_by_mkl, server_environment
from slime.utils.http_utils import host_port, http_url

_CPU_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--grammar-backend", "none"),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "128"),
    "--sleep-on-idle",
]
"""What a server without GPUs needs: kernels that exist there, a bounded cache, and no core burnt while idle."""

_SERVER_ENVIRONMENT = {
    # /health, which the router asks, then says that the server lives without a token: a paused engine makes none.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # After 5 idle s it would close the very connections on which the router just then sends a rollout's requests.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    # A server whose scheduler has died waits 65 s for core dumps before it ends, unless told not to make any.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    # Ranks of one engine compare the free memory of their GPUs: trainers that share these take theirs one by one.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
"""Defaults; what the host's environment sets counts more."""
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Those that a server may need: a draft model may be one of the hub's."""
_CPU_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_SCRATCH = "/dev/shm/sglang_loads_"
"""SGLang 0.5.17 leaves a file of 16 KiB a rank behind, by which its processes tell each other their load."""
_PARTS = ("prefill", "decode")
"""Of the types of workers those that SGLang has a mode for."""
_PORT_TRIES = 3
_DP_ATTENTION_PORTS = 14
"""With DP attention SGLang derives ports from that of --dist-init-addr: the six that follow it, and the 13th."""
_PORT_TAKEN = ("address already in use", "Address already in use", "EADDRINUSE", "Port is already in use")
_FOLLOW_S, _FOLLOW_POLL_S = 3.0, 0.1
"""How long the servers of an engine's other nodes may take to end after the first; it breaks their collectives."""


class OtherNodes(Protocol):
    """The servers of an engine's nodes but the first, wherever they run."""

    def start(self, meeting: str) -> None:
        """Start them all, to meet the first one at the address ``meeting``; returns at once."""

    def ends(self) -> list[ExitInfo]:
        """Of those that have ended, or could not be started."""

    def look(self) -> None:
        """Have each looked at on its host, as `Engine.look`, now that all have started."""

    def stop(self) -> None:
        """End every process of theirs; may be called again, and before another `start`."""


class Engine(Server):
    """One engine: a server of ``rollout_num_gpus_per_engine`` ranks on this host, or its part on one of several nodes.

    SGLang then has a server process on each node, with as many ranks each. The first node's serves all requests, and
    passes control calls on to the ranks of the others.
    """

    def __init__(
        self,
        args: Namespace,
        rank: int,
        host: str,
        api_keys: tuple[str, str] | None,
        log_path: str | Path,
        cuda_devices: list[str] | None,
        name: str = "engine",
        node: int = 0,
        num_nodes: int = 1,
        others: OtherNodes | None = None,
    ) -> None:
        """
        Args:
            rank: which engine of the run this is; it shifts the sampling seed.
            host: the address at which others reach the engine; it listens on no other.
            api_keys: (generate, admin), or None for an open server on loopback.
            cuda_devices: the GPUs it may use, as CUDA_VISIBLE_DEVICES names them; None without GPUs.
            others: on the first of several nodes, of which this host is ``node``, the servers of those after it.
        """
        on = f" node {node}" if num_nodes > 1 else ""
        super().__init__(f"{name} {rank}{on}", args, host, log_path)
        self._rank = rank
        self._node, self._num_nodes, self._others = node, num_nodes, others
        self._api_keys = api_keys
        self._cuda_devices = cuda_devices
        self._bootstrap_port = 0

    def prepare(self) -> None:
        """Start a one-node engine's server as far as it takes no GPU memory: it imports, and waits for `start`."""
        if self._num_nodes == 1:
            self.join(self._meeting_point(), held=True)

    def _start(self) -> None:
        for attempt in range(_PORT_TRIES):
            try:
                self._start_once()
                return
            except EngineError as error:
                if attempt == _PORT_TRIES - 1 or not any(sign in str(error) for sign in _PORT_TAKEN):
                    raise
                # Its ports stay reserved until `stop`: another attempt must not find the same ones.
                self._halt()

    def join(self, meeting: str | None, *, held: bool = False) -> None:
        """Start this node's server, to meet those of others at ``meeting``; a ``held`` one only imports as yet."""
        serving, collective = self._reserve(), self._reserve()
        self._bootstrap_port = self._reserve() if self._args.worker_type == "prefill" else 0
        self.url = http_url(self._host, serving)
        command, environment = self._command(serving, collective, meeting), self._environment()
        secrets = self._api_keys or ()
        process = ServerProcess(command, environment, self._log_path, secrets, scratch=_SCRATCH, held=held, beats=True)
        self._launch(process)

    def end(self) -> ExitInfo | None:
        """The engine's end, which that of any of its servers is; None while it runs. The first to end comes first."""
        if self._others is None:
            return super().end()
        ends, deadline = self._ends(self._others), time.monotonic() + _FOLLOW_S
        while 0 < len(ends) < self._num_nodes and time.monotonic() < deadline:
            time.sleep(_FOLLOW_POLL_S)
            ends = self._ends(self._others)
        return ends[0]._replace(message="\n".join(end.message for end in ends)) if ends else None

    def _ends(self, others: OtherNodes) -> list[ExitInfo]:
        own = super().end()
        return sorted([*([own] if own else []), *others.ends()])

    def listen(self) -> None:
        """Ask the server, which has started, from now on whether it answers; look at its processes, on all nodes."""
        super().listen()
        self.look()
        if self._others is not None:
            self._others.look()

    def _ask(self, timeout: float) -> None:
        self.control(timeout).ask("/health")

    def examine_all(self, because: str, *, paused: bool) -> None:
        """`examine` by a token, which all processes take part in, or if ``paused`` by what schedulers answer."""
        path = "/server_info" if paused else "/health_generate"
        self.examine(because, lambda timeout: self.control(timeout).ask(path, succeeds=True))

    def _halt(self) -> None:
        try:
            super()._halt()
        finally:
            if self._others is not None:
                self._others.stop()

    def _start_once(self) -> None:
        if self._process is not None and self._process.held:
            self._let_go()
        else:
            meeting = self._meeting_point()
            self.join(meeting)
            if self._others is not None and meeting is not None:
                self._others.start(meeting)
        limit = self._args.engine_start_timeout
        self._wait_until(self.control(timeout=5.0).health, "answered", limit)
        # On CPUs each flush of the cache has Python look for garbage: among all that was imported, half a second.
        self.control(limit).freeze_garbage_collection()

    def _meeting_point(self) -> str | None:
        ports = _DP_ATTENTION_PORTS if "--enable-dp-attention" in self._args.sglang_cli else 1
        if self._num_nodes > 1:
            return host_port(self._host, self._reserve(ports))
        return host_port("127.0.0.1", self._reserve(ports)) if ports > 1 else None

    def _command(self, port: int, collective_port: int, meeting: str | None = None) -> list[str]:
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
            if args.keeps_weights:
                flags.append("--enable-weights-cpu-backup")
            drafts = getattr(args, "sglang_speculative_algorithm", None) is not None
            if drafts and (args.pushes_float8 or not args.pushes_heads):
                # Asleep the engine would lose what it drafts by and nobody pushes again: weights, scales of its cache.
                flags.append("--enable-draft-weights-cpu-backup")
        if args.lora_sync == "adapter":
            flags += self._adapter_flags()
        if args.random_weights:
            flags += ["--load-format", "dummy"]
        if hasattr(args, "sglang_incremental_streaming_output"):
            # Else each event of a stream has all of its tokens so far, and their log-probs.
            flags.append("--incremental-streaming-output")
        flags += self._part_flags()
        if engines_are_deterministic(args):
            flags.append("--enable-deterministic-inference")
        if args.true_on_policy_mode and self._cuda_devices is not None:
            flags += ["--attention-backend", "fa3"]
        if args.returns_routes:
            flags.append("--enable-return-routed-experts")
        if meeting is not None:
            flags += ["--dist-init-addr", meeting]
        if self._num_nodes > 1:
            flags += ["--nnodes", str(self._num_nodes), "--node-rank", str(self._node)]
        # The user's flags come last: where argparse sees a flag twice, the later one counts.
        flags += [*args.sglang_cli, *self._flags_of_equal_bits()]
        return [sys.executable, "-m", "slime.backends.sglang.launch", *flags]

    def _flags_of_equal_bits(self) -> list[str]:
        """What a deterministic run needs whatever the user's flags: which requests meet, and what of a prompt is in the
        cache, is a matter of time. FlashAttention 3, of some widths of heads, and torch's attention on CPUs have other
        bits for the end of a prompt than for the whole; on CPUs products of several rows have others than those of one,
        but for MKL's in float32."""
        if not self._args.deterministic_mode:
            return []
        dtype = last_value(self._args.sglang_cli, "--dtype") or self._args.params_dtype
        together = self._cuda_devices is not None or (dtype == "float32" and rows_alone_by_mkl())
        return ["--disable-radix-cache", *([] if together else ["--max-running-requests", "1"])]

    def _part_flags(self) -> list[str]:
        """Of an engine that only computes prompts, or goes on from there. For the former's own service, by which the
        others find it, another port is reserved."""
        if self._args.worker_type not in _PARTS:
            return []
        flags = ["--disaggregation-mode", self._args.worker_type]
        first = self._args.worker_type == "prefill" and self._node == 0
        return [*flags, "--disaggregation-bootstrap-port", str(self._bootstrap_port)] if first else flags

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
        env = {**_SERVER_ENVIRONMENT, **server_environment(needs=_SECRETS)}
        if self._api_keys is not None:
            env[GENERATE_KEY_VARIABLE], env[ADMIN_KEY_VARIABLE] = self._api_keys
        if self._args.true_on_policy_mode:
            env |= {SAME_KERNELS_VARIABLE: "1", **kernels_of_any_shape()}
        if self._args.deterministic_mode:
            cublas = "CUBLAS_WORKSPACE_CONFIG"
            env = {cublas: DETERMINISTIC[cublas][0], **env, **kernels_of_any_shape()}
        if engines_are_deterministic(self._args):
            env[EQUAL_BITS_VARIABLE] = "1"
        if self._args.pushes_float8:
            env[FLOAT8_VARIABLE] = "1"
        if self._cuda_devices is None:
            ranks, cores = self._args.rollout_num_gpus_per_engine, os.cpu_count() or 1
            # Unless told each rank's core, SGLang takes no more ranks than this host has NUMA nodes.
            bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(ranks))}
            return {**_CPU_ENVIRONMENT, **(bound if ranks > 1 else {}), **env}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._cuda_devices))
        return env

    def control(self, timeout: float) -> EngineControl:
        """A client for control calls to this engine, each within ``timeout`` seconds."""
        generate_key, admin_key = self._api_keys or (None, None)
        return EngineControl(self.url, admin_key, generate_key, timeout)
