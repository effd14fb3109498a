"""scripts/models/*.sh and scripts/run-*.sh: what bash makes of them passes --dry-run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slime.driver.preflight.dry_run import dry_run
from slime.entry.arguments import parse_args
from tests import shipped
from tests.command_line import write_headers
from tests.documents import DOCS, example
from tests.recorder import SCRIPTS, recorded, run, write_recorder
from tests.small_rollout import write_tokenizer

NUM_GPUS = 0

RUNS = sorted(path.name for path in SCRIPTS.glob("run-*.sh"))
MODELS = sorted(path.stem for path in shipped.SCRIPTS.glob("*.sh"))
MODEL_OF = {"run-quickstart-grpo.sh": "qwen3-0.6B", "run-quickstart-sft.sh": "qwen3-0.6B"}
"""The model of a run that takes its shape from config.json alone; another one's is that of the script it sources."""
OF_EXAMPLES = {
    "retool/retool_qwen3_4b_sft.sh": "qwen3-4B-Instruct-2507",
    "retool/retool_qwen3_4b_rl.sh": "qwen3-4B-Instruct-2507",
    "train_infer_mismatch_helper/run-qwen3-4b-mis.sh": "qwen3-4B",
}
"""Scripts of examples for published models, by upstream's names."""
MINIMAL = """
--num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 --rm-type math --colocate
--actor-num-gpus-per-node 1 --input-key prompt --label-key label --apply-chat-template
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer, prompts, conversations, and what stands in for python3."""
    directory = tmp_path_factory.mktemp("launch")
    write_tokenizer(directory / "tokenizer")
    question = [{"role": "user", "content": "1+1="}]
    demonstration = {"demonstration": [["<code>1+1</code>", True], ["<interpreter>2</interpreter>", False]]}
    rows = {
        "prompts": {"prompt": question, "label": "2", "metadata": demonstration},
        "chats": {"messages": [*question, {"role": "assistant", "content": "2"}]},
    }
    for name, row in rows.items():
        (directory / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    write_recorder(directory)
    return directory


def checkpoint(files: Path, name: str) -> Path:
    """A Hugging Face directory with the model's config.json, a tokenizer, and a file that says which weights it has."""
    directory = files / name
    if not directory.is_dir():
        shutil.copytree(files / "tokenizer", directory)
        shutil.copy(shipped.CONFIGS / name / "config.json", directory / "config.json")
        write_headers(directory)
    return directory


def check(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """What --dry-run prints."""
    dry_run(parse_args([*words, "--run-dir", str(tmp_path / "run"), "--dry-run"]))
    out = capsys.readouterr().out
    assert re.search(r"^data: 4 prompts", out, re.MULTILINE), out
    return out


def sourced_by(script: str) -> list[str]:
    """The models of a run's script."""
    return re.findall(r"scripts/models/(.+)\.sh", (SCRIPTS / script).read_text())


SOURCED = {model for script in RUNS for model in sourced_by(script)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SOURCED)) for name in MODELS]
)  # in CI those of runs pass with them
def test_model_scripts_pass_dry_run(name: str, files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expand = 'source "$1"; printf "%s\\n" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}"'
    command = ["bash", "-euc", expand, "bash", str(shipped.SCRIPTS / f"{name}.sh")]
    environment = {"HF_CHECKPOINT": str(checkpoint(files, name))}
    words = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment).stdout
    check([*words.split(), *MINIMAL.split(), "--prompt-data", str(files / "prompts.jsonl")], capsys, tmp_path)


