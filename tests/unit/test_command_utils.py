"""What tests and scripts in Python are written with (`U`), with stand-ins for hubs, shells' `launch` and Ray."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import slime.utils.external_utils.command_utils as U
from slime.entry.arguments import check_flags
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.external_utils import downloads, jobs, own_ray
from slime.utils.redaction import redacted_command
from tests.documents import example
from tests.waiting import wait_for

NUM_GPUS = 0

PYTHON = sys.executable
SIGNATURES = {
    "exec_command": ("cmd", "capture_output"),
    "convert_checkpoint": (
        *("model_name", "megatron_model_type", "num_gpus_per_node", "multinode", "extra_args", "dir_dst"),
        "hf_checkpoint",
    ),
    "rsync_simple": ("path_src", "path_dst"),
    "hf_download_dataset": ("full_name", "source"),
    "download_model": ("full_name", "source"),
    "fp8_cast_bf16": ("path_src", "path_dst"),
    "execute_train": (
        *("train_args", "num_gpus_per_node", "megatron_model_type", "train_script", "before_ray_job_submit"),
        *("extra_env_vars", "config"),
    ),
    "ExecuteTrainConfig": ("cuda_core_dump", "num_nodes", "extra_env_vars"),
    "check_has_nvlink": (),
    "get_default_wandb_args": ("test_file", "run_name_prefix", "run_id"),
    "create_run_id": (),
    "get_bool_env_var": ("name", "default"),
    "get_env_enable_infinite_run": (),
    "save_to_temp_file": ("text", "ext"),
    "dataclass_cli": ("func", "env_var_prefix"),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the host's own switches."""
    for name in os.environ:
        if name.startswith(("SLIME_", "SLURM_", "RAY_", "WANDB_", "MASTER_", "NODE_", "RUNTIME_ENV", "DRY_RUN")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLIME_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SLIME_DATASETS_DIR", str(tmp_path / "datasets"))


def test_names_and_parameters_are_those_that_test_files_use() -> None:
    for name, parameters in SIGNATURES.items():
        assert tuple(inspect.signature(getattr(U, name)).parameters) == parameters, name
    assert U.NUM_GPUS_OF_HARDWARE["H100"] == 8
    assert U.GENERATION_HARDWARE.keys() == U.NUM_GPUS_OF_HARDWARE.keys()
    assert (U.repo_base_dir / "train.py").is_file()


def test_importing_it_imports_nothing_that_takes_long() -> None:
    code = "import sys, slime.utils.external_utils.command_utils; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=U.repo_base_dir)
    assert {"torch", "ray", "aiohttp", "numpy", "transformers", "typer"}.isdisjoint(ran.stdout.split())


# exec_command


def test_a_command_is_printed_and_its_output_returned(capfd: pytest.CaptureFixture[str]) -> None:
    assert U.exec_command("x=1; echo $x", capture_output=True) == "1\n"
    assert U.exec_command("echo shown") is None
    assert capfd.readouterr().out == "EXEC: x=1; echo $x\nEXEC: echo shown\nshown\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no >&2; exit 3", "a command ended with status 3 (no): echo no >&2; exit 3"),
        ("kill -9 $$", "a command ended with signal 9: kill -9 $$"),
        ("WANDB_API_KEY=s3cret false", "a command ended with status 1: WANDB_API_KEY=<redacted> false"),
    ],
)
def test_a_command_that_fails_is_one_line(command: str, said: str) -> None:
    with pytest.raises(U.CommandError) as error:
        U.exec_command(command, capture_output=True)
    assert str(error.value) == said
    assert isinstance(error.value, subprocess.CalledProcessError)
    assert "s3cret" not in repr(vars(error.value))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("cd x &&  ls 'a b'", "cd x &&  ls 'a b'"),
        ("export WANDB_API_KEY=s3cret && x --lr 1", "export WANDB_API_KEY=<redacted> && x --lr 1"),
        ("x --wandb-key s3cret --lr 1", "x --wandb-key <redacted> --lr 1"),
        ("x --wandb-key='s3 cret'", "x --wandb-key=<redacted>"),
        ("bash -c 'cd a; x --wandb-key s3cret'", "bash -c cd a; x --wandb-key <redacted>"),
        ("X='y --wandb-key s3cret' z", "X=y --wandb-key <redacted> z"),
        ('curl -H "Authorization: Bearer s3cret" u', "curl -H Authorization: <redacted> u"),
        ('x --train-env-vars \'{"A": "s3cret"}\'', 'x --train-env-vars {"A": "<redacted>"}'),
        ('E=\'{"env_vars": {"A": "s3cret"}}\' x', 'E={"env_vars": {"A": "<redacted>"}} x'),
        ("git clone https://me:s3cret@host/x # it's", "git clone https://<redacted>@host/x # it's"),
    ],
)
def test_a_command_is_shown_without_its_secrets(command: str, shown: str) -> None:
    assert redacted_command(command) == shown


