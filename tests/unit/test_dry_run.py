"""``train.py --dry-run``: everything is checked, the resolved run is printed, nothing is started."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import train
from slime.data.source.users_class import make_data_source, num_rollout
from slime.driver.rollout_manager import RolloutManager
from slime.entry.arguments import parse_args
from slime.files.checkpoints import ROLLOUT_STATE
from slime.observability import logs, trace
from slime.options.flags.sglang import ROUTER_POLICY
from slime.utils import patching
from slime.utils.errors import BadInputError
from slime.utils.patching import ALLOW_FLAG, ALLOW_VARIABLE, Patch
from tests.command_line import write_checkpoint
from tools import make_tiny_model

NUM_GPUS = 0
BEYOND = (
    "--prompt-data has 4 prompts, the checkpoint was 5 into an epoch of 8: resume with the data it was made with, or "
    "--restart-epoch begins this epoch anew with the data as it is now"
)
GOOD = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dry_run") / "model"
    assert make_tiny_model.main([str(path), "--num-layers", "1", "--hidden-size", "32"]) == 0
    return path


def _dry_run(model: Path, rows: str, monkeypatch: pytest.MonkeyPatch, *more: str, chat: bool = True) -> int:
    data = model.parent / "data.jsonl"
    data.write_text(rows)
    run_dir = ["--run-dir", str(model.parent / "run")]
    batch = ["--num-rollout", "3", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", *run_dir]
    keys = ["--input-key", "prompt", "--label-key", "label", "--rm-type", "math"] + ["--apply-chat-template"] * chat
    placement = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--rollout-max-response-len", "8"]
    files = ["--hf-checkpoint", str(model), "--prompt-data", str(data)]
    monkeypatch.setattr(sys, "argv", ["train.py", "--dry-run", "--fp32", *files, *batch, *keys, *placement, *more])
    try:
        train.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_prints_configuration_placement_and_data(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _dry_run(model, (json.dumps(GOOD) + "\n") * 5, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "global_batch_size: 8" in out
    assert "slot 0: training rank 0" in out
    assert "slot 2: engine 0" in out
    assert f"\ntraining starts from {model} (--hf-checkpoint)\n" in out
    assert "data: 5 prompts (0 bad, 0 too long left out), 3 rollouts\nok: the run can start" in out
    assert not (model.parent / "run").exists()


def test_prints_what_routes_take_of_an_engines_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 bytes for each of 2 experts in each of 3 layers, in both ranks."""
    sizes = ["--num-layers", "3", "--hidden-size", "32", "--experts-per-token", "2"]
    assert make_tiny_model.main([str(tmp_path / "model"), "--arch", "qwen3_moe", *sizes]) == 0
    slots = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"]
    for words, lines in (([], 0), (["--use-rollout-routing-replay"], 1)):
        assert _dry_run(tmp_path / "model", json.dumps(GOOD) + "\n", monkeypatch, *slots, *words) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("routes: ")]
        assert len(told) == lines
    assert told[0].startswith("routes: 24 bytes of pinned host memory for each token of an engine's cache, in each of")
    assert told[0].endswith(": 0.048 GB an engine for a million tokens with 2 (--rollout-num-gpus-per-engine)")


