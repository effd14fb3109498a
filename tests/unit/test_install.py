"""scripts/install.sh, build_conda.sh and the options of scripts/test.sh.

Python, pip and micromamba have stand-ins: nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "dirname", "env", "grep", "head", "rm", "sed", "sha256sum", "tail", "timeout")

# Answers like a Python with pip: -V, -c (exit status $VERSION_OK or $VENV_OK), -m venv, -m ensurepip, -m pip.
PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    -V*) echo "Python 3.11.0" ;;
    "-c import sys; sys.exit"*) exit "${VERSION_OK:-0}" ;;
    "-c import ensurepip"*) exit "${VENV_OK:-0}" ;;
    "-c import sys; print"*) echo python3.11-venv ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip")
        [ "$3" != --version ] || exit 0
        printf '%s\\n' "$*" >>"$PIP_CALLS"
        [ -n "${PIP_FAILS:-}" ] || exit 0
        printf '%s\\n' "WARNING: Location 'x' is ignored" "ERROR: no such package"
        exit 1 ;;
    *) exit 1 ;;
esac
"""


class Checkout:
    """A copy of what install.sh reads, with a PATH that holds only the stand-ins and a few tools."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkout"
        self.bin = directory / "bin"
        self.calls = directory / "pip-calls"
        self.bin.mkdir()
        for name in ("requirements", "scripts"):
            shutil.copytree(ROOT / name, self.root / name)
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        for name in (*TOOLS, "mkdir", "cp"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.executable("python3", PYTHON)
        self.executable("cc", "#!/usr/bin/env bash\n")

    def executable(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)  # a link leads to the system's own program
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *arguments: str, script: str = "install.sh", **env: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.bin), "PIP_CALLS": str(self.calls), **env}
        command = [str(self.bin / "bash"), str(self.root / "scripts" / script), *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)

    def pip_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_cpu_installs_engines_without_dependencies_and_only_once(checkout: Checkout) -> None:
    first = checkout.run("cpu")
    assert first.returncode == 0, first.stderr
    calls = checkout.pip_calls()
    assert ["--no-deps" in call for call in calls] == [False, True, True]
    assert "requirements/cpu.txt" in calls[0]
    assert "-c requirements/constraints-cpu.txt" in calls[0]
    assert calls[1].endswith("--no-deps -r requirements/cpu-nodeps.txt")
    assert calls[2].endswith("--no-deps -e .")
    assert (checkout.root / ".venv" / "bin" / "python").exists()

    second = checkout.run("auto")
    assert second.returncode == 0
    assert "up to date" in second.stdout
    assert checkout.pip_calls() == calls

    with (checkout.root / "requirements" / "common.txt").open("a") as file:
        file.write("\nnew==1\n")
    assert "up to date" not in checkout.run().stdout
    assert len(checkout.pip_calls()) == 2 * len(calls)


def test_the_new_column_has_requirements_and_a_python_of_its_own(checkout: Checkout) -> None:
    assert checkout.run("cpu").returncode == 0
    proven = checkout.pip_calls()
    said = checkout.run("cpu", SLIME_COLUMN="new").stdout
    assert "up to date" not in said
    assert checkout.run("cpu", SLIME_COLUMN="new").stdout.startswith("install: up to date")
    assert [call.replace("/new/", "/") for call in checkout.pip_calls()] == 2 * proven
    assert checkout.pip_calls()[3:5] == [
        call.replace("requirements/c", "requirements/new/c") for call in proven[:2]
    ]  # dev.txt is of both
    refused = checkout.run("cuda", SLIME_COLUMN="new")
    assert (refused.returncode, "SLIME_COLUMN=new is for cpu" in refused.stderr) == (1, True)
    wrong = checkout.run("cpu", SLIME_COLUMN="newest")
    assert (wrong.returncode, wrong.stderr) == (2, "error: SLIME_COLUMN must be proven or new, not 'newest'\n")


@pytest.mark.parametrize("lines", ["GPU 0: some", "Unable to determine the device handle\nGPU 1: some"])
def test_a_gpu_selects_the_cuda_set(lines: str, checkout: Checkout) -> None:
    checkout.executable("nvidia-smi", f"#!/usr/bin/env bash\necho '{lines}'\n")
    assert checkout.run().returncode == 0
    calls = checkout.pip_calls()
    assert "-r requirements/cuda.txt" in calls[0]
    assert "-c requirements/constraints-cuda.txt" in calls[0]
    assert len(calls) == 2


def test_a_driver_that_hangs_is_one_line(checkout: Checkout) -> None:
    checkout.executable("timeout", "#!/usr/bin/env bash\n[ \"$*\" = '-k 5 60 nvidia-smi -L' ] && exit 124\n")
    result = checkout.run()
    assert (result.returncode, checkout.pip_calls()) == (1, [])
    said = "nvidia-smi -L has not answered within 60 s; give cpu or cuda to go on without asking it"
    assert result.stderr == f"install: error: {said}\n"
    assert checkout.run("cpu").returncode == 0


def test_another_torch_index_is_used_for_torch_alone(checkout: Checkout) -> None:
    index = "https://example.org/whl/cpu"
    assert checkout.run("cpu", SLIME_TORCH_INDEX=index).returncode == 0
    first, *others = checkout.pip_calls()
    assert f"--no-deps --index-url {index} torch==" in first
    assert not any(index in call for call in others)


def test_cuda_12_is_a_list_of_packages_from_three_indexes(checkout: Checkout) -> None:
    """None is resolved: SGLang's metadata asks for packages of CUDA 13."""
    assert checkout.run("cuda", SLIME_CUDA="12.9").returncode == 0
    packages, slime = checkout.pip_calls()
    assert "--no-deps -r requirements/constraints-cuda-12.9.txt" in packages
    for index in ("https://download.pytorch.org/whl/cu129", "https://docs.sglang.ai/whl/cu129/"):
        assert f"--extra-index-url {index}" in packages
    assert slime.endswith("--no-deps -e .")
    assert "up to date" in checkout.run("cuda", SLIME_CUDA="12.9").stdout
    assert "up to date" not in checkout.run("cuda").stdout

    mirrors = {"SLIME_TORCH_INDEX": "https://t.example", "SLIME_SGLANG_INDEX": "https://s.example"}
    assert checkout.run("cuda", SLIME_CUDA="12.9", **mirrors).returncode == 0
    assert "--extra-index-url https://t.example --extra-index-url https://s.example" in checkout.pip_calls()[-2]
    assert "pytorch.org" not in checkout.pip_calls()[-2]


