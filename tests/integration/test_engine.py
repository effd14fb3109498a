"""A real SGLang server, alone and behind a real router: generation, control, keys, death."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from transformers import AutoModelForCausalLM

from slime.backends.sglang.client import EngineControl, EngineError, GenerateClient
from slime.backends.sglang.engine import Engine
from slime.utils.http_client import Http
from slime.utils.http_utils import RequestError, get, post
from slime.utils.patching import version_of
from tests.integration.tiny import KEYS, Service, engine_args, log_probs_of, processes_of
from tests.waiting import command_line, wait_for, wait_for_ends

NUM_GPUS = 0

pytestmark = pytest.mark.integration

SAMPLING = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}


def generate_all(service: Service, prompts: list[list[int]], seeds: list[int]) -> list[dict[str, Any]]:
    """All prompts at the same time, through the router."""

    async def run() -> list[dict[str, Any]]:
        http = Http(120.0)
        client = GenerateClient(http, service.router.url, KEYS[0], retries=3)
        try:
            calls = [client.generate(p, SAMPLING | {"sampling_seed": s}) for p, s in zip(prompts, seeds, strict=True)]
            return await asyncio.gather(*calls)
        finally:
            await http.close()

    return asyncio.run(run())


def test_log_probs_are_those_of_the_model_and_seeds_decide_the_tokens(service: Service, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    prompts = [[2 + (7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(8)]
    seeds = list(range(100, 108))
    service.control.flush_cache()
    if service.control.weight_version() != "default":  # another test has pushed weights: back to those on disk
        service.control.update_weights_from_disk(str(tiny_model_dir))
    replies = generate_all(service, prompts, seeds)
    for prompt, reply in zip(prompts, replies, strict=True):
        triples = reply["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in triples] == reply["output_ids"]
        expected = log_probs_of(model, prompt, reply["output_ids"])
        assert max(abs(lp - e) for (lp, _, _), e in zip(triples, expected.tolist(), strict=True)) < 1e-4
    again = generate_all(service, prompts[::-1], seeds[::-1])[::-1]
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in replies]
    one_prompt = generate_all(service, [prompts[0]] * 4, [1, 2, 3, 4])
    assert len({tuple(r["output_ids"]) for r in one_prompt}) == 4


def test_what_is_streamed_is_what_is_not(service: Service) -> None:
    """Through the router, from an engine that sends what is new: as it is made, with the same log-probs."""
    params, came = SAMPLING | {"sampling_seed": 7}, list[Sequence[int]]()

    async def run() -> list[dict[str, Any]]:
        http = Http(120.0)
        client = GenerateClient(http, service.router.url, KEYS[0], retries=3)
        try:
            return [
                await client.generate([5, 6, 7], params),
                await client.generate([5, 6, 7], params, on_tokens=came.append),
            ]
        finally:
            await http.close()

    whole, streamed = asyncio.run(run())
    assert len(came) > 3, "not all at once"
    assert [token for tokens in came for token in tokens] == whole["output_ids"]
    pairs = [[pair[:2] for pair in reply["meta_info"]["output_token_logprobs"]] for reply in (whole, streamed)]
    assert pairs[0] == pairs[1]
    assert streamed["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_seeds_decide_the_tokens_beside_probes_too(service: Service) -> None:
    """A greedy request in their batch would have them drawn from sorted probabilities, which gives other tokens."""
    prompts, seeds = [[2 + i, 7, 9] for i in range(8)], list(range(8))
    alone = generate_all(service, prompts, seeds)
    over = threading.Event()

    def probe() -> int:
        count = 0
        while not over.is_set():
            count += len(service.control.score([5, 6, 7])) == 2
        return count

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        beside = [generate_all(service, prompts, seeds) for _ in range(3)]
        over.set()
        assert probing.result(60) >= 3
    for replies in beside:
        assert [reply["output_ids"] for reply in replies] == [reply["output_ids"] for reply in alone]


def test_a_prompt_that_is_too_long_is_refused_at_once(service: Service) -> None:
    with pytest.raises(RequestError, match="status 400") as caught:
        generate_all(service, [[5] * 600], [1])
    assert caught.value.status == 400


def test_keys_open_what_they_should_and_are_in_no_log(service: Service) -> None:
    generation = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}

    def status(url: str, body: dict[str, Any], key: str | None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.post(url, json=body, headers=headers, timeout=30).status_code

    for url in (service.engine.url, service.router.url):
        assert [status(f"{url}/generate", generation, key) for key in (None, *KEYS)] == [401, 200, 401]
    workers = f"{service.router.url}/workers"
    stranger = {"url": "http://127.0.0.1:9"}
    assert [status(workers, stranger, key) for key in (None, KEYS[0])] == [401, 401]
    found = asyncio.run(get(workers))  # a hook's, which has the key for that too
    assert [worker["url"] for worker in found["workers"]] == [service.engine.url]
    service.control.flush_cache()  # waits until the requests above have left, which a flush alone answers with 400
    flush = f"{service.engine.url}/flush_cache"
    assert [status(flush, {}, key) for key in (None, *KEYS)] == [401, 401, 200]
    for log in ("engine_0.log", "router.log"):
        text = (service.args.run_dir / log).read_text()
        assert not any(key in text for key in KEYS)
    server_args = (service.args.run_dir / "engine_0.log").read_text()
    assert "server_args=" in server_args
    assert re.search(r"\bapi_key'?[=:] ?'\*\*\*'", server_args)
    told = requests.get(f"{service.engine.url}/server_info", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=30)
    assert told.json()["api_key"] == told.json()["admin_api_key"] == "***"
    assert not any(key in told.text for key in KEYS)
    for process in processes_of(service):
        assert not any(key in command_line(process) for key in KEYS)


def test_schedulers_do_not_import_megatron(service: Service) -> None:
    """Which says so in the log, as it finds no Transformer Engine."""
    log = (service.args.run_dir / "engine_0.log").read_text()
    assert "Init torch distributed ends" in log  # of the scheduler, whose imports are done
    assert "Megatron" not in log


def test_servers_listen_where_they_are_reached_and_nowhere_else(service: Service) -> None:
    """The store of their ranks and the router's metrics too."""
    assert service.router._process is not None
    router = psutil.Process(service.router._process.pid).children(recursive=True)
    for processes, fewest in ((processes_of(service), 2), (router, 2)):
        found = [c for process in processes for c in process.net_connections("inet") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in found} == {"127.0.0.1"}
        assert len({c.laddr.port for c in found}) >= fewest


