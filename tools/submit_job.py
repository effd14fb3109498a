"""Submit a job to the Ray whose job server RAY_ADDRESS names, and follow its log; scripts/launch.sh calls this.

RAY_ADDRESS=http://10.0.0.1:8265 python tools/submit_job.py -- python3 train.py ...

As `ray job submit` does, but whatever goes wrong is one line: what was asked, what came of it, what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation
from slime.entry.job_flags import JOB_VARIABLE, package
from slime.utils.command_line import apart, strike_secrets
from slime.utils.environment import bypass_proxies
from slime.utils.redaction import is_flag, is_secret

check_installation()

import aiohttp  # noqa: E402
import requests  # noqa: E402
from ray.dashboard.modules.job.common import JobSubmitResponse  # noqa: E402
from ray.exceptions import AuthenticationError, RayError  # noqa: E402
from ray.job_submission import JobStatus, JobSubmissionClient  # noqa: E402
from ray.runtime_env import RuntimeEnv  # noqa: E402


class _StrangeAnswerError(Exception):
    """An answer with which Ray's client would fail as with bad input."""


_FAILURES = (
    *(RayError, requests.RequestException, aiohttp.ClientError, ConnectionError, RuntimeError),
    _StrangeAnswerError,
)
"""What the client raises for answers that it cannot use, and where there is none."""
_VERSION_S, _REQUEST_S = 10, 60
"""Seconds that a server may be silent; it looks for the agent that takes a job for 10 s itself."""
_LOG_S = 60
"""Seconds without a line of the log after which the job's status is asked."""
_PREFERRED = "RAY_API_SERVER_ADDRESS"
"""The variable that Ray's client and its commands prefer to every other address that they are given."""
_KEY, _KEY_FLAG = "WANDB_API_KEY", "--wandb-key"
_TOKEN = (
    "give it the token of that Ray, by RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, and "
    "RAY_AUTH_MODE=token (which launch sets where there is one)"
)
_AGENT = (
    "its dashboard agent, the last part of a Ray to start, is not there yet, or could not start; dashboard_agent.log "
    "among its logs says why, and where a port is taken `ray start --head --dashboard-agent-listen-port PORT` helps"
)


def main(argv: list[str] | None = None) -> None:
    """Ends the process: status 0 where the job succeeded, 2 for bad input, 1 for everything else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runtime-env-json",
        default=os.environ.get("RUNTIME_ENV_JSON") or "{}",
        help="the job's runtime environment, a JSON object; default: RUNTIME_ENV_JSON",
    )
    parser.add_argument("command", nargs="+", help="what the job runs")
    args = parser.parse_args(argv)
    strike_secrets()
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it tells of every end of a log
    if not _address():
        parser.error("RAY_ADDRESS, the address of a job server, is missing")
    runtime_env = _object("RUNTIME_ENV_JSON", args.runtime_env_json)
    with _bad_input("RUNTIME_ENV_JSON"):
        RuntimeEnv(**runtime_env)  # checks it
    _warn_of_shown(runtime_env)
    bypass_proxies([urlsplit(_address()).hostname or ""])  # what is submitted may hold keys
    client = _connect()
    command, hidden = apart(_with_key(args.command, runtime_env))
    if hidden:
        runtime_env = _leave(client, hidden, runtime_env)
    # Our own id, or our caller's, so that it is known where the answer is lost.
    job = os.environ.get("SLIME_JOB_ID") or f"raysubmit_{secrets.token_hex(8)}"
    taken = f"whether the job was taken after all, {_ray_job('status', job)} says"
    with _bad_input("RUNTIME_ENV_JSON"), _told("POST /api/jobs/", taken):
        client.submit_job(entrypoint=shlex.join(command), submission_id=job, runtime_env=runtime_env)
    print(f"launch: submitted as job {job}; {_ray_job('stop', job)} stops it", file=sys.stderr, flush=True)
    try:
        sys.exit(_follow(client, job))
    except KeyboardInterrupt:
        _fail(f"interrupted: job {job} goes on; {_ray_job('stop', job)} stops it", 130)


class _Client(JobSubmissionClient):
    """Ray's client with a deadline for its requests, of which it has none; made, it has asked for the version.

    The stream of a job's log is no such request: see `_print_log`.
    """

    def put(self, path: str, content: bytes) -> None:
        """Have the server keep something new for 10 minutes.

        Raises:
            RuntimeError: it does not.
        """
        # Ray forgets in time only what it was asked for.
        for method, data, expected in (("GET", None, 404), ("PUT", content, 200)):
            answer = self._do_request(method, path, data=data)
            if answer.status_code != expected:
                self._raise_error(answer)

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = _VERSION_S if endpoint == "/api/version" else _REQUEST_S
        answer = super()._do_request(method, endpoint, **kwargs)
        if endpoint == "/api/jobs/" and answer.status_code == 200:
            try:
                JobSubmitResponse(**answer.json())
            except (TypeError, ValueError) as error:
                raise _StrangeAnswerError(f"an answer that is none of a Ray's job server ({error})") from error
        return answer


def _with_key(command: list[str], runtime_env: dict[str, Any]) -> list[str]:
    """With W&B's key, where only the environment here has it, of which a job inherits nothing."""
    key = os.environ.get(_KEY)
    given = _KEY in _variables(runtime_env) or any(word.partition("=")[0] == _KEY_FLAG for word in command)
    return [*command, _KEY_FLAG, key] if key and "--use-wandb" in command and not given else command


