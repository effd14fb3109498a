"""What tests and launch scripts in Python are written with, as ``U``: downloads, conversions, `execute_train`.

    import slime.utils.external_utils.command_utils as U

Importing it imports neither torch nor Ray. docs/launch.md has an example.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.processes.signals import signals_as_exceptions
from slime.utils.environment import as_environment
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.errors import CommandError as CommandError
from slime.utils.external_utils import downloads, jobs, own_ray
from slime.utils.external_utils.conversions import convert_checkpoint as convert_checkpoint
from slime.utils.external_utils.conversions import fp8_cast_bf16 as fp8_cast_bf16
from slime.utils.external_utils.conversions import model_script
from slime.utils.external_utils.downloads import datasets_dir, models_dir
from slime.utils.external_utils.jobs import JobError as JobError
from slime.utils.external_utils.own_ray import Ray
from slime.utils.external_utils.typer_utils import dataclass_cli as dataclass_cli
from slime.utils.misc import exec_command
from slime.utils.redaction import redacted_command

repo_base_dir = own_ray.REPOSITORY
NUM_GPUS_OF_HARDWARE = {"H100": 8, "H200": 8, "GB200": 4, "GB300": 4}
"""GPUs of one node."""
GENERATION_HARDWARE = {"H100": "Hopper", "H200": "Hopper", "GB200": "Blackwell", "GB300": "Blackwell"}
_CORE_DUMPS = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    "CUDA_COREDUMP_GENERATION_FLAGS": (
        "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
    ),
    "CUDA_COREDUMP_FILE": "/tmp/cuda_coredump_%h.%p.%t",
}


@dataclass
class ExecuteTrainConfig:
    """How a run is started; scripts extend it by options of their own."""

    cuda_core_dump: bool = False
    """Have a GPU's exception leave a core dump in /tmp."""
    num_nodes: int = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    extra_env_vars: str = ""
    """For the job: ``A=1 B=2``, or a JSON object."""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, Any] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> str | None:
    """Start a Ray, submit ``train_script`` to it as a job, print the job's log, wait for its end, and end the Ray.

    It has ports and a directory of its own, so that several runs may be on one host. What was started here is ended, by
    process id, also at an exception, Ctrl-C and SIGTERM, and when this process is killed; nothing else is. The job's
    environment is this process's, and with it its secrets, such as WANDB_API_KEY; on a Ray that runs already the job
    gets that key alone, where ``--use-wandb`` is given.

    Args:
        train_args: flags of ``train_script``, as in a shell; line breaks are blanks.
        num_gpus_per_node: slots of each node: GPUs, or CPUs on a host without.
        megatron_model_type: NAME of scripts/models/NAME.sh, whose ``MODEL_ARGS`` go before; None for none of them.
        train_script: a program of the checkout, or a path.
        before_ray_job_submit: called when the Ray runs.
        extra_env_vars: further variables for the job; those of ``config`` win.

    Returns:
        The job's status, SUCCEEDED. None where there was no job: by DRY_RUN=1, by SLIME_SCRIPT_ENABLE_RAY_SUBMIT=0, and
        on further nodes of a run on several; the last two return when the Ray has ended.

    Raises:
        JobError: the job did not succeed.
        BadInputError: no such script, a port that is asked for is taken, or RAY_ADDRESS is not a job server's.
        SlimeError: Ray did not start, or a dry run found a fault.
    """
    config = config or ExecuteTrainConfig()
    program = _program(train_args, megatron_model_type, train_script)
    variables = {**as_environment(extra_env_vars), **_parse_variables(config.extra_env_vars)}
    variables |= _CORE_DUMPS if config.cuda_core_dump else {}
    own = {"PYTHON": sys.executable}
    with signals_as_exceptions():
        if os.environ.get("DRY_RUN", "0") != "0":
            status, said = jobs.run_program(program, own | variables)
            if status:
                raise SlimeError(f"a dry run ended with status {status}: {said}")
            return None
        running = _running_ray()
        node = own_ray.this_node(1 if running else config.num_nodes)
        if node.rank > 0:
            own_ray.join_head(num_gpus_per_node, node)
            return None
        with contextlib.nullcontext(running) if running else own_ray.own_ray(num_gpus_per_node, node) as ray:
            variables = own | _runtime_env(variables)
            if before_ray_job_submit is not None:
                before_ray_job_submit()
            launch = redacted_command(program.splitlines()[-1])
            if not get_bool_env_var("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "1"):
                print(f"execute_train: not submitted to {ray.address}, which stays until Ctrl-C: {launch}", flush=True)
                ray.wait()
                return None
            print(f"EXEC: {launch}", flush=True)
            return jobs.run_job(program, ray, variables)


def _program(train_args: str, model_type: str | None, train_script: str) -> str:
    """For bash: what `scripts/launch.sh` is asked to launch is its last line."""
    lines = [f"source {shlex.quote(str(own_ray.LAUNCH))}"]
    if model_type is not None:
        lines.append(f"source {shlex.quote(str(model_script(model_type)))}")
    in_checkout = (repo_base_dir / train_script).is_file()
    if not (in_checkout or Path(train_script).is_file()):
        raise BadInputError(f"train_script {train_script}: there is no such file in {repo_base_dir} or {Path.cwd()}")
    script = train_script if in_checkout else os.path.abspath(train_script)
    shape = "" if model_type is None else ' "${MODEL_ARGS[@]}"'
    lines.append(f"launch {shlex.quote(script)}{shape} {' '.join(train_args.split(chr(10)))}")
    return "\n".join(lines) + "\n"


def _running_ray() -> Ray | None:
    """The Ray that SLIME_SCRIPT_EXTERNAL_RAY or RAY_ADDRESS says to use; None where a run starts its own."""
    address = os.environ.get("RAY_ADDRESS")
    if not (address or get_bool_env_var(own_ray.EXTERNAL)):
        return None
    usual = f"http://{os.environ.get('MASTER_ADDR') or '127.0.0.1'}:{own_ray.JOB_SERVER_PORT}"
    if address and not address.startswith(("http://", "https://")):
        raise BadInputError(
            f"RAY_ADDRESS={address}: execute_train submits a job, and needs the URL of a job server, such as {usual}; "
            "unset it to start a Ray for this run alone"
        )
    return Ray(address or usual)


def _runtime_env(variables: Mapping[str, str]) -> dict[str, str]:
    """RUNTIME_ENV_JSON with further variables for the job: by environment, as ps shows command lines."""
    try:
        known = {"env_vars": {}, **json.loads(os.environ.get("RUNTIME_ENV_JSON") or "{}")}
        return {"RUNTIME_ENV_JSON": json.dumps({**known, "env_vars": {**known["env_vars"], **variables}})}
    except (TypeError, ValueError) as error:
        raise BadInputError(f"RUNTIME_ENV_JSON cannot be used: {error}") from error


def _parse_variables(text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            return as_environment(json.loads(text))
        except ValueError as error:
            raise BadInputError(f"extra_env_vars is not a JSON object: {error}") from error
    words = shlex.split(text)
    if wrong := [word for word in words if "=" not in word]:
        raise BadInputError(f"extra_env_vars: {wrong[0]!r} is not NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def download_model(full_name: str, source: str = "hf") -> str:
    """Have ``ORG/NAME`` of a hub, ``hf`` or ``modelscope``, in `models_dir`, where it may be already; the directory.
    SlimeError where it is not there, and could not be downloaded."""
    return downloads.download("model", full_name, models_dir(), source)


def hf_download_dataset(full_name: str, source: str = "hf") -> str:
    """As `download_model`, of a data set and in `datasets_dir`."""
    return downloads.download("dataset", full_name, datasets_dir(), source)


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Copy what is in one directory into another; CommandError if that fails."""
    source, target = (os.path.expanduser(path).rstrip("/") for path in (path_src, path_dst))
    exec_command(f"{shlex.join(['mkdir', '-p', target])} && {shlex.join(['rsync', '-a', f'{source}/', target])}")


def check_has_nvlink() -> bool:
    """Whether GPUs of this host are joined by NVLink."""
    said = exec_command("nvidia-smi topo -m 2>/dev/null | grep -c 'NV[0-9]' || true", capture_output=True)
    return int(said or 0) > 0


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Flags that record a run with W&B, in a project named for the file; empty where WANDB_API_KEY is not set. The key
    is none of them: the run has it by its environment."""
    if not os.environ.get("WANDB_API_KEY"):
        print("no W&B: WANDB_API_KEY is not set", flush=True)
        return ""
    file = Path(test_file)
    name = file.stem if len(file.stem) >= 6 else f"{file.absolute().parent.name}_{file.stem}"
    parts = (run_name_prefix, run_id or create_run_id(), os.environ.get("GITHUB_COMMIT_NAME"))
    group = "_".join(part for part in parts if part)
    words = ["--use-wandb", "--wandb-project", f"slime-{name}", "--wandb-group", group]
    return f"{shlex.join(words)} --disable-wandb-random-suffix "


def create_run_id() -> str:
    """A name for a run: the time, in UTC, and three digits by chance."""
    return f"{datetime.datetime.now(datetime.UTC):%y%m%d-%H%M%S}-{random.Random().randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """A variable that is true or 1, false or 0; an empty one is as one that is not set, all else a BadInputError."""
    value = (os.environ.get(name) or default).lower()
    if value not in ("true", "1", "false", "0"):
        raise BadInputError(f"{name}={os.environ.get(name)} must be one of true, 1, false, 0")
    return value in ("true", "1")


def get_env_enable_infinite_run() -> bool:
    """Whether a test is to go on without end: SLIME_TEST_ENABLE_INFINITE_RUN."""
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    """The path of a new file ``*.EXT`` that holds ``text``; nobody removes it."""
    with tempfile.NamedTemporaryFile("w", prefix="slime_", suffix=f".{ext.lstrip('.')}", delete=False) as file:
        file.write(text)
    print(f"wrote {file.name}", flush=True)
    return file.name
