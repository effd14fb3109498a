"""An agent in one file: asks a model over the OpenAI chat API, runs the bash commands that it calls for, in turns.

    OPENAI_BASE_URL=http://host:port/v1 OPENAI_API_KEY=key python3 mini_agent.py "the task"

Runs inside a sandbox, on Python 3.8 or later and its standard library alone. Each message is printed as a line of JSON.
Exit status: 0 done, 1 the API failed, 2 no turn is left, 3 the model's context is full.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

SYSTEM = (
    "You solve tasks on a computer. Run commands with the tool bash, each in a new shell in the working directory. "
    "When the task is done, answer without calling the tool."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command; its output and exit status are returned.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
DONE, FAILED, NO_TURNS, FULL = 0, 1, 2, 3
_KILLED_S = 10.0
"""In which what was killed is gone, unless it waits for a disk."""


def ask(args: argparse.Namespace, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The model's next message and why it ended; tried again where the server may be able to answer later."""
    body: dict[str, Any] = {"model": args.model, "messages": messages, "tools": [TOOL]}
    if args.max_tokens:
        body["max_tokens"] = args.max_tokens
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL'].rstrip('/')}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    # Straight to the gateway, whatever proxy the image is set to.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for left in reversed(range(args.tries)):
        try:
            with opener.open(request, timeout=args.request_timeout) as response:
                choice = json.load(response)["choices"][0]
                return choice["message"], choice.get("finish_reason")
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            final = error.headers.get("x-should-retry") == "false"  # the gateway's word
            if not left or final or error.code not in (408, 409, 425, 500, 502, 503, 504):
                raise SystemExit(fail(f"the API answered {error.code}: {text}")) from error
        except (OSError, ValueError, KeyError, IndexError) as error:
            if not left:
                raise SystemExit(fail(f"the API could not be asked: {error!r}")) from error
        time.sleep(args.pause)
    raise AssertionError("unreachable")


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return FAILED


def bash(command: str, timeout: float, limit: int) -> str:
    """What a command printed, its middle left out where that is too much, and its exit status."""
    head, tail, size = b"", b"", 0
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    status = f"none: ended after {timeout:g} s"
    # Of what it prints no more is kept than is told, however much it is.
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = str(process.wait(max(0.0, deadline - time.monotonic())))
            break
        size += len(data)
        kept = data[: max(0, limit // 2 - len(head))]
        head += kept
        tail = (tail + data[len(kept) :])[-(limit // 2) :]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
    process.stdout.close()
    left_out = size - len(head) - len(tail)
    gap = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
    return f"{(head + gap + tail).decode(errors='replace').rstrip()}\n[exit status {status}]".lstrip()


def answer(call: dict[str, Any], args: argparse.Namespace) -> str:
    """The result of one call of a tool; a call that is wrong gets told so."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
        command = arguments["command"]
        if function.get("name") != "bash" or not isinstance(command, str):
            raise KeyError("bash")
    except (ValueError, KeyError, TypeError):
        return 'error: the only tool is bash, and its arguments are {"command": "..."}'
    try:
        return bash(command, args.command_timeout, args.output_chars)
    except (OSError, ValueError) as error:  # it is too long for a shell, or has a character that no command can have
        return f"error: the command could not be run: {error}"


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="a small agent with one tool, bash")
    parser.add_argument("task")
    parser.add_argument("--model", default=os.environ.get("MINI_MODEL", "slime-actor"))
    parser.add_argument("--system", default=SYSTEM)
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=0, help="of one answer; 0 leaves it to the server")
    parser.add_argument("--command-timeout", type=float, default=60.0)
    parser.add_argument("--output-chars", type=int, default=8000)
    parser.add_argument("--request-timeout", type=float, default=1800.0)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--pause", type=float, default=2.0)
    args = parser.parse_args(argv)
    messages: list[dict[str, Any]] = []

    def add(message: dict[str, Any]) -> None:
        messages.append(message)
        print(json.dumps(message), flush=True)

    if args.system:
        add({"role": "system", "content": args.system})
    add({"role": "user", "content": args.task})
    for _ in range(args.max_turns):
        message, reason = ask(args, messages)
        add(message)  # as it came: the next prompt must hold the very answer
        calls = message.get("tool_calls") or []
        for call in calls:
            add({"role": "tool", "tool_call_id": call.get("id", ""), "content": answer(call, args)})
        if not calls:
            return FULL if reason == "length" else DONE
    return NO_TURNS


if __name__ == "__main__":
    sys.exit(main())
