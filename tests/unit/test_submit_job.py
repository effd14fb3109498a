"""tools/submit_job.py: what goes wrong between a job and its server, with a stand-in for the server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from slime.entry import job_flags
from slime.entry.job_flags import JOB_VARIABLE, given_words
from slime.utils.errors import BadInputError
from tests import shipped
from tests.forked import forked
from tests.proxy import RecordingProxy
from tools import submit_job

NUM_GPUS = 0
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

VERSION = json.dumps({"version": "4", "ray_version": ray.__version__, "ray_commit": ""})
CUT, SILENT, NO_HTTP = 0, -1, -2
"""In place of a status: the connection is closed without an answer; it stays, without one, until the log has ended; the
answer's text alone is sent."""
Answer = tuple[int, str]
NO_TOKEN, NOT_THE_TOKEN = "Unauthorized: Missing authentication token", "Forbidden: Invalid authentication token"
STRANGE = "an answer that is none of a Ray's job server"
TOKEN_HINT = "give it the token of that Ray, by RAY_AUTH_TOKEN, "


class _JobServer(BaseHTTPRequestHandler):
    """Answers as its server is told: asked for its version, given a job, asked for its log and what became of it."""

    server: _Server

    def do_GET(self) -> None:
        if self.path == "/api/version":
            self._answer(*self.server.version)
        elif self.path.endswith("/logs/tail"):
            self._print_log()
        elif self.path.startswith("/api/packages/"):
            self.server.asked.append(self.path)
            self._answer(404, "Package does not exist")
        else:
            self._answer(*self.server.info)

    def do_POST(self) -> None:
        self.server.given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, text = self.server.taken
        self._answer(status, text.replace("JOB", self.server.given["submission_id"]))

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path in self.server.asked, "Ray would keep it without end"
        self.server.kept[self.path.removeprefix("/api/packages/").replace("/", "://", 1)] = content
        self._answer(*self.server.put)

    def _answer(self, status: int, text: str) -> None:
        if status in (CUT, SILENT):
            self.server.logged.wait(60 if status == SILENT else 0)
            self.close_connection = True
            return
        if status != NO_HTTP:
            self.send_response(status)
            self.end_headers()
        self.wfile.write(text.encode())
        self.close_connection = True

    def _print_log(self) -> None:
        """One WebSocket message, and the end of the connection: closed, or with a ``log_status`` of CUT just gone."""
        if self.server.log_status not in (CUT, 200):
            self._answer(self.server.log_status, "")
            return
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.wfile.write(b"\x81\x05step\n")
        self.server.logged.wait(60)
        if self.server.log_status == 200:
            self.wfile.write(b"\x88\x02\x03\xe8")
            self.rfile.read(8)  # the client's own last word
        self.close_connection = True

    def log_message(self, *words: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    version: Answer = (200, VERSION)
    taken: Answer = (200, '{"job_id": "JOB", "submission_id": "JOB"}')
    put: Answer = (200, "")
    log_status = 200
    info: Answer = (200, '{"type": "SUBMISSION", "entrypoint": "true", "status": "SUCCEEDED"}')
    given: dict[str, object] | None = None

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.kept: dict[str, bytes] = {}
        """Packages, by their URI."""
        self.asked: list[str] = []
        """Of which packages it was asked whether they are there."""
        self.logged = threading.Event()
        """The job's log ends when it is set."""
        self.logged.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _JobServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def environment_of(server: _Server, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return kept | variables | {"RAY_ADDRESS": server.address}


def run(server: _Server, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """What comes of a command line, in a process that is forked; Ray reads RAY_AUTH_MODE as it is imported."""
    environment = environment_of(server, **variables)
    if "RAY_AUTH_MODE" in variables:
        command = [sys.executable, str(shipped.ROOT / "tools/submit_job.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return forked(lambda: submit_job.main(words), environment)


def submit(server: _Server, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What comes of a job."""
    proxy = RecordingProxy()
    ran = run(server, [*flags, "--", "echo", "--a b"], **variables, **proxy.variables)
    assert proxy.close() == [], "what is submitted may hold keys"
    return ran


def refused(server: _Server, status: int = 1, *flags: str, **variables: str) -> str:
    """The one line that is printed, without what all such lines begin with."""
    ran = submit(server, *flags, **variables)
    assert (ran.returncode, ran.stdout) == (status, ""), ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("launch: error: ")
    return line.removeprefix("launch: error: ").removeprefix(f"RAY_ADDRESS={server.address}: ")


def test_a_token_that_is_not_there_is_one_line(server: _Server, tmp_path: Path) -> None:
    line = refused(server, HOME=str(tmp_path), RAY_AUTH_MODE="token")
    expected = "Token authentication is enabled but Ray couldn't find an authentication token"
    assert line.startswith(f"GET /api/version: {expected}: {TOKEN_HINT}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, NO_TOKEN), f"Authentication required: {NO_TOKEN}: {TOKEN_HINT}"),
        ((401, ""), f"Authentication required: {TOKEN_HINT}"),
        ((403, NOT_THE_TOKEN), f"Authentication failed: {NOT_THE_TOKEN}: {TOKEN_HINT}"),
    ],
)
def test_a_server_that_wants_another_token_is_one_line(server: _Server, answer: Answer, expected: str) -> None:
    server.version = answer
    assert refused(server).startswith(f"GET /api/version: {expected}")
    assert server.given is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((500, ""), "500 Server Error: Internal Server Error for url: "),
        ((404, ""), "Version check returned 404. "),
        ((CUT, ""), "Failed to connect to Ray at address: "),
        ((NO_HTTP, "no HTTP"), "Failed to connect to Ray at address: "),
        ((200, "<html>\nhello\n</html>"), "Expecting value: "),
        ((200, '{"version": "0.5"}'), "'ray_version'"),
        ((200, "[]"), "list indices must be integers"),
        ((200, '{"ray_version": "new"}'), "Invalid version: 'new'"),
    ],
)
def test_an_address_of_no_job_server_is_bad_input(server: _Server, answer: Answer, expected: str) -> None:
    server.version = answer
    line = refused(server, 2)
    assert line.startswith(f"GET /api/version: no job server of a Ray answers there ({expected}")
    advice = "): start that Ray with its dashboard, correct the address, or unset it to start a Ray for this run alone"
    assert line.endswith(advice)
    assert server.given is None


@pytest.mark.parametrize(
    ("silent", "deadline", "status", "expected"),
    [
        ("version", "_VERSION_S", 2, "GET /api/version: no job server of a Ray answers there (HTTP"),
        ("taken", "_REQUEST_S", 1, "POST /api/jobs/: HTTP"),
    ],
)
def test_a_silent_server_is_not_waited_for_forever(
    server: _Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    silent: str,
    deadline: str,
    status: int,
    expected: str,
) -> None:
    setattr(server, silent, (SILENT, ""))
    server.logged.clear()
    monkeypatch.setattr(submit_job, deadline, 0.5)
    monkeypatch.setenv("RAY_ADDRESS", server.address)
    with pytest.raises(SystemExit) as ended:
        submit_job.main(["--", "true"])
    server.logged.set()
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert said.startswith(f"launch: error: RAY_ADDRESS={server.address}: {expected}")
    assert "Read timed out. (read timeout=0.5)" in said


def test_the_address_is_that_of_the_launch(server: _Server) -> None:
    server.version = 404, ""
    line = refused(server, 2, RAY_API_SERVER_ADDRESS="http://127.0.0.1:1")
    assert "(Version check returned 404. " in line


def test_the_jobs_id_may_be_its_callers(server: _Server) -> None:
    assert "submitted as job mine;" in submit(server, SLIME_JOB_ID="mine").stderr
    assert (server.given or {})["submission_id"] == "mine"


def test_commands_for_the_job_work_beside_a_preferred_address(server: _Server) -> None:
    ran = submit(server, RAY_API_SERVER_ADDRESS="http://127.0.0.1:1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="x" * 32)
    stop = f"`env -u RAY_API_SERVER_ADDRESS RAY_AUTH_MODE=token ray job stop --address {server.address} raysubmit_"
    assert stop in ran.stderr


@pytest.mark.parametrize("text", ['{"x', "[1]", '{"A": 1}'])
def test_bad_headers_are_bad_input(server: _Server, text: str) -> None:
    assert refused(server, 2, RAY_JOB_HEADERS=text).startswith("RAY_JOB_HEADERS cannot be used: ")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            (500, "No available agent to submit job, please try again later."),
            "Request failed with status code 500: No available agent to submit job, please try again later: its "
            "dashboard agent, the last part",
        ),
        (
            (500, "Traceback (most recent call last):\n  File ...\nOSError: no route to host"),
            "Request failed with status code 500: OSError: no route to host: dashboard.log ",
        ),
        ((500, ""), "Request failed with status code 500: dashboard.log among the logs of that Ray may say more"),
        ((403, NOT_THE_TOKEN), f"Authentication failed: {NOT_THE_TOKEN}: {TOKEN_HINT}"),
    ],
)
def test_a_job_that_is_not_taken_is_one_line(server: _Server, answer: Answer, expected: str) -> None:
    server.taken = answer
    assert refused(server).startswith(f"POST /api/jobs/: {expected}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((CUT, ""), "('Connection aborted.', "),
        ((200, "taken"), f"{STRANGE} (Expecting value: "),
        ((200, "[]"), f"{STRANGE} ("),
        ((200, "{}"), f"{STRANGE} ("),
        ((200, '{"x": 1}'), f"{STRANGE} ("),
    ],
)
def test_an_answer_may_leave_open_whether_the_job_was_taken(server: _Server, answer: Answer, expected: str) -> None:
    server.taken = answer
    line = refused(server)
    assert server.given is not None
    job = server.given["submission_id"]
    assert line.startswith(f"POST /api/jobs/: {expected}")
    expected = f": whether the job was taken after all, `ray job status --address {server.address} {job}` says"
    assert line.endswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x', "Unterminated string starting at: line 1 column 2 (char 1)"),
        ("[1]", "it is not a JSON object"),
        ('{"env_vars": {"A": 1}}', "runtime_env['env_vars'] "),
        ('{"working_dir": "/nowhere"}', "/nowhere is not a valid path"),
    ],
)
def test_a_bad_runtime_environment_is_bad_input(server: _Server, text: str, expected: str) -> None:
    line = refused(server, 2, "--runtime-env-json", text)
    assert line.startswith(f"RUNTIME_ENV_JSON cannot be used: {expected}")
    assert server.given is None


def test_a_runtime_environment_that_cannot_be_sent_is_bad_input(server: _Server, tmp_path: Path) -> None:
    text = json.dumps({"py_modules": [str(tmp_path / "nowhere")]})
    assert refused(server, 2, "--runtime-env-json", text).startswith("RUNTIME_ENV_JSON cannot be used: ")
    assert server.given is None


@pytest.mark.parametrize(
    ("log_status", "info", "mode", "why"),
    [
        (CUT, _Server.info, "", "WebSocket connection closed unexpectedly with close code 1006"),
        (500, _Server.info, "token", "500, message="),
        (200, (CUT, ""), "", "('Connection aborted.', "),
        (200, (500, ""), "", "Request failed with status code 500"),
        (200, (200, "[]"), "", "ray.dashboard"),
        (200, (200, _Server.info[1].replace("SUCCEEDED", "RUNNING")), "", "it ended while the job is RUNNING"),
    ],
)
def test_a_lost_log_is_not_a_lost_job(server: _Server, log_status: int, info: Answer, mode: str, why: str) -> None:
    server.log_status, server.info = log_status, info
    ran = submit(server, **({"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "x" * 32} if mode else {}))
    assert server.given is not None
    job = server.given["submission_id"]
    assert (ran.returncode, ran.stdout) == (1, "" if log_status == 500 else "step\n")
    _, line = ran.stderr.splitlines()
    assert line.startswith(f"launch: error: RAY_ADDRESS={server.address}: the log of job {job} is lost ({why}")
    assert "), the job was taken and may still run: " in line
    ray_job = "`RAY_AUTH_MODE=token ray job" if mode else "`ray job"
    for verb in ("status", "logs --follow", "stop"):
        assert f"{ray_job} {verb} --address {server.address} {job}` " in line


@pytest.mark.parametrize("words", [["--wandb-key", "s3cret"], ["--wandb-key=s3cret"]])
@pytest.mark.parametrize("variables", [{"A": "1"}, None])
def test_a_key_is_no_part_of_a_job(server: _Server, words: list[str], variables: dict[str, str] | None) -> None:
    runtime_env = json.dumps({"env_vars": variables})
    ran = run(server, ["--runtime-env-json", runtime_env, "--", "train.py", "--use-wandb", *words, "--lr", "1"])
    given = server.given or {}
    (place,) = server.kept
    assert given["entrypoint"] == "train.py --use-wandb --lr 1"
    assert given["runtime_env"] == {"env_vars": {**(variables or {}), JOB_VARIABLE: place}}
    assert ran.stderr.startswith("launch: --wandb-key: kept by this Ray for the job's train.py alone")
    assert "s3cret" not in ran.stderr + ran.stdout


def test_no_secret_is_part_of_a_job_nor_stays_in_its_submitters_command_line(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray shows a job's command line and its environment; train.py takes the secrets from Ray's store, once."""
    server.logged.clear()
    secret = ["--judge-api-key", "s3cret", "--sglang-ssl-keyfile-password=s3cret"]
    secret += ["--train-env-vars", '{"A": "s3cret"}', "--wandb-key", "s3cret"]
    words = ["--rm-url", "http://me:s3cret@judge/score", "-h", "--lr", "1", "--wandb-key=s3cret"]
    command = [sys.executable, str(shipped.ROOT / "tools/submit_job.py"), "--runtime-env-json"]
    command += ['{"env_vars": {"A": "1"}}', "--", "env", "--chdir=/x", "train.py", *secret, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment_of(server)
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        assert "s3cret" not in " ".join(psutil.Process(process.pid).cmdline())
        server.logged.set()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        server.logged.set()
    assert "s3cret" not in said
    flags = "--judge-api-key --sglang-ssl-keyfile-password --train-env-vars --wandb-key --rm-url"
    assert said.startswith(f"launch: {flags}: kept by this Ray for the job's train.py alone")
    given: Any = server.given
    assert "s3cret" not in json.dumps(given)
    assert given["entrypoint"] == "env --chdir=/x train.py -h --lr 1"
    variables = given["runtime_env"]["env_vars"]
    assert variables["A"] == "1"
    (content,) = server.kept.values()
    assert b"s3cret" not in content[:15], "which Ray logs where it cannot keep it"

    monkeypatch.setattr(job_flags, "_take", lambda place: server.kept.pop(place, None))
    monkeypatch.setenv(JOB_VARIABLE, variables[JOB_VARIABLE])
    monkeypatch.setattr(sys, "argv", shlex.split(given["entrypoint"])[2:])
    assert given_words() == ["-h", "--lr", "1", *secret, *words[:2], words[-1]]
    assert JOB_VARIABLE not in os.environ
    assert given_words() == ["-h", "--lr", "1"]
    monkeypatch.setenv(JOB_VARIABLE, variables[JOB_VARIABLE])
    with pytest.raises(BadInputError, match=r"this Ray has the job's secret flags no more; .*: submit the job again"):
        given_words()


@pytest.mark.parametrize(
    ("words", "variables", "is_taken"),
    [
        (["--use-wandb"], {}, True),
        ([], {}, False),
        (["--use-wandb"], {"WANDB_API_KEY": "other"}, False),
    ],
)
def test_a_key_of_the_environment_goes_with_a_job_that_uses_it(
    server: _Server, words: list[str], variables: dict[str, str], is_taken: bool
) -> None:
    runtime = {"WANDB_API_KEY": "s3cret", "RUNTIME_ENV_JSON": json.dumps({"env_vars": variables})}
    assert run(server, ["--", "train.py", *words], **runtime).returncode == 0
    assert "s3cret" not in json.dumps(server.given)
    assert [json.loads(kept)[1:] for kept in server.kept.values()] == [["--wandb-key", "s3cret"]] * is_taken


def test_secrets_that_a_ray_does_not_keep_are_one_line_and_no_job(server: _Server) -> None:
    server.put = 500, "Traceback\nRuntimeError: Failed to store package in the GCS."
    ran = run(server, ["--", "train.py", "--wandb-key", "s3cret"])
    assert (ran.returncode, ran.stdout, server.given) == (1, "", None)
    (line,) = ran.stderr.splitlines()
    assert ": PUT /api/packages/gcs/slime_" in line
    assert "RuntimeError: Failed to store package in the GCS: dashboard.log among the logs of that Ray" in line


def test_secrets_in_the_runtime_environment_are_warned_of(server: _Server) -> None:
    ran = submit(server, RUNTIME_ENV_JSON='{"env_vars": {"HF_TOKEN": "s3cret", "A": "1", "WANDB_API_KEY": "s3cret"}}')
    assert ran.returncode == 0
    line = ran.stderr.splitlines()[0]
    assert line.startswith("launch: warning: RUNTIME_ENV_JSON: env_vars HF_TOKEN WANDB_API_KEY: Ray shows a job's ")
    assert "s3cret" not in ran.stderr


def test_the_runtime_environment_need_not_be_a_word(server: _Server) -> None:
    assert submit(server, RUNTIME_ENV_JSON='{"env_vars": {"A": "1"}}').returncode == 0
    assert (server.given or {})["runtime_env"] == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [("SUCCEEDED", "Job", 0), ("FAILED", "exit code 3, last available logs (x):\nlog", 1), ("STOPPED", None, 1)],
)
def test_a_job_ends_as_its_server_says(server: _Server, status: str, message: str | None, expected: int) -> None:
    server.info = 200, json.dumps({**json.loads(_Server.info[1]), "status": status, "message": message})
    ran = submit(server, "--runtime-env-json", '{"env_vars": {"A": "1"}}')
    assert (ran.returncode, ran.stdout) == (expected, "step\n")
    given = server.given or {}
    assert (given["entrypoint"], given["runtime_env"]) == ("echo '--a b'", {"env_vars": {"A": "1"}})
    submitted, ended = ran.stderr.splitlines()
    job = given["submission_id"]
    assert submitted == f"launch: submitted as job {job}; `ray job stop --address {server.address} {job}` stops it"
    assert ended == f"launch: job {job} {status.lower()}" + (f": {message.partition(',')[0]}" if message else "")
    assert "\x1b" not in ran.stdout + ran.stderr


def follow(server: _Server, monkeypatch: pytest.MonkeyPatch, status: str) -> int | str | None:
    """The exit status where a log stays silent after its first line, and the job is ``status``."""
    server.logged.clear()
    server.info = 200, _Server.info[1].replace("SUCCEEDED", status)
    monkeypatch.setattr(submit_job, "_LOG_S", 0.5)
    monkeypatch.setattr(submit_job, "_REQUEST_S", 5)
    monkeypatch.setenv("RAY_ADDRESS", server.address)
    with pytest.raises(SystemExit) as ended:
        submit_job.main(["--", "true"])
    return ended.value.code


def test_a_silent_log_of_a_job_that_has_ended_is_not_waited_for(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(server, monkeypatch, "SUCCEEDED") == 0
    said = capsys.readouterr()
    assert said.out == "step\n"
    assert said.err.endswith(" succeeded\n")


def test_a_server_that_has_gone_while_a_log_is_silent_is_one_line(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(3, setattr, (server, "info", (CUT, ""))).start()
    assert follow(server, monkeypatch, "RUNNING") == 1
    said = capsys.readouterr()
    assert said.out == "step\n"
    assert "is lost (('Connection aborted.', " in said.err


def test_an_interrupt_leaves_the_job_and_says_so(server: _Server) -> None:
    server.logged.clear()
    process = subprocess.Popen(
        [sys.executable, str(shipped.ROOT / "tools/submit_job.py"), "--", "echo", "--a b"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(server),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        server.logged.set()
    job = (server.given or {})["submission_id"]
    stop = f"`ray job stop --address {server.address} {job}` stops it"
    assert said.splitlines()[1:] == [f"launch: error: interrupted: job {job} goes on; {stop}"]
    assert process.returncode == 130
