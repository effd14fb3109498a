"""The tools that make the quickstart's model and data."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import shipped

NUM_GPUS = 0

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_tiny_model = load("make_tiny_model")
make_arithmetic_data = load("make_arithmetic_data")


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    assert make_tiny_model.main([str(directory)]) == 0
    return directory


def test_a_quickstart_that_is_late_names_the_phase_and_the_flag() -> None:
    quickstart = load("quickstart")
    phases = quickstart.Phases(0.3)
    expected = r"not done after 0.005 minutes \(--time-limit\), in the phase 'GRPO': a machine that others use"
    with pytest.raises(quickstart.QuickstartError, match=expected), phases.phase("GRPO"):
        phases.run([sys.executable, "-c", "import time; time.sleep(30)"])


def _left_by_a_quickstart(output: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, after a run that failed when it had written a few files."""
    quickstart = load("quickstart")

    def fail(output: Path, *_: Any) -> None:
        for name in ("hf/config.json", "data/train.jsonl", "result.json"):
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_text("its own")
        (output / "sft").mkdir()
        raise quickstart.QuickstartError("late")

    monkeypatch.setattr(quickstart, "_train", fail)
    with pytest.raises(quickstart.QuickstartError, match="late"):
        quickstart.quickstart(output, 0, "math", quickstart.Phases(1))
    return quickstart


def _files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_a_quickstart_replaces_what_an_earlier_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = _left_by_a_quickstart(tmp_path, monkeypatch)
    quickstart.clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["p.txt", "hf/p.txt", "data/train.jsonl", "mine/p.txt", "sft/mine/", "curve.png"])