@pytest.mark.parametrize(("file", "mode"), [("Dockerfile", "cuda"), ("Dockerfile.cpu", "cpu")])
def test_the_layer_of_an_image_that_installs_has_what_the_script_reads(
    file: str, mode: str, checkout: Checkout
) -> None:
    """And no more, for which a change of the code would install everything again."""
    before, after = (ROOT / "docker" / file).read_text().split(f" && bash scripts/install.sh {mode}\n")
    shutil.rmtree(checkout.root)
    for line in [line for line in before.splitlines() if line.startswith("COPY ")]:
        *sources, to = line.split()[1:]
        for source in map(Path, sources):
            # As docker does it: a directory's content goes to the name, a file below one that ends with "/".
            target = checkout.root / to / ("" if (ROOT / source).is_dir() else source.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    assert (checkout.root / "slime" / "__init__.py").exists()  # for the editable installation to find the package
    assert sorted(path.name for path in checkout.root.rglob("*.py")) == ["__init__.py", "setup.py"]
    assert after.startswith("COPY . .\n")
    result = checkout.run(mode)
    assert result.returncode == 0, result.stderr


# Environments are directories with the stand-in for Python; the rest is said to $MAMBA_CALLS.
MICROMAMBA = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$MAMBA_CALLS"
prefix=$MAMBA_ROOT_PREFIX/envs/slime
case $1 in
    create | install) mkdir -p "$prefix/bin" "$prefix/conda-meta"; cp "$(command -v python3)" "$prefix/bin/python" ;;
    run) shift 3; exec "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("words", "environment", "packages"),
    [
        ([], {}, "python=3.12 pip gxx cuda-toolkit=13.0.2"),
        (["cuda"], {"SLIME_CUDA": "12.9", "SLIME_PYTHON": "3.11"}, "python=3.11 pip gxx cuda-toolkit=12.9.1"),
        (["cpu"], {}, "python=3.12 pip gxx"),
    ],
)
def test_the_conda_environment_is_installed_by_the_same_script(
    words: list[str], environment: dict[str, str], packages: str, checkout: Checkout, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "build_conda.sh", tmp_path)
    checkout.executable("micromamba", MICROMAMBA)
    calls = tmp_path / "mamba-calls"
    places = {"SLIME_DIR": str(checkout.root), "BASE_DIR": str(tmp_path / "base"), "HOME": str(tmp_path / "home")}
    variables = {"PATH": str(checkout.bin), "PIP_CALLS": str(checkout.calls), "MAMBA_CALLS": str(calls), **places}
    command = [str(checkout.bin / "bash"), str(tmp_path / "build_conda.sh"), *words]
    for verb in ("create", "install"):  # a second call goes on from what the first left
        result = subprocess.run(command, env=variables | environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        made, ran = calls.read_text().splitlines()[-2:]
        assert made == f"{verb} --yes --name slime --override-channels --channel conda-forge {packages}"
        assert ran.startswith("run --name slime env VIRTUAL_ENV=")
    prefix = tmp_path / "base" / "micromamba" / "envs" / "slime"
    installed = checkout.pip_calls()[0]
    mode = words[0] if words else "cuda"
    assert ("constraints-cuda-12.9.txt" in installed) == ("SLIME_CUDA" in environment)
    assert f"requirements/{'constraints-' if 'SLIME_CUDA' in environment else ''}{mode}" in installed
    assert (prefix / ".slime-install").exists()
    show = f'source {prefix}/etc/conda/activate.d/slime.sh; echo "$VIRTUAL_ENV $CUDA_HOME $SLIME_CUDA"'
    activated = subprocess.run(["bash", "-c", show], env={"CONDA_PREFIX": "/the env"}, capture_output=True, text=True)
    assert activated.stdout == f"/the env /the env {environment.get('SLIME_CUDA', '13.0')}\n"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["gpu"], {}, "build_conda.sh: error: the argument must be cuda or cpu, not 'gpu'"),
        (["cuda", "13.0"], {}, "build_conda.sh: error: one argument at most, not 'cuda 13.0'"),
        ([], {"SLIME_DIR": "/nowhere"}, "build_conda.sh: error: SLIME_DIR=/nowhere is not a checkout of slime"),
        ([], {"SLIME_CUDA": "12.4"}, "error: SLIME_CUDA must be 12.9 or 13.0, not '12.4'"),
    ],
)
def test_wrong_words_for_the_conda_environment_make_none(
    words: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment}
    command = ["bash", str(ROOT / "build_conda.sh"), *words]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, f"{message}\n")
    assert list(tmp_path.iterdir()) == []