def test_prints_what_is_not_the_default_unless_all_is_wanted(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, flags = (json.dumps(GOOD) + "\n") * 5, ["--kl-loss-coef", "0.0", "--num-layers", "1"]
    assert _dry_run(model, rows, monkeypatch, *flags) == 0
    short = capsys.readouterr().out
    assert "\n  num_rollout: 3\n" in short
    assert "\n  num_layers: 1\n" in short
    assert len(short.splitlines()) < 72
    assert not {"kl_loss_coef", "engine_start_timeout", "hidden_size", "versions"} & {
        line.strip().partition(":")[0] for line in short.splitlines()
    }
    assert _dry_run(model, rows, monkeypatch, *flags, "--dry-run", "full") == 0
    full = capsys.readouterr().out
    assert all(f"\n  {name}: " in full for name in ("kl_loss_coef", "engine_start_timeout", "hidden_size", "torch"))
    assert full.splitlines()[-1] == short.splitlines()[-1]
    assert short.splitlines()[-1].startswith("ok: the run can start")


def test_a_file_may_ask_for_a_dry_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = model.parent / "dry.yaml"
    for value, said in (("true", "# Values that are not"), ("full", "versions:")):
        config.write_text(f"dry_run: {value}\n")
        assert _dry_run(model, json.dumps(GOOD) + "\n", monkeypatch, "--custom-config-path", str(config)) == 0
        assert capsys.readouterr().out.startswith(said)
    config.write_text("dry_run: 3\n")
    assert _dry_run(model, json.dumps(GOOD) + "\n", monkeypatch, "--custom-config-path", str(config)) == 2
    assert "--dry-run: invalid choice: '3'" in capsys.readouterr().err


def test_warnings_follow_the_configuration(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--colocate", "--rollout-num-gpus", "8"]
    assert _dry_run(model, json.dumps(GOOD) + "\n", monkeypatch, *flags) == 0
    out, err = capsys.readouterr()
    (warning,) = err.splitlines()
    said = "warning: --rollout-num-gpus 8 is ignored with --colocate: generation uses the 2 training slots"
    assert warning == f"train.py: {said}"
    assert said in out.partition("\nplacement: ")[2].splitlines()
    assert re.fullmatch(r"ok: the run can start, with \d warnings? above", out.splitlines()[-1])


def test_patches_are_listed_and_others_releases_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the verdict, by package and process; a patch for another release than the installed one is an error."""
    monkeypatch.setenv(ALLOW_VARIABLE, "0")
    monkeypatch.setattr(patching, "_told", set())
    rows = json.dumps(GOOD) + "\n"
    assert _dry_run(model, rows, monkeypatch, "--debug-rollout-only") == 0
    out, err = capsys.readouterr()
    section = out.partition("\npatches to released packages (docs/patches.md):\n")[2].splitlines()
    router = Patch.installed(ROUTER_POLICY)
    assert f"  sglang-router {router}, routers, and what reads a router's flags: router_policy" in section
    assert not [line for line in section if line.startswith("  megatron-core")]
    installed = Patch.installed
    monkeypatch.setattr(Patch, "installed", lambda patch: "9" if patch is ROUTER_POLICY else installed(patch))
    assert _dry_run(model, rows, monkeypatch, "--debug-rollout-only") == 2
    out, err = capsys.readouterr()
    refused = "sglang-router 9 is installed, and the patch router_policy (docs/patches.md) is for ==0.3.2: "
    (line,) = err.splitlines()
    assert line.startswith(f"train.py: error: {refused}install sglang-router==0.3.2, or do without the patch by ")
    assert out == ""
    assert _dry_run(model, rows, monkeypatch, "--debug-rollout-only", ALLOW_FLAG) == 0
    out, err = capsys.readouterr()
    assert f"train.py: warning: {refused}it is left out, as --allow-untested-versions says" in err.splitlines()
    assert "  sglang-router 9, routers, and what reads a router's flags: router_policy (left out)\n" in out


_FEW = "is more than the 5 prompts of --prompt-data: a rollout repeats prompts"
_LONG = "--rollout-max-response-len 2041"
_CUT = f"{_LONG} is more than an engine's context leaves to {{}} of 5 prompts: prompt and response end at {{}} tokens"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("--rollout-batch-size 5", None),
        ("--rollout-batch-size 6", f"--rollout-batch-size 6 {_FEW}"),
        ("--over-sampling-batch-size 6", f"--over-sampling-batch-size 6 {_FEW}"),
        ("--rollout-batch-size 6 --num-rollout 0 --debug-rollout-only", None),
        (_LONG, _CUT.format(3, 2042)),
        (f"{_LONG} --rollout-max-context-len 100", None),
        (f"{_LONG} --sglang-context-length 1k", _CUT.format(5, 994)),
        (f"{_LONG} --loss-type sft_loss", None),
        ("--tool-key extra", "--prompt-data "),
    ],
)
def test_what_options_make_of_the_prompts_is_warned_of(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    words: str,
    expected: str | None,
) -> None:
    """In a run too. Of the context of 2048 an engine keeps 6, which leaves room for the prompts of one token only."""
    rows = "".join(json.dumps({"prompt": text, "label": "2"}) + "\n" for text in ("1", "1", "1+", "1+", "1+"))
    assert _dry_run(model, rows, monkeypatch, *words.split(), chat=False) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: --")]
    assert len(warnings) == (expected is not None), warnings
    assert all(warning.startswith(f"warning: {expected}") for warning in warnings)
    caplog.clear()
    monkeypatch.setattr(logs, "begin", lambda *_: None)
    monkeypatch.setattr(trace, "begin", lambda *_: None)
    RolloutManager(parse_args(), None).load_data()
    logged = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [f"warning: {message}" for message in logged] == warnings


def test_evaluation_files_are_read_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row, good, bad = json.dumps(GOOD) + "\n", model.parent / "good.jsonl", model.parent / "bad.jsonl"
    flags = ["--eval-interval", "1", "--eval-prompt-data", "sums"]
    good.write_text(row * 3)
    assert _dry_run(model, row, monkeypatch, *flags, str(good)) == 0
    assert "evaluation: sums, 3 prompts" in capsys.readouterr().out
    assert _dry_run(model, row, monkeypatch, *flags, str(good), "--eval-tool-key", "extra") == 0
    told = f"warning: --eval-prompt-data sums {good}: no row has anything at 'extra' (--eval-tool-key)"
    assert told in capsys.readouterr().out
    bad.write_text(row + '{"prompt": "1+1="}\n')
    assert _dry_run(model, row, monkeypatch, *flags, str(bad)) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in error for word in ("--eval-prompt-data sums", "bad.jsonl", "line 2", "'label'")), error


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{not json", ("data.jsonl", "line 2")),
        (json.dumps({"prompt": GOOD["prompt"]}), ("data.jsonl", "line 2", "'label'")),
        (json.dumps({"label": "2"}), ("data.jsonl", "line 2", "'prompt'")),
    ],
)
def test_bad_row_is_one_line_with_status_2(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row: str,
    expected: tuple[str, ...],
) -> None:
    assert _dry_run(model, f"{json.dumps(GOOD)}\n{row}\n", monkeypatch) == 2
    out, err = capsys.readouterr()
    error = err.strip().splitlines()
    assert (len(error), out) == (1, ""), "an error is not looked for below the configuration"
    assert all(word in error[0] for word in expected), error[0]
    assert _dry_run(model, f"{json.dumps(GOOD)}\n{row}\n", monkeypatch, "--skip-bad-rows") == 0
    assert "data: 1 prompts (1 bad," in capsys.readouterr().out


def test_what_would_fail_or_end_when_the_run_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run that is over, adapters that the checkpoint has others of, and a place to save that is a file."""
    row = json.dumps(GOOD) + "\n"
    write_checkpoint(tmp_path / "ckpt", "0", {"adapters": {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj"]}})
    lora = ["--load", str(tmp_path / "ckpt"), "--lora-target-modules", "q_proj", "--lora-rank"]
    assert _dry_run(model, row, monkeypatch, *lora, "8") == 0
    assert "ok: the run can start" in capsys.readouterr().out
    assert _dry_run(model, row, monkeypatch, *lora, "8", "--num-rollout", "1") == 0
    over = f"the checkpoint in {tmp_path / 'ckpt'} is after rollout 1 of 1: nothing is left to do; a larger"
    assert capsys.readouterr().out.splitlines()[-1] == f"{over} --num-rollout goes on"
    assert (
        _dry_run(model, row, monkeypatch, *lora, "8", "--num-rollout", "1", "--save-lora", str(tmp_path / "new")) == 0
    )
    assert (
        "nothing is left but writing the exports that are missing; a larger --num-rollout goes on\nok:"
        in capsys.readouterr().out
    )
    file = str(model / "config.json")
    for words, expected in (([*lora, "4"], "go on with --lora-rank 8"), (["--save", file], "is not a directory")):
        assert _dry_run(model, row, monkeypatch, *words) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert expected in error


def test_what_a_resume_would_say_of_the_data(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "ckpt", "0", {})
    saved = tmp_path / "ckpt" / "iter_0000000"
    words = ["--load", str(tmp_path / "ckpt")]

    def says(rows: int, *more: str) -> tuple[int, str]:
        status = _dry_run(model, (json.dumps(GOOD) + "\n") * rows, monkeypatch, *words, *more)
        out, error = capsys.readouterr()
        return status, out if status == 0 else error

    rows = model.parent / "eight.jsonl"
    rows.write_text((json.dumps(GOOD) + "\n") * 8)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fp32", "--hf-checkpoint", str(model), "--prompt-data", str(rows)])
    sys.argv += ["--input-key", "prompt", "--label-key", "label", "--rm-type", "math", "--apply-chat-template"]
    sys.argv += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "3"]
    sys.argv += ["--colocate", "--rollout-max-response-len", "8"]
    source = make_data_source(parse_args())
    source.get_samples(5)
    torch.save({"data_source": source.state_dict(), "data_source_class": "ours"}, saved / ROLLOUT_STATE)
    status, text = says(8)
    assert (status, "resuming over other prompts" in text) == (0, False)
    status, text = says(9)
    changed = "warning: resuming over other prompts than the checkpoint's (num_prompts: 8 then, 9 now"
    assert (status, changed in text) == (0, True)
    assert says(4) == (2, f"train.py: error: load data: {BEYOND}\n")
    status, text = says(4, "--restart-epoch")
    assert (status, "warning: --restart-epoch: epoch 0 begins anew" in text) == (0, True)
    assert says(4, "--debug-rollout-only")[0] == 0, "nobody resumes"
    torch.save({"data_source_class": "mine.Source"}, saved / ROLLOUT_STATE)
    status, text = says(8)
    assert (status, "the checkpoint was made with mine.Source" in text) == (2, True)


def test_recorded_rollouts_that_are_not_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is over would not look for them."""
    replay = ["--load-debug-rollout-data", str(model.parent / "none_{rollout_id}.pt")]
    assert _dry_run(model, json.dumps(GOOD) + "\n", monkeypatch, *replay) == 2
    assert "error: load data: --load-debug-rollout-data: there is no file" in capsys.readouterr().err
    over = ["--num-rollout", "1", "--start-rollout-id", "1"]
    assert _dry_run(model, json.dumps(GOOD) + "\n", monkeypatch, *replay, *over) == 0
    assert "nothing is left to do" in capsys.readouterr().out


SOURCES = """
def raises(args): raise KeyError("seed")
def nothing(args): pass
class Endless:
    def __init__(self, args): pass
    def get_samples(self, num_samples): return []
class Shy(Endless):
    def __getattr__(self, name): raise RuntimeError(name)
class Uncounted(Endless):
    def __len__(self): raise RuntimeError("no count")
"""


@pytest.mark.parametrize(
    ("source", "status", "expected"),
    [
        ("sources.py:raises", 1, "raised KeyError: 'seed'"),
        ("sys:exit", 1, "called sys.exit(Namespace("),
        ("sources.py:nothing", 2, ": it must make an object with get_samples and add_samples, not NoneType"),
        ("functools:partial", 1, "raised TypeError: the first argument must be callable"),
        ("sources.py:Shy", 2, "asking it for 'num_bad' raised RuntimeError: num_bad"),
        ("sources.py:Uncounted", 1, "raised RuntimeError: no count"),
    ],
)
def test_a_data_source_that_cannot_be_used_is_named(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    status: int,
    expected: str,
) -> None:
    (model.parent / "sources.py").write_text(SOURCES)
    monkeypatch.chdir(model.parent)
    assert _dry_run(model, "", monkeypatch, "--data-source-path", source) == status
    line, *rest = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("train.py: error: load data: --data-source-path ")
    assert expected in line
    assert len(line) < 2000
    assert bool(rest) == (status == 1), "of what it raised the traceback follows"


def test_a_data_source_without_a_length_needs_num_rollout(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.parent / "sources.py").write_text(SOURCES)
    monkeypatch.chdir(model.parent)
    words = ["--data-source-path", "sources.py:Endless"]
    assert _dry_run(model, "", monkeypatch, *words) == 0
    assert "data: prompts, 3 rollouts\nok: the run can start" in capsys.readouterr().out
    args = parse_args()
    args.num_rollout, args.num_epoch = None, 1
    with pytest.raises(BadInputError, match=r"--num-epoch 1: --data-source-path .*Endless has no __len__: give"):
        num_rollout(args, make_data_source(args))


def test_long_paths_are_cut_in_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _dry_run(model, "", monkeypatch, "--load-debug-rollout-data", "x" * 5000) == 2
    error = capsys.readouterr().err
    assert "--load-debug-rollout-data: there is no file" in error
    assert len(error) < 1000