def _leave(client: _Client, hidden: list[str], runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Leave flags that are, or hold, secrets with the Ray that runs the job; an environment in which train.py finds
    them."""
    place, path, content = package(hidden)
    with _told(f"PUT {path}", "no job was submitted"):
        client.put(path, content)
    flags = dict.fromkeys(word.partition("=")[0] for word in hidden if is_flag(word))
    print(
        f"launch: {' '.join(flags)}: kept by this Ray for the job's train.py alone, which takes them ({JOB_VARIABLE}), "
        "for 10 minutes at most",
        file=sys.stderr,
    )
    return {**runtime_env, "env_vars": {**_variables(runtime_env), JOB_VARIABLE: place}}


def _warn_of_shown(runtime_env: dict[str, Any]) -> None:
    """Of secrets in the job's environment, which every process of the job has."""
    if shown := [name for name, value in _variables(runtime_env).items() if is_secret(name, value)]:
        print(
            f"launch: warning: RUNTIME_ENV_JSON: env_vars {' '.join(shown)}: Ray shows a job's environment in "
            "`ray job list`, its logs, and ps where a worker starts: set them where `ray start` runs instead",
            file=sys.stderr,
        )


def _variables(runtime_env: dict[str, Any]) -> dict[str, Any]:
    return runtime_env.get("env_vars") or {}  # null is none


def _object(name: str, text: str) -> dict[str, Any]:
    with _bad_input(name):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        return value


@contextmanager
def _bad_input(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        _fail(f"{name} cannot be used: {' '.join(str(error).split())}", 2)


def _connect() -> _Client:
    """A client of the job server at RAY_ADDRESS, which has told its version."""
    headers = _object("RAY_JOB_HEADERS", os.environ.get("RAY_JOB_HEADERS") or "{}")
    preferred = os.environ.pop(_PREFERRED, "")
    asked = f"RAY_ADDRESS={_address()}: GET /api/version"
    try:
        return _Client(headers=headers)
    except AuthenticationError as error:
        _fail(f"{asked}: {_line(error)}: {_TOKEN}", 1)
    except requests.exceptions.InvalidHeader as error:
        _fail(f"RAY_JOB_HEADERS cannot be used: {_line(error)}", 2)
    except (*_FAILURES, KeyError, TypeError, ValueError) as error:  # the last three: an answer of something else
        _fail(
            f"{asked}: no job server of a Ray answers there ({_line(error)}): start that Ray with its dashboard, "
            "correct the address, or unset it to start a Ray for this run alone",
            2,
        )
    finally:
        if preferred:
            os.environ[_PREFERRED] = preferred  # for `_ray_job`


@contextmanager
def _told(asked: str, advice: str) -> Iterator[None]:
    """Turn what the client raises into one line, which ends with ``advice`` unless better is known."""
    try:
        yield
    except _FAILURES as error:
        why = _line(error)
        if isinstance(error, AuthenticationError):
            advice = _TOKEN
        elif isinstance(error, RuntimeError):  # an answer, which says no
            advice = _AGENT if "No available agent" in why else "dashboard.log among the logs of that Ray may say more"
        _fail(f"RAY_ADDRESS={_address()}: {asked}: {why}: {advice}", 1)


def _line(error: Exception) -> str:
    """What an exception says; of a traceback of the server's, and of Ray's page on tokens, the line that matters."""
    if isinstance(error, AuthenticationError):
        return error.message.splitlines()[0].partition(". ")[0].rstrip(": ")
    lines = str(error).strip(". :\n").splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0].partition(': ')[0]}: {lines[-1].strip()}"


def _follow(client: JobSubmissionClient, job: str) -> int:
    """Print the job's log until the job has ended, and return our exit status."""
    try:
        asyncio.run(_print_log(client, job))
        info = client.get_job_info(job)
    except (*_FAILURES, TypeError, ValueError) as error:  # the last two: an answer of something else
        _lose(job, _line(error))
    if not info.status.is_terminal():
        _lose(job, f"it ended while the job is {info.status}")
    # After the reason come the last lines of the log, again.
    why = f": {info.message.splitlines()[0].partition(', last available logs')[0]}" if info.message else ""
    print(f"launch: job {job} {info.status.lower()}{why}", file=sys.stderr)
    return 0 if info.status == JobStatus.SUCCEEDED else 1


async def _print_log(client: JobSubmissionClient, job: str) -> None:
    """Where no line comes the server must still answer: a connection may be lost without a word."""
    log, has_ended = client.tail_job_logs(job), False
    while True:
        coming = asyncio.ensure_future(anext(log, None))
        while not (await asyncio.wait([coming], timeout=_LOG_S))[0]:
            if has_ended:  # for so long that its last lines would have come
                return
            has_ended = client.get_job_status(job).is_terminal()
        lines = coming.result()
        if lines is None:
            return
        print(lines, end="", flush=True)


def _lose(job: str, why: str) -> NoReturn:
    _fail(
        f"RAY_ADDRESS={_address()}: the log of job {job} is lost ({why}), the job was taken and may still run: "
        f"{_ray_job('status', job)} says, {_ray_job('logs --follow', job)} goes on with its log, "
        f"{_ray_job('stop', job)} stops it",
        1,
    )


def _ray_job(verb: str, job: str) -> str:
    """A command that works in the user's shell, where launch.sh's variables are not."""
    alone = f"env -u {_PREFERRED} " if os.environ.get(_PREFERRED) else ""
    token = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return f"`{alone}{token}ray job {verb} --address {_address()} {job}`"


def _address() -> str:
    return os.environ.get("RAY_ADDRESS", "")


def _fail(message: str, status: int) -> NoReturn:
    print(f"launch: error: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
