"""What others can read of a process's command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime.processes.server_process import ServerProcess
from slime.utils.command_line import apart, secrets_of
from tests.waiting import wait_for

NUM_GPUS = 0
PROGRAM = """
import sys
from slime.utils.command_line import strike_secrets

strike_secrets()
strike_secrets()
print(*sys.argv[1:], flush=True)
sys.stdin.readline()
"""


def test_secrets_are_struck_where_they_can_be_read() -> None:
    """By ``sys.argv``, of which trackers take a copy, and by ps; all else stays as it is."""
    given = ["--wandb-key", "s3cret", "--lr", "1e-6", "--sglang-ssl-keyfile-password=s3cret="]
    given += ["--input-key", "question", "--prompt-data", "数据.jsonl", "--judge-tokens", "s3cret", "", "s3cret"]
    given += [
        "--label-key",
        "答案",
        "--train-env-vars",
        '{"HF_TOKEN": "s3cret"}',
        "--rm-sglang-args",
        "--api-key s3cret",
    ]
    given += ["--judge-args", "--api-key s3cret --n=1"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        own = process.stdout.readline()
        shown = psutil.Process(process.pid).cmdline()[3:]
        process.stdin.close()
    assert "s3cret" not in own
    assert own.split(" ")[:4] == ["--wandb-key", "<redacted>", "--lr", "1e-6"]
    expected = ["--wandb-key", "*" * 6, "--lr", "1e-6", "--sglang-ssl-keyfile-password=" + "*" * 7, *given[5:10]]
    assert shown == [
        *expected,
        "*" * 6,
        "",
        "*" * 6,
        *given[13:16],
        "*" * len(given[16]),
        given[17],
        "*" * len(given[18]),
        given[19],
        "*" * len(given[20]),
    ]


@pytest.mark.parametrize(
    ("words", "shown", "hidden", "secrets"),
    [
        ([], [], [], ()),
        (["python", "-m", "x", "--port", "1"], ["python", "-m", "x", "--port", "1"], [], ()),
        (
            ["x", "--ssl-keyfile-password", "s3cret", "--api-key=k=1", "--served-model-name", "m", "n"],
            ["x", "--served-model-name", "m", "n"],
            ["--ssl-keyfile-password", "s3cret", "--api-key=k=1"],
            ("s3cret", "k=1"),
        ),
        (
            ["--control-plane-api-keys", "a:b:admin:c", "d:e:user:f", "--max-total-tokens", "8192"],
            ["--max-total-tokens", "8192"],
            ["--control-plane-api-keys", "a:b:admin:c", "d:e:user:f"],
            ("a:b:admin:c", "d:e:user:f"),
        ),
        (["x", "--api-key", "s3cret", "-h", "y", "-1"], ["x", "-h", "y", "-1"], ["--api-key", "s3cret"], ("s3cret",)),
        (
            ["--loader", '{"n": 1, "api_key": "s3cret", "of": [{"pwd": "other"}]}', "--port", "1"],
            ["--port", "1"],
            ["--loader", '{"n": 1, "api_key": "s3cret", "of": [{"pwd": "other"}]}'],
            ('{"n": 1, "api_key": "s3cret", "of": [{"pwd": "other"}]}', "s3cret", "other"),
        ),
        (["--of", "--api-key s3cret"], [], ["--of", "--api-key s3cret"], ("--api-key s3cret",)),
        (["x", "--api-keys", "-1x", "--n", "-1"], ["x", "--n", "-1"], ["--api-keys", "-1x"], ("-1x",)),
    ],
)
def test_secrets_are_set_apart(words: list[str], shown: list[str], hidden: list[str], secrets: tuple[str, ...]) -> None:
    assert apart(words) == (shown, hidden)
    assert secrets_of(words) == secrets


def test_a_server_gets_secrets_by_its_environment(tmp_path: Path) -> None:
    """Neither its command line nor its supervisor's has them, and the end of its log neither."""
    code = "import sys; from slime.processes.server_process import secret_flags as f; print(sys.argv[1:], f(), flush=1)"
    words = ["--ssl-keyfile-password", "s3cret", "--port", "1"]
    server = ServerProcess([sys.executable, "-c", f"{code}; input()", *words], os.environ, tmp_path / "log", held=True)
    server.start()
    try:
        # Its whole line: where Python does not buffer, every word of it is written by itself.
        wait_for(lambda: server.tail().endswith("\n") or server.poll() is not None, "what it prints")
        supervisor = psutil.Process(server.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            assert "s3cret" not in " ".join(process.cmdline())
        assert server.tail() == "['--port', '1'] ['--ssl-keyfile-password', '***']\n"
    finally:
        server.stop()