@pytest.mark.parametrize("script", RUNS)
def test_run_scripts_pass_dry_run(
    script: str, files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sourced = sourced_by(script)
    model = checkpoint(files, sourced[0] if sourced else MODEL_OF[script])
    output = tmp_path / "output"
    (output / "data").mkdir(parents=True)
    (output / "sft").mkdir()
    for link in ("model", "sft/hf"):
        (output / link).symlink_to(model)
    for name, source in {"train": "prompts", "eval": "prompts", "sft": "chats"}.items():
        shutil.copy(files / f"{source}.jsonl", output / "data" / f"{name}.jsonl")
    variables = {
        "HF_CHECKPOINT": str(model),
        "PROMPT_DATA": str(files / ("chats.jsonl" if "sft" in script else "prompts.jsonl")),
        "EVAL_DATA": str(files / "prompts.jsonl"),
        "OUTPUT_DIR": str(output),
        "SAVE_DIR": str(output),
    }
    ran, (words,) = run(script, files, tmp_path / "record", "--seed", "7", DRY_RUN="1", **variables)
    assert (ran.returncode, words[-3:]) == (0, ["--seed", "7", "--dry-run"]), ran.stderr
    assert Path(words[0]) == shipped.ROOT / "train.py"
    assert f"{shipped.ROOT}/train.py \\\n   --" in ran.stdout
    monkeypatch.setattr("slime.fleet.placement.core_shortage", lambda args: None)
    assert "slot 0: training rank 0" in check(words[1:], capsys, tmp_path)


@pytest.mark.parametrize(("script", "model"), OF_EXAMPLES.items())
def test_scripts_of_examples_pass_dry_run(
    script: str, model: str, files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variables = {name: str(files / "prompts.jsonl") for name in ("PROMPT_DATA", "EVAL_DATA")}
    variables |= {"HF_CHECKPOINT": str(checkpoint(files, model)), "SAVE_DIR": str(tmp_path / "output")}
    script = str(shipped.ROOT / "examples" / script)
    ran, (words,) = run(script, files, tmp_path / "record", "--seed", "7", DRY_RUN="1", **variables)
    assert (ran.returncode, words[-3:]) == (0, ["--seed", "7", "--dry-run"]), ran.stderr
    check(words[1:], capsys, tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen3-235B-A22B", *(pytest.param(n, marks=pytest.mark.full) for n in ("deepseek-r1", "kimi-k2-Instruct"))]
)
def test_several_nodes_may_have_other_than_eight_gpus(
    name: str, files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (model,) = sourced_by(f"run-{name}.sh")
    variables = {"HF_CHECKPOINT": str(checkpoint(files, model)), "SAVE_DIR": str(tmp_path / "output")}
    variables |= {data: str(files / "prompts.jsonl") for data in ("PROMPT_DATA", "EVAL_DATA")}
    _, (eight,) = run(f"run-{name}.sh", files, tmp_path / "eight", DRY_RUN="1", **variables)
    _, (four,) = run(f"run-{name}.sh", files, tmp_path / "four", DRY_RUN="1", NUM_GPUS="4", **variables)
    for flag in ("--actor-num-gpus-per-node", "--rollout-num-gpus-per-engine", "--expert-model-parallel-size"):
        assert 2 * int(four[four.index(flag) + 1]) == int(eight[eight.index(flag) + 1])
    check(four[1:], capsys, tmp_path)


@pytest.mark.parametrize("name", ["deepseek-r1", "kimi-k2-Instruct"])
def test_models_in_float8_start_from_what_is_published(name: str, files: Path, tmp_path: Path) -> None:
    _, (words,) = run(f"run-{name}.sh", files, tmp_path / "record", NUM_NODES="1")
    assert words[words.index("--hf-checkpoint") + 1].lower().endswith(f"/{name.lower()}")
    assert "--use-tis" in words


@pytest.mark.parametrize("name", ["moonlight-16B-A3B", "kimi-k2-Instruct"])
def test_models_whose_tokenizer_is_code_are_looked_for_in_a_directory(name: str, files: Path, tmp_path: Path) -> None:
    _, (words,) = run(f"run-{name}.sh", files, tmp_path / "record", NUM_NODES="1")
    assert words[words.index("--hf-checkpoint") + 1].startswith("/root/")


@pytest.mark.parametrize("script", RUNS)
def test_relative_paths_are_those_of_where_the_script_is_started(
    script: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {name: f"mine/{name}" for name in ("HF_CHECKPOINT", "PROMPT_DATA", "EVAL_DATA", "OUTPUT_DIR", "SAVE_DIR")}
    where = tmp_path / "where"
    ran, (words,) = run(script, files, tmp_path / "record", **places, NUM_NODES="1", RECORD_WHERE=str(where))
    assert ran.returncode == 0, ran.stderr
    assert [word for word in words if word.startswith("mine/")]
    assert where.read_text() == str(tmp_path)


@pytest.mark.parametrize("script", MODEL_OF)
def test_from_anywhere_the_quickstarts_scripts_find_its_results(
    script: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, (words,) = run(script, files, tmp_path / "record")
    results = words[words.index("--prompt-data") + 1].removesuffix(".jsonl")
    assert Path(results).parent == shipped.ROOT / "outputs" / "quickstart" / "data"


@pytest.mark.parametrize("page", ["launch.md", "zh/launch.md"])
def test_the_page_names_every_run_and_shows_a_script_that_works(
    page: str, files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (DOCS / page).read_text()
    assert [script for script in RUNS if f"`{script}`" not in text] == []
    own = example(page, "launch train.py", "bash")
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(tmp_path / "record")}
    (model,) = re.findall(r"scripts/models/(.+?)\.sh", own)
    environment |= {"HF_CHECKPOINT": str(checkpoint(files, model))}
    environment |= {data: str(files / "prompts.jsonl") for data in ("PROMPT_DATA", "EVAL_DATA")}
    command = ["bash", "-c", own, "bash", "--seed", "7"]
    subprocess.run(command, timeout=300, check=True, env=environment, cwd=shipped.ROOT)
    (words,) = recorded(tmp_path / "record")
    assert words[-2:] == ["--seed", "7"]
    assert {"--num-layers", "--hf-checkpoint", "--save", "--rm-type"} <= set(words)
    check([*words[1:], "--save", str(tmp_path / "save")], capsys, tmp_path)