def test_the_active_environment_is_used(checkout: Checkout, tmp_path: Path) -> None:
    venv = tmp_path / "mine"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", venv / "bin" / "python")
    result = checkout.run("cpu", VIRTUAL_ENV=str(venv))
    assert result.returncode == 0, result.stderr
    assert (venv / ".slime-install").exists()
    assert not (checkout.root / ".venv").exists()


def test_pip_failure_shows_the_end_of_its_log_and_is_tried_again(checkout: Checkout) -> None:
    result = checkout.run("cpu", PIP_FAILS="1")
    assert result.returncode == 1
    assert "ERROR: no such package" in result.stderr
    assert "WARNING: Location" not in result.stderr
    assert "could not install requirements/cpu.txt" in result.stderr
    assert checkout.run("cpu").returncode == 0


@pytest.mark.parametrize(
    ("env", "missing", "message"),
    [
        ({"VERSION_OK": "1"}, None, "no Python 3.11 or 3.12 on PATH; install one"),
        ({}, "python3", "no Python 3.11 or 3.12 on PATH; install one"),
        ({"VENV_OK": "1"}, None, "python3 has no venv module; install it"),
        ({}, "cc", "no C compiler on PATH; install one"),
    ],
)
def test_what_is_missing_is_one_line_that_says_what_to_do(
    checkout: Checkout, env: dict[str, str], missing: str | None, message: str
) -> None:
    if missing is not None:
        (checkout.bin / missing).unlink()
    result = checkout.run("cpu", **env)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"install: error: {message}" in result.stderr
    assert checkout.pip_calls() == []