# Downloads


def write_program(directory: Path, name: str, body: str) -> None:
    """A program of PATH, in place of any of that name."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/bash\n{body}\n")
    (directory / name).chmod(0o755)


HUB = """
while [ $# -gt 0 ]; do case $1 in --local-dir|--local_dir) to=$2; shift;; *) words+=" $1";; esac; shift; done
echo "$0$words" >> "$RECORD"
mkdir -p "$to/.cache/huggingface/download"
{content}
"""
WHOLE = 'rm -f "$to"/.cache/huggingface/download/*; touch "$to"/{config.json,model.safetensors,train.jsonl}'
KILLED = 'touch "$to/config.json" "$to/.cache/huggingface/download/x.incomplete"; kill -9 $$'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Has PATH give ``programs`` that do ``content``; returns the command lines of those that were run until then."""
    record, programs_dir = tmp_path / "record", tmp_path / "bin"
    monkeypatch.setenv("RECORD", str(record))
    programs_dir.mkdir()
    (programs_dir / "python").symlink_to(PYTHON)
    monkeypatch.setattr(sys, "executable", str(programs_dir / "python"))  # beside which they are looked for first

    def install(content: str = WHOLE, *programs: str) -> list[str]:
        lines = record.read_text().splitlines() if record.exists() else []
        for name in ("hf", "huggingface-cli", "modelscope"):
            (programs_dir / name).unlink(missing_ok=True)
        for name in programs or ("hf", "modelscope"):
            write_program(programs_dir, name, HUB.replace("{content}", content))
        monkeypatch.setenv("PATH", f"{programs_dir}:/usr/bin:/bin")
        return [line.removeprefix(f"{programs_dir}/") for line in lines]

    return install


@pytest.mark.parametrize(
    ("programs", "source", "command"),
    [
        (("hf", "huggingface-cli"), "hf", "hf download Qwen/X"),
        (("huggingface-cli",), "hf", "huggingface-cli download Qwen/X"),
        (("hf", "modelscope"), "modelscope", "modelscope download --model Qwen/X"),
    ],
)
def test_a_model_is_downloaded_once(
    hub: Callable[..., list[str]], tmp_path: Path, programs: tuple[str, ...], source: str, command: str
) -> None:
    hub(WHOLE, *programs)
    for _ in range(2):
        assert U.download_model("Qwen/X", source) == f"{tmp_path}/models/X"
    assert hub() == [command]
    assert (tmp_path / "models/X/config.json").is_file()


def test_a_data_set_is_downloaded_once(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub()
    for _ in range(2):
        assert U.hf_download_dataset("me/data") == f"{tmp_path}/datasets/data"
    assert hub() == ["hf download --repo-type dataset me/data"]


def test_a_killed_download_is_not_taken_for_a_model_and_goes_on(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub(KILLED)
    with pytest.raises(SlimeError, match=r"model Qwen/X was not downloaded from hf \(.*\): put it at .*models/X yours"):
        U.download_model("Qwen/X")
    assert not (tmp_path / "models/X").exists()
    hub('[ -f "$to/config.json" ] || exit 5; ' + WHOLE)
    U.download_model("Qwen/X")
    assert (tmp_path / "models/X/model.safetensors").is_file()


@pytest.mark.parametrize("left", [["config.json"], ["config.json", ".cache/huggingface/download/a.incomplete"]])
def test_what_somebody_else_began_is_completed_in_its_place(
    hub: Callable[..., list[str]], tmp_path: Path, left: list[str]
) -> None:
    hub()
    for name in left:
        file = tmp_path / "models/X" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("begun")
    U.download_model("Qwen/X")
    assert (tmp_path / "models/X/model.safetensors").is_file()
    assert len(hub()) == 1


def test_a_hub_that_gives_no_whole_model_is_an_error(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub('touch "$to/config.json"')
    with pytest.raises(SlimeError, match=r"hf gave it to .*models/\.X\.tmp without weights: put it at .*models/X "):
        U.download_model("Qwen/X")
    assert not (tmp_path / "models/X").exists()


def test_two_downloads_of_one_model_are_one(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; {WHOLE}")
    threads = [threading.Thread(target=U.download_model, args=("Qwen/X",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for((tmp_path / "record").exists, "a download begins")
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(60)
    assert len(hub()) == 1


def test_a_place_that_can_only_be_read_will_do_for_what_is_there(
    hub: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "models/X"
    directory.mkdir(parents=True)
    (directory / "config.json").touch()
    (directory / "model.bin").touch()
    monkeypatch.setattr(downloads, "one_at_a_time", None)
    assert U.download_model("Qwen/X") == str(directory)


def test_without_a_program_the_error_says_what_to_install(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub(WHOLE, "other")
    with pytest.raises(
        BadInputError, match=r"hf and huggingface-cli are not installed .*: pip install huggingface_hub"
    ):
        U.download_model("Qwen/X")
    with pytest.raises(BadInputError, match="source must be one of hf, modelscope, not 'hub'"):
        U.download_model("Qwen/X", "hub")


def test_a_model_lacks_what_its_index_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    assert downloads.missing_of("model", tmp_path) == "a model.safetensors.index.json that can be read"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    named = "2.safetensors, which model.safetensors.index.json names"
    assert downloads.missing_of("model", tmp_path) == named
    (tmp_path / "2.safetensors").touch()
    assert downloads.missing_of("model", tmp_path) == ""


def test_the_hubs_old_command_in_a_test_file_is_todays(hub: Callable[..., list[str]], tmp_path: Path) -> None:
    hub(WHOLE, "hf", "huggingface-cli")
    U.exec_command(f"huggingface-cli download Qwen/X --local-dir {tmp_path}/models/X")
    assert hub() == ["hf download Qwen/X"]


# Conversions


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What conversions would have run."""
    ran: list[str] = []
    monkeypatch.setattr("slime.utils.external_utils.conversions.exec_command", ran.append)
    return ran


def converted(directory: Path, *files: str) -> None:
    for name in files:
        file = directory / "models/X_torch_dist" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("release" if file.name.startswith("latest") else "{}")


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ([], False),
        (["release/common.pt"], False),
        (["release/metadata.json"], False),
        (["latest_checkpointed_iteration.txt"], False),
        (["release/common.pt", "latest_checkpointed_iteration.txt"], False),
        ([".release.tmp/metadata.json"], False),
        (["release/metadata.json", "latest_checkpointed_iteration.txt"], True),
    ],
)
def test_a_conversion_is_left_out_only_where_an_earlier_one_is_whole(
    tmp_path: Path, commands: list[str], files: list[str], whole: bool
) -> None:
    converted(tmp_path, *files)
    assert U.convert_checkpoint("X", "qwen2.5-0.5B", 2) == f"{tmp_path}/models/X_torch_dist"
    assert len(commands) == (not whole)


def test_the_command_of_a_conversion(commands: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    U.convert_checkpoint("X", "qwen2.5-0.5B", 2, extra_args="--a b", dir_dst=str(tmp_path / "a b"), hf_checkpoint="m")
    words = shlex.split(commands[0])
    assert words[:2] == ["source", f"{U.repo_base_dir}/scripts/models/qwen2.5-0.5B.sh"]
    begin = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    tool = f"{U.repo_base_dir}/tools/convert_hf_to_torch_dist.py"
    save = ["--save", f"{tmp_path}/a b/X_torch_dist", "--force", "--a", "b"]
    assert words[5:] == [*begin, tool, "${MODEL_ARGS[@]}", "--hf-checkpoint", "m", *save]
    monkeypatch.setenv("SLURM_JOB_HOSTNAMES", "n0\nn1 n2\n")
    monkeypatch.setenv("SLURM_NODEID", "1")
    U.convert_checkpoint("X", None, 8, multinode=True)
    words = shlex.split(commands[1])
    place = ["--master-addr", "n0", "--master-port", "23456", "--nnodes", "3", "--node-rank", "1"]
    assert words[words.index("--nproc-per-node") + 2 :][: len(place)] == place
    assert "source" not in words
    assert words[words.index("--hf-checkpoint") + 1] == f"{tmp_path}/models/X"


def test_a_conversion_on_several_nodes_needs_to_know_them(commands: list[str]) -> None:
    with pytest.raises(BadInputError, match="several nodes need SLURM_NODEID"):
        U.convert_checkpoint("X", None, 8, multinode=True)
    with pytest.raises(BadInputError, match=r"no scripts/models/qwen3-4.sh; did you mean qwen3-4B"):
        U.convert_checkpoint("X", "qwen3-4", 8)
    assert commands == []


def test_a_float8_model_is_multiplied_out_once(tmp_path: Path, commands: list[str]) -> None:
    target = tmp_path / "out"
    U.fp8_cast_bf16("src", str(target))
    target.mkdir()
    (target / "config.json").touch()
    (target / "model.safetensors").touch()
    U.fp8_cast_bf16("src", str(target))
    assert len(commands) == 1
    assert commands[0].endswith(f"tools/convert_fp8_to_bf16.py --model-dir src --save-dir {target}")


def test_without_the_variable_a_conversion_goes_where_tests_look_for_it(
    commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIME_MODELS_DIR")
    monkeypatch.setattr("slime.utils.external_utils.conversions.one_at_a_time", lambda path: contextlib.nullcontext())
    assert U.convert_checkpoint("X", None, 1) == "/root/X_torch_dist"
    assert "--hf-checkpoint /root/models/X " in commands[0]


# Small helpers


def test_flags_of_wandb_never_have_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert U.get_default_wandb_args("tests/test_x.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("GITHUB_COMMIT_NAME", "abc_12")
    given = U.get_default_wandb_args("tests/test_qwen.py", "pre", "id")
    project = ["--use-wandb", "--wandb-project", "slime-test_qwen", "--wandb-group", "pre_id_abc_12"]
    assert given.split() == [*project, "--disable-wandb-random-suffix"]
    assert "--wandb-project slime-examples_run " in U.get_default_wandb_args("/x/examples/run.py")


@pytest.mark.parametrize(
    ("value", "default", "expected"),
    [
        ("1", "0", True),
        ("True", "0", True),
        ("0", "1", False),
        ("false", "1", False),
        ("", "1", True),
        (None, "1", True),
    ],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str | None, default: str, expected: bool) -> None:
    if value is not None:
        monkeypatch.setenv("SLIME_TEST_X", value)
    assert U.get_bool_env_var("SLIME_TEST_X", default) is expected


def test_a_switch_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_TEST_ENABLE_INFINITE_RUN", "maybe")
    with pytest.raises(BadInputError, match="SLIME_TEST_ENABLE_INFINITE_RUN=maybe must be one of true, 1, false, 0"):
        U.get_env_enable_infinite_run()


def test_temporary_files_and_run_ids() -> None:
    file = Path(U.save_to_temp_file("text", "yaml"))
    try:
        assert (file.read_text(), file.suffix) == ("text", ".yaml")
    finally:
        file.unlink()
    assert re.fullmatch(r"\d{6}-\d{6}-\d{3}", U.create_run_id())


@pytest.mark.parametrize(("topology", "expected"), [("GPU0  X  NV18", True), ("GPU0  X  PHB", False), (None, False)])
def test_nvlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str | None, expected: bool) -> None:
    write_program(tmp_path / "bin", "nvidia-smi", f"echo '{topology}'" if topology else "exit 127")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert U.check_has_nvlink() is expected


def test_rsync_copies_what_is_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "bin", "rsync", '[ "$1" = -a ] && cp -r "$2." "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/file").touch()
    U.rsync_simple(f"{tmp_path}/a b", f"{tmp_path}/to/here")
    assert (tmp_path / "to/here/file").is_file()


@dataclass
class Options(U.ExecuteTrainConfig):
    """Of a script."""

    name: str = "x"
    ratio: float | None = None


def test_a_dataclass_is_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    seen: list[Options] = []

    def main(options: Options) -> None:
        """Trains."""
        seen.append(options)

    app = typer.Typer()
    app.command()(U.dataclass_cli(main))
    monkeypatch.setenv("SLIME_SCRIPT_NUM_NODES", "3")
    ran = CliRunner().invoke(app, ["--name", "y", "--ratio", "0.5", "--cuda-core-dump"])
    assert ran.exit_code == 0, ran.output
    assert seen == [Options(cuda_core_dump=True, num_nodes=3, name="y", ratio=0.5)]
    with pytest.raises(BadInputError, match="dataclass_cli takes a function of one parameter, a dataclass"):
        U.dataclass_cli(lambda options: None)


# execute_train, with a `launch` of our own and no Ray


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, object]]:
    """A running Ray's address, and a ``launch`` that prints ``says`` to standard error and ends with ``status``; what
    it was given is returned."""
    record = tmp_path / "launched.json"
    dump = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['LAUNCHED'], 'w'))"
    monkeypatch.setenv("LAUNCHED", str(record))
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    monkeypatch.setattr(own_ray, "LAUNCH", tmp_path / "launch.sh")

    def run(*words: object, says: str = "", status: int = 0, **options: object) -> dict[str, object]:
        launch = f'"$PYTHON" -c "{dump}" "$@"; echo {shlex.quote(says)} >&2; exit {status}'
        (tmp_path / "launch.sh").write_text(f"set -eu\nlaunch() {{ {launch}; }}\n")
        record.unlink(missing_ok=True)
        returned = U.execute_train(*(words or ("--lr 1", 2, None)), **options)  # type: ignore[arg-type]
        given, environment = json.loads(record.read_text()) if record.exists() else (None, {})
        return {"returned": returned, "words": given, "environment": environment}

    return run


def test_a_job_has_the_models_flags_and_then_its_own(launched: Callable[..., dict[str, object]]) -> None:
    ran = launched("--lr 1\n--name 'a b' --home $HOME", 4, "qwen2.5-0.5B")
    words = ran["words"]
    assert isinstance(words, list)
    assert words[:3] == ["train.py", "--num-layers", "24"]
    assert words[-6:] == ["--lr", "1", "--name", "a b", "--home", os.environ["HOME"]]
    assert ran["returned"] == "SUCCEEDED"


def test_a_script_of_ones_own_is_named_by_its_path(
    launched: Callable[..., dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", str(tmp_path / "mine.py")):
        assert launched("--lr 1", 1, None, train_script=name)["words"] == [f"{tmp_path}/mine.py", "--lr", "1"]
    with pytest.raises(BadInputError, match=r"train_script other.py: there is no such file in "):
        launched("", 1, None, train_script="other.py")


def test_variables_of_a_job(launched: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_ENV_JSON", '{"py_modules": [], "env_vars": {"A": "0", "Z": "9"}}')
    config = U.ExecuteTrainConfig(cuda_core_dump=True, extra_env_vars="B=2=3 'C=4 5'")
    ran = launched("--use-wandb", 1, None, extra_env_vars={"A": 1, "B": True}, config=config)
    environment = ran["environment"]
    assert isinstance(environment, dict)
    runtime = json.loads(environment["RUNTIME_ENV_JSON"])
    dumps = {name: runtime["env_vars"].pop(name) for name in list(runtime["env_vars"]) if name.startswith("CUDA_")}
    assert dumps["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    variables = {"A": "1", "B": "2=3", "C": "4 5", "Z": "9"}
    assert runtime == {"py_modules": [], "env_vars": variables}
    assert environment["RAY_ADDRESS"] == "http://head:8265"
    assert ran["words"] == ["train.py", "--use-wandb"]


@pytest.mark.parametrize("page", ["launch.md", "zh/launch.md"])
def test_the_example_of_the_documentation(
    launched: Callable[..., dict[str, object]],
    hub: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    launched()  # for its `launch`
    hub()
    file = tmp_path / "test_example.py"
    file.write_text(example(page, "def prepare"))
    runpy.run_path(str(file), run_name="__main__")
    words, _ = json.loads((tmp_path / "launched.json").read_text())
    assert words[:2] == ["train.py", "--num-layers"]
    check_flags(words[1:])
    assert words[words.index("--hf-checkpoint") + 1] == f"{tmp_path}/models/Qwen2.5-0.5B-Instruct"
    assert hub() == ["hf download Qwen/Qwen2.5-0.5B-Instruct", "hf download --repo-type dataset zhuzilin/gsm8k"]


@pytest.mark.parametrize("text", ['{"A": 1, "B": "x y"}', "A=1 B='x y'"])
def test_variables_of_a_config_are_json_or_words(launched: Callable[..., dict[str, object]], text: str) -> None:
    environment = launched("", 1, None, config=U.ExecuteTrainConfig(extra_env_vars=text))["environment"]
    assert isinstance(environment, dict)
    assert json.loads(environment["RUNTIME_ENV_JSON"]) == {"env_vars": {"A": "1", "B": "x y"}}


@pytest.mark.parametrize(
    ("config", "runtime_env", "said"),
    [
        ('{"A"', "", "extra_env_vars is not a JSON object: "),
        ("A", "", "extra_env_vars: 'A' is not NAME=VALUE"),
        ("", "[]", "RUNTIME_ENV_JSON cannot be used: "),
        ("", "{", "RUNTIME_ENV_JSON cannot be used: "),
    ],
)
def test_variables_that_are_none_are_an_error(
    launched: Callable[..., dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    runtime_env: str,
    said: str,
) -> None:
    monkeypatch.setenv("RUNTIME_ENV_JSON", runtime_env)
    with pytest.raises(BadInputError, match=re.escape(said)):
        launched("", 1, None, config=U.ExecuteTrainConfig(extra_env_vars=config))


@pytest.mark.parametrize(
    ("says", "status", "message", "state"),
    [
        (
            "launch: job j failed: it broke",
            1,
            "job j failed: it broke; its log: `ray job logs --address http",
            "FAILED",
        ),
        ("launch: job j stopped", 1, "job j stopped; its log: ", "STOPPED"),
        ("launch: error: RAY_ADDRESS=x: no", 2, "RAY_ADDRESS=x: no; its log: ", "UNKNOWN"),
        ("", 7, "its submission ended with status 7; its log: ", "UNKNOWN"),
    ],
)
def test_a_job_that_does_not_succeed_is_an_error_with_its_status(
    launched: Callable[..., dict[str, object]], says: str, status: int, message: str, state: str
) -> None:
    with pytest.raises(U.JobError) as error:
        launched(says=says, status=status)
    assert str(error.value).startswith(message)
    assert error.value.status == state


def test_the_callback_comes_before_the_submission_and_ends_it_by_failing(
    launched: Callable[..., dict[str, object]], tmp_path: Path
) -> None:
    record = tmp_path / "launched.json"
    seen: list[bool] = []
    launched("", 1, None, before_ray_job_submit=lambda: seen.append(record.exists()))
    assert seen == [False]

    def fail() -> None:
        raise RuntimeError("no teacher")

    with pytest.raises(RuntimeError, match="no teacher"):
        launched("", 1, None, before_ray_job_submit=fail)
    assert not record.exists()


def test_nothing_is_submitted_where_that_is_switched_off(
    launched: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "0")
    called: list[int] = []
    ran = launched("--wandb-key s3cret", 1, None, before_ray_job_submit=lambda: called.append(1))
    assert (ran["returned"], ran["words"], called) == (None, None, [1])
    assert "launch train.py --wandb-key <redacted>" in capsys.readouterr().out


def test_a_dry_run_needs_no_ray(launched: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert launched("--lr 1", 1, None)["words"] == ["train.py", "--lr", "1"]
    with pytest.raises(SlimeError, match="a dry run ended with status 2: --lr is wrong"):
        launched("--lr 1", 1, None, says="--lr is wrong", status=2)


def test_the_address_of_a_ray_that_runs(
    launched: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("SLIME_SCRIPT_EXTERNAL_RAY", "1")
    for host, address in (("", "http://127.0.0.1:8265"), ("10.0.0.9", "http://10.0.0.9:8265")):
        monkeypatch.setenv("MASTER_ADDR", host)
        environment = launched("", 1, None)["environment"]
        assert isinstance(environment, dict)
        assert environment["RAY_ADDRESS"] == address
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(
        BadInputError, match=r"RAY_ADDRESS=10\.0\.0\.9:6379: execute_train submits a job, and needs the URL"
    ):
        launched("", 1, None)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_job_is_stopped_where_this_process_leaves(
    launched: Callable[..., dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    kind: type[BaseException],
) -> None:
    stopped: list[tuple[str, str]] = []
    monkeypatch.setattr(jobs, "stop_job", lambda ray, job: stopped.append((ray.address, job)))
    (tmp_path / "launch.sh").write_text(f"launch() {{ echo $SLIME_JOB_ID $$ > {tmp_path}/job; exec sleep 600; }}\n")

    def leave() -> None:
        wait_for(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text(), "the job is submitted")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(kind) as left:
        U.execute_train("", 1, None)
    thread.join(60)
    job, pid = (tmp_path / "job").read_text().split()
    assert stopped == [("http://head:8265", job)]
    assert not Path(f"/proc/{pid}").exists()
    if kind is SystemExit:
        assert left.value.code == 143  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
