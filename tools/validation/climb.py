"""Climbs the levels that were asked for, and writes the report as it grows."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

import slime
from slime.options.flags.installed import version_of
from slime.utils import device
from slime.utils.errors import BadInputError
from tools.quickstart import ROOT
from tools.validation.architecture import features
from tools.validation.dummy import write_model
from tools.validation.launches import Launcher
from tools.validation.levels import LEVELS, Level
from tools.validation.report import Item, LevelResult, Report, Status
from tools.validation.setting import Setting, processes

_PACKAGES = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers")
_TESTS = ("tests/unit/test_models.py", "tests/unit/test_parameter_counts.py", "tests/unit/test_model_scripts.py")
_LIMITATIONS = {
    0: "level 0 is one step: it says nothing about learning",
    1: "level 1 resumes in the same layout; tests/parallel resume in others",
    5: "level 5 is a learning signal on a toy task, no convergence and no benchmark",
}


def climb(options: argparse.Namespace) -> Report:
    """Run the levels; the report, which is in report.txt too.

    Raises:
        BadInputError: an output directory with something in it, or a model that is not there.
        ValueError: a model of no supported family.
        OSError: no readable config.json.
    """
    setting, model = prepare(options)
    titles = {number: level.title for number, level in LEVELS.items()}
    report = Report(model, tuple(options.levels), setting.output, titles)
    repo = _git_state()  # before the runs: it is what they ran
    report.preliminary += [_focused_tests(setting, options.focused_tests), _checkout()]
    data = setting.make_data()
    if not data.ok:
        raise BadInputError(f"no data: {data.why()}; see {data.log}")
    for number in options.levels:
        level = LEVELS[number]
        print(f"\n== level {number}, {level.title}", file=sys.stderr, flush=True)
        report.levels.append(LevelResult(number, tuple(_check(level, setting))))
        # After each one: the program's end must not take along what it has found so far.
        _finish(report, setting, options, repo)
    return report


def _check(level: Level, setting: Setting) -> list[Item]:
    """A level's parts; one whose runs left what cannot be read has failed, and the next one is climbed."""
    try:
        return level.check(setting)
    except Exception as error:  # of a file that is missing or damaged, in whatever format
        traceback.print_exc()
        return [Item("what the runs wrote", Status.FAIL, f"{type(error).__name__}: {error}")]


def prepare(options: argparse.Namespace) -> tuple[Setting, str]:
    """The output directory, and the model in it if its weights are to be random; the model in words too."""
    source: Path = (options.hf_checkpoint or options.config).expanduser().absolute()
    if not source.exists():
        raise BadInputError(f"there is no {source}")
    output = options.output_dir or Path("outputs", "validate_model", f"{source.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    output = output.expanduser().absolute()
    if output.exists() and any(output.iterdir()):
        raise BadInputError(f"--output-dir {output} is not empty: name another, nothing was removed")
    on_gpus = device.is_cuda()
    dtype = options.dtype or ("bfloat16" if on_gpus else "float32")
    slots = options.slots or (device.count() if on_gpus else processes())
    if on_gpus and slots > device.count():
        raise BadInputError(f"--slots {slots}: this host has {device.count()} GPUs")
    model, dummy = source, options.hf_checkpoint is None
    if dummy:
        model = output / "model"
        write_model(source, model, dtype, tiny=options.tiny, seed=options.seed)
    output.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(output, options.launch_timeout)
    setting = Setting(model, dummy, dtype, on_gpus, slots, options.seed, options.flags, launcher)
    kind = f"random weights{' of small sizes' if options.tiny else ''}, config" if dummy else "checkpoint"
    return setting, f"{kind} {options.hf_checkpoint or options.config} ({features(setting)}; {dtype})"


def _checkout() -> Item:
    path = Path(slime.__file__).resolve()
    status = Status.PASS if path.is_relative_to(ROOT) else Status.FAIL
    text = f"slime is {_shown(path.parent)}, train.py {_shown(ROOT / 'train.py')}"
    return Item("Local checkout import", status, text)


def _shown(path: Path) -> str:
    """Relative if it is in the working directory: a report can be handed on without the names of a host's."""
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path)


def _focused_tests(setting: Setting, wanted: bool) -> Item:
    part, command = "Focused tests of model tables", "python3 -m pytest -q " + " ".join(_TESTS)
    if not wanted:
        return Item(part, Status.SKIPPED, f"not asked for by --focused-tests, which runs {command}")
    run = setting.launcher.run("focused_tests", "-m", ["pytest", "-q", "-p", "no:cacheprovider", *_TESTS])
    last = run.log.read_text(errors="replace").strip().splitlines()[-1]
    return Item(part, Status.PASS if run.ok else Status.FAIL, f"{command}: {last}", run.log)


def _log_capture(setting: Setting) -> Item:
    runs = setting.launcher.runs
    missing = [run.name for run in runs if not run.captured()]
    where = _shown(setting.output)
    if missing:
        return Item("Log capture", Status.FAIL, f"{where}: nothing printed is in the log of {', '.join(missing)}")
    return Item("Log capture", Status.PASS, f"{where}: a log for each of {len(runs)} runs")


def _finish(report: Report, setting: Setting, options: argparse.Namespace, repo: str) -> None:
    """The summary of all that has run so far."""
    hardware = device.hardware() if setting.on_gpus else "CPU"
    report.evidence = [
        ("slime repo", repo),
        ("Host", f"{hardware}, {setting.slots} slots, {setting.dtype}"),
        ("Packages", ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES)),
        ("Command", options.command),
    ]
    report.key_lines = [(run.name, run.key_line()) for run in setting.launcher.runs]
    report.log_capture = _log_capture(setting)
    report.limitations = limitations(setting, options)
    (setting.output / "report.txt").write_text(report.text())


def _git_state() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout.rstrip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD") or "no git checkout"
    dirty = [line[3:] for line in git("status", "--short").splitlines()]
    return f"{head}, dirty files: {', '.join(dirty[:8]) or 'none'}{' and more' if len(dirty) > 8 else ''}"


def limitations(setting: Setting, options: argparse.Namespace) -> list[str]:
    """What the levels that ran do not show."""
    texts = [_LIMITATIONS[number] for number in options.levels if number in _LIMITATIONS]
    if setting.dummy:
        texts.append(
            "random weights, not quantized, no MTP heads: construction and mechanics of training, not "
            "the published weights"
        )
    if options.tiny:
        texts.append("small sizes: nothing about memory or speed of the published ones")
    if not setting.on_gpus:
        texts.append("CPU in float32, collectives by gloo: nothing about CUDA kernels, NCCL or CUDA IPC")
    if setting.slots < 2:
        texts.append("one slot: data parallelism has one rank")
    if options.flags:
        texts.append(f"every run had --flags {shlex.join(options.flags)}")
    return [*texts, "text only; GRPO, so no critic; rewards are random or a toy's, no reward model is served"]
