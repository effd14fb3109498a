"""Runs a script of scripts/ with what stands in for python3, and writes down what it would have run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import shipped

SCRIPTS = shipped.ROOT / "scripts"
RECORDER = f"""#!{sys.executable} -S
import os, signal, sys, time
words = sys.argv[1:]
if words[0] == "-c" and words[1].endswith("show()"):
    os.execv(sys.executable, [sys.executable, *words])
with open(os.environ["RECORD"], "a") as record:
    record.write("\\0".join(words) + "\\n")
if "RECORD_WHERE" in os.environ:
    open(os.environ["RECORD_WHERE"], "w").write(os.getcwd())
if os.environ.get("RECORDER_FAILS") == words[-1]:
    sys.exit(3)
if "start" in words:
    if "--head" in words:
        import socket
        server = socket.create_server(("127.0.0.1", int(words[words.index("--port") + 1])))
    time.sleep(300)
if os.environ.get("RECORDER_WAITS") and "wait_for_nodes.py" in words[0]:
    time.sleep(300)
if os.environ.get("RECORDER_TRAINS") and "train.py" in words[0]:
    if os.environ["RECORDER_TRAINS"] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.environ["RECORD"] + ".deaf", "w").close()
    time.sleep(300)
"""
"""In place of python3: writes down its arguments, and as `ray start` stays, with a port that answers."""


def write_recorder(directory: Path) -> None:
    """Write the file ``python`` that `run` takes from the directory."""
    (directory / "python").write_text(RECORDER)
    (directory / "python").chmod(0o755)


def run(
    script: str, files: Path, record: Path, *words: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run a script with the recorder as its python; every command that it would have run."""
    kept = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(record)}
    ran = subprocess.run(
        ["bash", str(SCRIPTS / script), *words], capture_output=True, text=True, timeout=300, env=kept | variables
    )
    return ran, recorded(record)


def recorded(record: Path) -> list[list[str]]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [line.split("\0") for line in lines if not line.startswith("-c\0")]  # without the look at the installation