def test_an_active_environment_of_another_python_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    result = checkout.run("cpu", VIRTUAL_ENV=str(tmp_path / "old"))
    assert result.returncode == 1
    assert "does not have Python 3.11 or 3.12" in result.stderr


def test_help_of_the_quickstart_installs_nothing(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "python3"):  # with these alone nothing could be installed
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = [str(tmp_path / "bash"), str(ROOT / "scripts" / "quickstart.sh"), "--seed", "1", "--help"]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "--time-limit" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize("words", [["--bogus"], ["--time-limit", "x"], ["--seed"]])
def test_wrong_options_of_the_quickstart_install_nothing(tmp_path: Path, words: list[str]) -> None:
    for name in ("bash", "dirname", "python3"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = [str(tmp_path / "bash"), str(ROOT / "scripts" / "quickstart.sh"), *words]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("quickstart.py: error: ")
    assert words[0] in result.stderr.splitlines()[-1]


_NEED_NOTHING = {
    *("doctor.py", "make_arithmetic_data.py", "make_trace.py", "quickstart.py", "restart_run.py", "view_run.py"),
    "wait_for_nodes.py",
}
_PROGRAMS = [f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")) if path.name not in _NEED_NOTHING]


@pytest.mark.parametrize("program", ["train.py", "train_async.py", *_PROGRAMS])
def test_a_python_without_slime_is_told_in_one_line(program: str) -> None:
    command = [sys.executable, "-S", "-E", str(ROOT / program), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{Path(program).name}: error: slime is not installed for ")
    assert "bash scripts/install.sh" in line


@pytest.mark.parametrize(
    ("program", "imported", "rank", "line"),
    [
        ("make_tiny_model.py", "transformers", "0", "make_tiny_model.py: interrupted\n"),
        ("convert_hf_to_torch_dist.py", "torch", "0", "convert_hf_to_torch_dist.py: interrupted\n"),
        ("convert_hf_to_torch_dist.py", "torch", "1", ""),
    ],
)
def test_ctrl_c_while_a_program_imports_is_one_line(
    program: str, imported: str, rank: str, line: str, tmp_path: Path
) -> None:
    """Of several ranks, that of the first."""
    heeded = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    (tmp_path / f"{imported}.py").write_text(f"import os, signal\n{heeded}\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "RANK": rank}
    command = [sys.executable, str(ROOT / "tools" / program), str(tmp_path / "model")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (130, line)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("install.sh", ["gpu"], "unknown argument 'gpu'"),
        ("test.sh", ["--fast"], "unknown argument '--fast'"),
        ("test.sh", ["--shard", "3/2"], "--shard takes I/N"),
        ("test.sh", ["--shard", "0/2"], "--shard takes I/N"),
        ("test.sh", ["--shard"], "--shard takes I/N"),
    ],
)
def test_wrong_arguments_end_with_status_2(checkout: Checkout, script: str, arguments: list[str], message: str) -> None:
    result = checkout.run(*arguments, script=script)
    assert result.returncode == 2
    assert message in result.stderr
    assert not os.path.exists(checkout.root / ".venv")
