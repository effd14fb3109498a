"""The real router in front of workers that only say which of them was asked."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest
from aiohttp import web

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.router import Router, RunningRouter
from slime.data import Sample
from slime.options.flags.sglang import ROUTER_PACKAGE
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sglang_rollout import generate
from slime.utils.http_utils import RequestError, get, post
from tests.integration.tiny import KEYS, engine_args
from tests.proxy import RecordingProxy

NUM_GPUS = 0
WORKERS, REQUESTS = 3, 10


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
def test_requests_of_one_session_go_to_one_engine(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = RecordingProxy()
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
    args = engine_args(tmp_path, tmp_path, router_cli=["--policy", policy], rollout_max_context_len=64)
    vars(args).update(router_policy=policy, num_engines=WORKERS, sglang_router_api_key=KEYS[0])
    runtime = RolloutRuntime(args)
    with runtime.active():
        asyncio.run(asyncio.wait_for(_sessions(args, runtime), 120))
    assert proxy.close() == []


async def _sessions(args: Namespace, runtime: RolloutRuntime) -> None:
    async def healthy(request: web.Request) -> web.StreamResponse:
        return web.json_response({"model_path": "m"})

    faults = [503, None, 503]  # a status, or a connection that breaks

    async def answer(request: web.Request) -> web.StreamResponse:
        if faults:
            if (status := faults.pop()) is not None:
                return web.Response(status=status)
            assert request.transport is not None
            request.transport.abort()
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, request.url.port, None]],
            "weight_version": "1",
        }
        return web.json_response({"text": "", "meta_info": meta})

    app = web.Application()
    app.router.add_get("/{path:.*}", healthy)
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    for _ in range(WORKERS):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    urls = [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
    router = Router(args, "127.0.0.1", KEYS, args.run_dir / "router.log")
    try:
        await asyncio.to_thread(router.start)
        host, port = router.url.removeprefix("http://").split(":")
        args.sglang_router_ip, args.sglang_router_port = host, int(port)
        # As a run's that finds it there, and has keys of its own for its engines.
        running = RunningRouter(args, (host, int(port)), ("engines", "nobody's"), KEYS)
        stranger = RunningRouter(args, (host, int(port)), KEYS, (KEYS[0], None))
        with pytest.raises(EngineError, match=r"status 401.* taken from the variables SLIME_ROUTER_API_KEY and SLIME_"):
            await asyncio.to_thread(stranger.start)
        await asyncio.to_thread(running.start)
        runtime.http.add_api_keys(running.api_keys())
        for url in urls:
            await asyncio.to_thread(running.add, url)
        await asyncio.to_thread(running.wait_registered, urls, 60)
        asked = [await _engines_of(args, f"session {i}") for i in range(16)]
        # After a try that fails sglang-router tries the session's engine again, and its successor another one.
        stay = asked[1:] if ROUTER_PACKAGE == "smg" else asked
        assert all(len(engines) == 1 for engines in stay), asked
        assert len(set.union(*asked)) > 1, "sessions are spread over the engines"
        other = {"url": "http://127.0.0.1:9"}
        with pytest.raises(RequestError) as refused:
            await post(f"{router.url}/workers", other, headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert refused.value.status == 401, "the key for generation puts nobody between the run and its engines"
        found = await get(f"{router.url}/workers")  # a hook's, which has the other key there
        assert {worker["url"] for worker in found["workers"]} == set(urls)
        failed = await asyncio.to_thread(router.failed_tries)
        broken = {} if ROUTER_PACKAGE == "smg" else {"connection": 1}  # which that one does not count
        assert failed == {"status_503": 2} | broken, "which the router has repeated by itself"
        with pytest.raises(EngineError, match=rf"the router at {router.url} has engines that are not this run's: http"):
            await asyncio.to_thread(RunningRouter(args, (host, int(port)), KEYS, KEYS).start)
        await asyncio.to_thread(running.stop)
        while await asyncio.to_thread(router.registered) & set(urls):  # the deadline is that of the whole test
            await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(router.stop)
        await runner.cleanup()


async def _engines_of(args: Namespace, session: str) -> set[int]:
    """Who answered the requests of a session: each response is the port of its engine."""
    samples = [Sample(tokens=[1, 2, 3], session_id=session) for _ in range(REQUESTS)]
    await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 1}) for sample in samples))
    return {sample.tokens[-1] for sample in samples}