def test_nothing_goes_through_the_proxy_of_the_host(service: Service) -> None:
    """Nor do servers have the variables, which their own libraries might heed, or secrets of the host."""
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    asyncio.run(post(f"{service.router.url}/generate", body))
    assert service.proxy is not None
    assert service.proxy.asked == []
    secrets = {"WANDB_API_KEY"}
    for server, more in ((service.engine, set()), (service.router, {"HF_TOKEN"})):
        assert server._process is not None
        supervisor = psutil.Process(server._process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            given = process.environ()
            assert not [name for name in given if name.lower().endswith("_proxy") and name.lower() != "no_proxy"]
            assert not (secrets | more) & set(given)


def test_a_connection_that_is_idle_between_two_rollouts_stays_open(service: Service) -> None:
    """The router sends the next rollout's requests on those that it has."""
    address = urlsplit(service.engine.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        connection.getresponse().read()
        closed, _, _ = select.select([connection.sock], [], [], 7)  # SGLang's own limit is 5 s
        assert not closed


def test_post_of_a_hook_reaches_the_router_with_its_key(service: Service) -> None:
    async def run() -> Any:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
        return await post(f"{service.router.url}/generate", body)

    assert asyncio.run(run())["meta_info"]["completion_tokens"] == 2


def paused_reply(service: Service) -> dict[str, Any]:
    """What a request of 450 tokens gets when the engine pauses while it runs; the engine goes on afterwards."""
    replies: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {KEYS[0]}"}

    def long_request() -> None:
        sampling = {"max_new_tokens": 450, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
        replies.append(requests.post(f"{service.engine.url}/generate", json=body, headers=headers, timeout=60).json())

    def runs() -> bool:
        loads = requests.get(f"{service.engine.url}/v1/loads?include=core", headers=headers, timeout=30).json()["loads"]
        return bool(loads[0]["num_running_reqs"] or replies)

    thread = threading.Thread(target=long_request)
    thread.start()
    wait_for(runs, "the request runs")
    service.control.pause()
    service.control.flush_cache()
    thread.join(60)
    service.control.continue_()
    (reply,) = replies
    return reply


def test_pause_aborts_with_partial_tokens_and_continue_serves_again(service: Service) -> None:
    tries = (paused_reply(service) for _ in range(5))  # on a busy machine it may be over when the pause comes
    reply = next((reply for reply in tries if reply["meta_info"]["finish_reason"]["type"] == "abort"), None)
    assert reply is not None, "none was aborted"
    assert 0 < len(reply["output_ids"]) < 450
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
    assert generate_all(service, [[5, 6]], [1])[0]["meta_info"]["finish_reason"]["type"] == "length"


def test_capabilities_and_health(service: Service) -> None:
    assert service.control.health()
    assert {"/generate", "/update_weights_from_tensor"} <= service.control.capabilities
    assert service.control.has_sessions == (version_of("sglang") != "0.5.17")
    nobody = EngineControl("http://127.0.0.1:9", None, None, timeout=5)
    assert not nobody.health()
    with pytest.raises(EngineError, match=r"engine http://127\.0\.0\.1:9: GET /model_info"):
        nobody.weight_version()


def test_an_engine_that_is_not_there_does_not_get_registered(service: Service) -> None:
    service.router.wait_registered([service.engine.url], timeout=60)
    with pytest.raises(EngineError, match=r"had not registered http://127\.0\.0\.1:9 after 1 s"):
        service.router.wait_registered(["http://127.0.0.1:9"], timeout=1)


def test_an_engine_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    """Prepared before, it imports and then waits for its start."""
    args = engine_args(tmp_path / "nothing-here", tmp_path)
    log = tmp_path / "engine_3.log"
    engine = Engine(args, 3, "127.0.0.1", KEYS, log, None)
    engine.prepare()
    wait_for(lambda: "imported; goes on" in log.read_text(), "the server has imported", 120)
    assert engine.poll() is None
    assert "nothing-here" not in log.read_text()
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"engine 3 at .* ended with status \d+[\s\S]*nothing-here") as caught:
        engine.start()
    assert time.monotonic() - started < 120, "death is seen at once, not at --engine-start-timeout"
    assert not any(key in str(caught.value) for key in KEYS)


OWNER = """
import argparse, json, sys
from slime.backends.sglang.engine import Engine
values = json.loads(sys.argv[1])
Engine(argparse.Namespace(**values), 0, "127.0.0.1", None, values["run_dir"] + "/engine.log", None).start()
"""


def test_sigkill_of_the_owner_leaves_no_process_of_a_real_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    values = vars(engine_args(tiny_model_dir, tmp_path)) | {"run_dir": str(tmp_path)}
    with open(tmp_path / "owner.log", "w") as log:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, json.dumps(values)], stdout=log, stderr=log, env=dict(os.environ)
        )
    tree: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 200
        # Not ready yet: the server has just spawned its scheduler and its detokenizer, the hardest moment to end it.
        while len(tree) < 4:
            assert owner.poll() is None, (tmp_path / "owner.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
            tree = psutil.Process(owner.pid).children(recursive=True)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    wait_for_ends(tree, "the server's tree", 100)