def test_a_quickstart_leaves_what_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file or directory that was added, or a file that was changed: nothing is removed."""
    quickstart = _left_by_a_quickstart(tmp_path, monkeypatch)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("mine, not its")
    before = _files(tmp_path)
    for _ in range(2):  # what is refused is not taken for a result afterwards
        with pytest.raises(quickstart.QuickstartError, match=rf"holds .*{name.rstrip('/')}, .* nothing was removed"):
            quickstart.quickstart(tmp_path, 0, "math", quickstart.Phases(1))
        assert _files(tmp_path) == before


@pytest.mark.parametrize("name", ["hf/p.txt", "data/p.txt", "model/config.json"])
def test_a_quickstart_takes_no_name_for_a_proof(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    quickstart = load("quickstart")
    with pytest.raises(quickstart.QuickstartError, match=name):
        quickstart.clear(tmp_path)
    assert _files(tmp_path) == {name: "mine"}


def test_a_link_in_a_results_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "p.txt").write_text("mine")
    quickstart = _left_by_a_quickstart(tmp_path / "output", monkeypatch)
    (tmp_path / "output" / "grpo").symlink_to(tmp_path / "mine")
    with pytest.raises(quickstart.QuickstartError, match="grpo"):
        quickstart.clear(tmp_path / "output")
    assert (tmp_path / "mine" / "p.txt").read_text() == "mine"


def test_problems_to_score_may_have_any_line_separator_of_unicode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    score_arithmetic = load("score_arithmetic")
    rows = [{"prompt": [{"role": "user", "content": f"1{mark}+1"}], "label": "2"} for mark in "\u2028\u2029\x85"]
    (tmp_path / "eval.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    scored: list[Any] = []
    monkeypatch.setattr(score_arithmetic, "score", lambda model, rows, *_: scored.extend(rows) or {"accuracy": 1.0})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["score_arithmetic.py", str(tmp_path / "eval.jsonl"), str(tmp_path)])
    score_arithmetic.main()
    assert scored == rows


@pytest.mark.parametrize("tool", ["make_tiny_model.py", "make_arithmetic_data.py"])
def test_help_needs_no_engine(tool: str) -> None:
    done = subprocess.run([sys.executable, TOOLS / tool, "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "--seed" in done.stdout


def test_the_default_model_is_about_a_million_parameters_and_starts_near_uniform(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert model.config.model_type == "qwen3"
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.0e6
    assert model.config.vocab_size == len(tokenizer)
    tokens = torch.randint(0, len(tokenizer), (4, 32))
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert torch.isfinite(loss)
    assert loss < 1.5 * torch.tensor(float(len(tokenizer))).log()


def test_the_tokenizer_is_lossless_and_a_digit_is_a_token(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = "héllo\n\t 你好 superuser  12+345 <think>\\boxed{7}</think> \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("12+345=")["input_ids"]) == 7
    assert len(tokenizer("\\boxed{46}")["input_ids"]) == 4
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    for name in tokenizer.all_special_tokens:
        assert len(tokenizer(name)["input_ids"]) == 1
    assert None not in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))


def test_the_chat_template_is_short(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "12+34="}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(prompt)["input_ids"]) == 14
    answered = [*messages, {"role": "assistant", "content": "\\boxed{46}"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == prompt + "\\boxed{46}<|im_end|>\n"


def test_a_template_with_tools_is_of_turns_that_agents_can_go_on_from(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from slime.agent.parsing import TAGS, parser_of, tagged_calls
    from slime.agent.rendering import TurnRenderer

    assert make_tiny_model.main([str(tmp_path / "model"), "--tools"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "c7?"}, {"role": "assistant", "content": "42"}]
    plain = tokenizer.apply_chat_template(messages, chat_template=make_tiny_model.CHAT_TEMPLATE, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == plain
    schema = {"type": "object", "properties": {"key": {"type": "string"}, "of": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == (
        "<|im_start|>system\nfind(key, of)\n<|im_end|>\n" + plain
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"key": "c7"}}}
    messages[1] = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    written = tokenizer.apply_chat_template(messages, tokenize=False).split("assistant\n")[1].split("<|im_end|>")[0]
    assert tagged_calls(written) == [{"name": "find", "input": {"key": "c7"}}] * 2
    assert len(tokenizer(written)["input_ids"]) == 2 * 17 + 1
    assert parser_of(tokenizer.get_chat_template()) == TAGS
    renderer = TurnRenderer(tokenizer)
    assert (renderer.why_not(), renderer.why_not(tools=True)) == ("", "")


def test_the_seed_decides_the_weights(model_dir: Path, tmp_path: Path) -> None:
    for name, seed in (("same", "0"), ("other", "1")):
        assert make_tiny_model.main([str(tmp_path / name), "--seed", seed]) == 0
    assert digests(tmp_path / "same") == digests(model_dir)
    other = digests(tmp_path / "other")
    assert other.pop("model.safetensors") != digests(model_dir)["model.safetensors"]
    assert other.items() <= digests(model_dir).items()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3_moe"])
def test_every_architecture_loads_and_runs(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    flags = "--hidden-size 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --intermediate-size 48 --num-experts 4"
    out = tmp_path / arch
    assert make_tiny_model.main([str(out), "--arch", arch, "--dtype", "bfloat16", *flags.split()]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == arch
    assert model.dtype is torch.bfloat16
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-size 130 --num-heads 4", "--hidden-size 130 is not a multiple of --num-heads 4"),
        ("--num-heads 4 --num-kv-heads 3", "--num-heads 4 is not a multiple of --num-kv-heads 3"),
        ("--hidden-size 12 --num-heads 4", "must be even for rotary embeddings"),
        ("--vocab-size 200", "--vocab-size 200 is too small: the tokenizer has 266 tokens"),
        ("--arch qwen3_moe --num-experts 2 --experts-per-token 3", "--experts-per-token 3 > --num-experts 2"),
    ],
)
def test_a_shape_that_does_not_work_is_one_line(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_tiny_model.main([str(tmp_path / "out"), *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_with_files_is_kept_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("mine")
    assert make_tiny_model.main([str(tmp_path)]) == 2
    assert "is not empty; pass --overwrite" in capsys.readouterr().err
    assert make_tiny_model.main([str(tmp_path), "--overwrite"]) == 2
    assert "has other things in it than a model (no config.json)" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_interrupted_model_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "above" / "out"
    assert make_tiny_model.main([str(out)]) == 0
    before = (out / "model.safetensors").read_bytes()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_tiny_model, "save", interrupted)
    assert make_tiny_model.main([str(out), "--overwrite", "--seed", "1"]) == 130
    assert (out / "model.safetensors").read_bytes() == before
    assert make_tiny_model.main([str(tmp_path / "other" / "out")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["above"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_outputs_that_no_rename_can_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (".", str(tmp_path)):
        assert make_tiny_model.main([output, "--overwrite"]) == 2
        assert "is where this was started, or above it: name a directory in it" in capsys.readouterr().err
    assert make_tiny_model.main(["/proc", "--overwrite"]) == 2
    assert "/proc is a mount point" in capsys.readouterr().err
    assert make_tiny_model.main(["/proc/x"]) == 2
    assert "make_tiny_model.py: " in capsys.readouterr().err
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    assert make_tiny_model.main([str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target" / "config.json").is_file()


def test_published_shapes_are_those_of_the_shipped_configs(tmp_path: Path) -> None:
    """Or train.py would refuse the flags of scripts/models/*.sh with such a model."""
    from slime.models import hf_config, shape_from_hf

    shipped_names = {name.lower(): name for name in shipped.CHECKPOINTS}
    for name in make_tiny_model.PUBLISHED:
        assert make_tiny_model.main([str(tmp_path / name), "--like", name]) == 0
        published = shape_from_hf(shipped.config(shipped_names[name]))
        assert shape_from_hf(hf_config(tmp_path / name)) == published, name


def test_a_published_shape_with_fewer_layers(tmp_path: Path) -> None:
    from slime.models import hf_config, shape_from_hf

    whole, part = tmp_path / "whole", tmp_path / "part"
    assert make_tiny_model.main([str(whole), "--like", "qwen3-30b-a3b"]) == 0
    assert make_tiny_model.main([str(part), "--like", "qwen3-30b-a3b", "--num-layers", "12"]) == 0
    published, shorter = (shape_from_hf(hf_config(directory)) for directory in (whole, part))
    assert (published["num_layers"], shorter["num_layers"]) == (48, 12)
    assert {name for name in published if published[name] != shorter[name]} == {"num_layers", "moe_layer_freq"}


def test_a_published_shape_and_a_size_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        make_tiny_model.main([str(tmp_path / "out"), "--like", "qwen3-4b", "--hidden-size", "64", "--seed", "1"])
    assert done.value.code == 2
    error = "--like qwen3-4b says the whole shape and has no weights: drop it or --hidden-size, --seed"
    assert f"error: {error}\n" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_weights_are_as_readable_as_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert make_tiny_model.main([str(tmp_path / "out"), "--num-layers", "1", "--hidden-size", "32"]) == 0
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, mode)
    assert "model.safetensors" in modes


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("symbol", ["+", "-", "*"])
def test_data_is_right_and_disjoint(symbol: str, tmp_path: Path) -> None:
    assert make_arithmetic_data.main([str(tmp_path), "--operator", symbol, "--seed", "3"]) == 0
    solve = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[symbol]
    problems: dict[str, set[tuple[int, ...]]] = {}
    for name in ("sft", "train", "eval"):
        problems[name] = set()
        for row in rows(tmp_path / f"{name}.jsonl"):
            question = (row["messages"] if name == "sft" else row["prompt"])[0]
            assert question["role"] == "user"
            left, right = re.fullmatch(rf"(\d\d){re.escape(symbol)}(\d\d)=", question["content"]).groups()  # type: ignore[union-attr]
            a, b = int(left), int(right)
            problems[name].add((a, b) if symbol == "-" else (min(a, b), max(a, b)))
            if name == "sft":
                assert row["messages"][1] == {"role": "assistant", "content": f"\\boxed{{{solve(a, b)}}}"}
            else:
                assert row["label"] == str(solve(a, b))
            assert (row["metadata"].get("rm_type") == "math") == (name == "eval")
    assert len(rows(tmp_path / "eval.jsonl")) == len(problems["eval"]) == 512
    assert len(problems["sft"]) > 1500
    assert len(problems["train"]) > 1500
    assert not (problems["sft"] & problems["train"] | problems["sft"] & problems["eval"])
    assert not problems["train"] & problems["eval"]


def test_the_seed_decides_the_data(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert make_arithmetic_data.main([str(tmp_path / name), "--seed", seed]) == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert not set(digests(tmp_path / "a").values()) & set(digests(tmp_path / "c").values())


def test_a_problem_in_two_files_is_found(tmp_path: Path) -> None:
    assert make_arithmetic_data.main([str(tmp_path)]) == 0
    stray = make_arithmetic_data.row(*reversed(rows(tmp_path / "eval.jsonl")[7]["metadata"]["operands"]), "+", "sft")
    with (tmp_path / "sft.jsonl").open("a") as file:
        file.write(json.dumps(stray) + "\n")
    with pytest.raises(ValueError, match=r"is in sft\.jsonl and in eval\.jsonl"):
        make_arithmetic_data.check_disjoint(tmp_path)


def test_asking_for_more_than_there_is_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_arithmetic_data.main([str(tmp_path), "--digits", "1", "--num-eval", "60"]) == 2
    assert "no problem is left for sft.jsonl: there are 45" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        make_arithmetic_data.main([str(tmp_path), "--sft-fraction", "1.5"])
    assert "--sft-fraction 1.5 is not between 0 and 1" in capsys.readouterr().err
