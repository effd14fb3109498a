"""What the whole repository keeps to: no machine's paths, consistent pins, scripts that parse, a short driver."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted(p for p in (ROOT / "requirements").glob("*.txt") if not p.name.startswith("constraints"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)$")


def tracked_files() -> list[Path]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def pins(path: Path) -> dict[str, str]:
    """Exactly pinned packages of a requirements file, by normalised name."""
    matches = (PIN.match(line.strip()) for line in path.read_text().splitlines())
    return {re.sub(r"[-_.]+", "-", m[1]).lower(): m[2] for m in matches if m}


def names(path: Path) -> set[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    wanted = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines if line and not line.startswith("-"))
    return {re.sub(r"[-_.]+", "-", m[0]).lower() for m in wanted if m}


def test_no_file_names_a_path_of_this_machine() -> None:
    places = [str(ROOT), sys.prefix, sys.base_prefix]
    # A checkout right below the root ("/slime") is too short a path to tell from part of another one.
    places = [place for place in places if len(Path(place).parts) > 2 and not place.startswith("/usr")]
    pattern = re.compile("|".join([r"/(?:home|Users)/\w+/", *(re.escape(place) + r"\b" for place in places)]))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if match := pattern.search(text):
            found.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("driver", ["train.py", "train_async.py"])
def test_drivers_stay_under_100_lines(driver: str) -> None:
    if not (ROOT / driver).exists():
        pytest.skip(f"no {driver}")
    assert len((ROOT / driver).read_text().splitlines()) < 100


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pins_agree_with_the_constraints(device: str) -> None:
    constraints = pins(ROOT / "requirements" / f"constraints-{device}.txt")
    files = [p for p in REQUIREMENTS if p.stem.split("-")[0] in (device, "common", "dev")]
    assert len(files) >= 3
    for file in files:
        missing = names(file) - constraints.keys()
        assert not missing, f"{file.name}: no constraint on {sorted(missing)}"
        different = {n: (v, constraints[n]) for n, v in pins(file).items() if constraints[n] != v}
        assert not different, f"{file.name}: {different}"


SCRIPTS = sorted(path for path in tracked_files() if path.suffix == ".sh")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_shell_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0


def test_ci_runs_the_test_script() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "bash scripts/test.sh" in run.read_text()
