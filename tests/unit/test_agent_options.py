"""Flags of agents: what is wrong with them is one line, before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Fails, Flags, Parse, refused

NUM_GPUS = 0
AGENT = "--custom-generate-function-path slime.agent.rollout.generate --custom-agent-function-path agent.py"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> None:
    (launch_directory / "agent.py").write_text(
        "async def run(base_url, prompt, request_kwargs, metadata, session): pass\n"
        "def short(base_url): pass\ndef more(base_url, prompt, request_kwargs, metadata, key): pass\n"
    )
    (launch_directory / "own.py").write_text("async def generate(args, sample, sampling_params): pass\n")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_sessions_have_budgets_and_the_gateway_an_address(tmp_path: Path, parse: Parse) -> None:
    args = parse(f"{AGENT} --agent-max-turns 3 --agent-max-seconds 1.5 --agent-host 127.0.0.1")
    assert args.custom_agent_function_path == f"{tmp_path / 'agent.py'}:run"
    assert (args.agent_max_turns, args.agent_max_tokens, args.agent_max_seconds) == (3, 0, 1.5)
    assert parse("--custom-generate-function-path own.py --agent-max-tokens 9").agent_max_tokens == 9
    assert parse(f"{AGENT} --agent-host 192.0.2.1 --dry-run").agent_host == "192.0.2.1"  # of where it will run


@refused(
    f"""
--custom-agent-function-path agent.py
    -> --custom-agent-function-path has no effect without --custom-generate-function-path, --eval-config,
--agent-max-turns 3 -> --agent-max-turns 3 has no effect without --custom-generate-function-path
--custom-generate-function-path slime.agent.rollout:generate
    -> --custom-generate-function-path slime.agent.rollout:generate needs --custom-agent-function-path
{AGENT} --apply-chat-template -> --apply-chat-template would render what agents get as rows have it: drop it
{AGENT}:short -> --custom-agent-function-path agent.py:short: it is called as (base_url, prompt, request_kwargs,
{AGENT}:more -> missing a required argument: 'key'
{AGENT}:none -> --custom-agent-function-path agent.py:none: agent.py has no 'none'
{AGENT} --agent-max-turns -1 -> argument --agent-max-turns: must be at least 0, not -1
{AGENT} --agent-max-seconds nan -> argument --agent-max-seconds: must be a finite number
{AGENT} --agent-port 70000 -> argument --agent-port: must be at most 65535, not 70000
{AGENT} --agent-host 0.0.0.0 -> --agent-host 0.0.0.0 is every interface: name the address at which agents reach
{AGENT} --agent-host 192.0.2.1 -> --agent-host 192.0.2.1, where the gateway would listen: Cannot assign requested
{AGENT} --agent-host no.invalid -> --agent-host no.invalid, where the gateway would listen:
{AGENT} --sglang-tool-call-parser nope -> argument --sglang-tool-call-parser: invalid choice: 'nope'
{AGENT} --sglang-reasoning-parser nope -> argument --sglang-reasoning-parser: invalid choice: 'nope'
"""
)
def test_what_cannot_be_is_one_line(flags: Flags, message: str, fails: Fails) -> None:
    assert message in fails(*flags)


@pytest.mark.parametrize(
    "where", ["--agent-host 127.0.0.1", "--no-api-keys", "--sglang-router-ip 127.0.0.1 --sglang-router-port 9"]
)
def test_a_port_that_somebody_has_is_named(where: str, taken_port: int, fails: Fails, parse: Parse) -> None:
    """Where the gateway would listen, that is: another address of this host has ports of its own."""
    line = f"--agent-port {taken_port} at 127.0.0.1: Address already in use; name another, or 0 for any"
    assert line in fails(f"{AGENT} --agent-port {taken_port} {where}")
    assert parse(f"{AGENT} --agent-port {taken_port} --agent-host 127.0.0.2").agent_port == taken_port
