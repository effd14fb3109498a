"""What others can read of a process's command line."""

from __future__ import annotations

import subprocess
import sys

import psutil

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
    given += ["--label-key", "答案"]
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
    assert shown == [*expected, "*" * 6, "", "*" * 6, *given[13:]]
