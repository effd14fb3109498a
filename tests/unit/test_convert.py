"""Converting checkpoints: names and places, files written tensor by tensor, quantisation, what is left of a failure."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from slime.convert import dcp_to_hf, fp8, running
from slime.convert.hf_files import HFOutput, Spec, cut_into_shards, natural
from slime.files import atomic_io
from slime.files.block_scaled import num_blocks
from slime.files.storage import amount
from slime.utils.errors import BadInputError
from tests.parallel import tiny
from tests.unit.test_tools import TOOLS, load

NUM_GPUS = 0

SETTINGS: dict[str, Any] = {"shard_bytes": 2**30, "workers": 2, "force": False}
fsdp_tool, fp8_tool = load("convert_fsdp_to_hf"), load("convert_hf_to_fp8")
bf16_tool, torch_dist_tool = load("convert_fp8_to_bf16"), load("convert_torch_dist_to_hf")


def test_the_tools_take_the_flags_of_upstreams(capsys: pytest.CaptureFixture[str]) -> None:
    directories = ["--model-dir", "a", "--save-dir", "b"]
    options = fp8_tool.parse(
        [*directories, *["--strategy", "block", "--block-size", "128", "128", "--max-workers", "4"]]
    )
    assert (list(options.block_size), options.workers) == ([128, 128], 4)
    for strategy in ("channel", "tensor"):
        with pytest.raises(SystemExit) as stop:
            fp8_tool.parse([*directories, "--strategy", strategy])
        assert stop.value.code == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"error: argument --strategy: {strategy} is not available: scales are of blocks" in line
        assert "--block-size" in line
    options = bf16_tool.parse(["--input-fp8-hf-path", "a", "--output-bf16-hf-path", "b"])
    assert (options.model_dir, options.save_dir) == (Path("a"), Path("b"))
    options = torch_dist_tool.parse(
        ["--input-dir", "a", "--output-dir", "b", "--origin-hf-dir", "c", "--model-name", "qwen3"]
    )
    printed = capsys.readouterr().err
    assert printed.endswith("warning: --model-name is ignored: config.json of --origin-hf-dir says which model it is\n")
    assert printed.count("\n") == 1


# ---- files


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    """Byte for byte, whatever the order of writing."""
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "ü.scalar": torch.tensor(3.0),
        "c.fp8": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    out = HFOutput(tmp_path / "out", {name: Spec.of(tensor) for name, tensor in tensors.items()}, 2**20)
    for name in reversed(tensors):
        out.write(name, tensors[name])
    out.close()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_a_tensor_that_was_never_written_is_noticed(tmp_path: Path) -> None:
    out = HFOutput(tmp_path, {"a": Spec((2,), torch.float32)}, 2**20)
    with pytest.raises(AssertionError, match="never written"):
        out.finish(tmp_path)
    with pytest.raises(AssertionError, match="was announced"):
        out.write("a", torch.zeros(2, dtype=torch.bfloat16))
    out.close()


def test_shards_follow_the_layers() -> None:
    specs = {f"model.layers.{i}.w": Spec((100,), torch.int8) for i in reversed(range(12))} | {
        "big": Spec((1000,), torch.int8)
    }
    shards = cut_into_shards(specs, 250)
    assert shards[0] == ["big"]
    assert shards[1:3] == [["model.layers.0.w", "model.layers.1.w"], ["model.layers.2.w", "model.layers.3.w"]]
    assert [name for shard in shards for name in shard] == sorted(specs, key=natural)


@pytest.mark.parametrize(
    ("text", "count"), [("5GiB", 5 * 2**30), ("500MB", 500_000_000), ("1.5k", 1500), ("12", 12), ("7B", 7)]
)
def test_byte_counts(text: str, count: int) -> None:
    assert running.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "5GG", "-1", "0"])
def test_bad_byte_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        running.byte_count(text)


# ---- FSDP


@pytest.mark.parametrize("prefix", ["", "model_state.model."])
@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_moe"])
def test_fsdp_to_hf(prefix: str, kind: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    """With the names that transformers has in memory, its experts of a layer in one tensor."""
    model = tiny.model(kind).state_dict()
    other = {"optim_state." + name: tensor for name, tensor in model.items()}
    dcp.save({prefix + name: t for name, t in model.items()} | other, checkpoint_id=tmp_path / "iter_1" / "model")
    words = ["--input-dir", tmp_path / "iter_1", "--output-dir", tmp_path / "out", "--origin-hf-dir", models(kind)]
    assert fsdp_tool.main([*map(str, words)]) == 0
    for file in models(kind).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_what_is_no_fsdp_checkpoint(models: Callable[[str], Path], tmp_path: Path) -> None:
    origin, out = models("qwen3"), tmp_path / "out"
    with pytest.raises(BadInputError, match=r"there is no \.metadata in"):
        dcp_to_hf.convert(tmp_path, out, origin, **SETTINGS)
    state = dict(tiny.model("qwen3").state_dict())
    dcp.save({**state, "model.norm.weight": torch.zeros(65)}, checkpoint_id=tmp_path / "wide")
    with pytest.raises(BadInputError, match=r"makes model\.norm\.weight \[65\], and that of .* is \[64\]"):
        dcp_to_hf.convert(tmp_path / "wide", out, origin, **SETTINGS)
    dcp.save({name: t for name, t in state.items() if "norm" not in name}, checkpoint_id=tmp_path / "some")
    with pytest.raises(BadInputError, match=r"has no tensors for model\.layers\.0\.input_layernorm\.weight"):
        dcp_to_hf.convert(tmp_path / "some", out, origin, **SETTINGS)
    (tmp_path / "some" / "common.pt").touch()
    with pytest.raises(BadInputError, match="use tools/convert_torch_dist_to_hf"):
        dcp_to_hf.convert(tmp_path / "some", out, origin, **SETTINGS)


# ---- fp8


def quantised_by_hand(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block after block."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            own = weight[place].float()
            scales[i, j] = own.abs().max() / 448 if own.any() else 1.0
            values[place] = (own / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("shape", [(256, 128), (131, 200), (64, 64), (1, 300)])
def test_quantisation(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    weight[: shape[0] // 2, :128] = 0
    values, scales = fp8.quantise(weight, (128, 128))
    expected, expected_scales = quantised_by_hand(weight, 128)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert scales.shape == num_blocks(shape, (128, 128))
    restored = values.float() * scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    error, largest = (restored - weight.float()).abs(), float(weight.abs().max())
    # Three bits of mantissa: half of the last is a 16th; below the smallest normal number, steps are even.
    assert bool((error <= weight.float().abs() / 16 + largest / 448 * 2**-10).all())


def test_fp8_model(models: Callable[[str], Path], tmp_path: Path) -> None:
    origin, out = models("qwen3_moe"), tmp_path / "fp8"
    assert fp8_tool.main(["--model-dir", str(origin), "--save-dir", str(out)]) == 0
    before, after = load_file(origin / "model.safetensors"), load_file(out / "model.safetensors")
    kept = {name for name in before if torch.equal(before[name], after[name].to(before[name].dtype))}
    assert kept == {
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *(name for name in before if "norm" in name or "mlp.gate.weight" in name),
    }
    for name in before.keys() - kept:
        values, scales = quantised_by_hand(before[name], 128)
        assert torch.equal(after[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(after[name + "_scale_inv"], scales)
    assert len(after) == len(before) + len(before.keys() - kept)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (0, 2, 3))],
    }
    assert config == json.loads((origin / "config.json").read_text())
    with pytest.raises(BadInputError, match="quantised already"):
        fp8.convert(out, tmp_path / "again", block=(128, 128), **SETTINGS)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2**10, "1 KiB"), (3 * 2**19, "1.5 MiB"), (5 * 2**30, "5 GiB")],
)
def test_small_amounts_are_not_nothing(count: int, text: str) -> None:
    assert amount(count) == text


def test_the_last_line_says_where_the_output_is(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    output = tmp_path / "out"
    words = ["--model-dir", str(models("qwen3")), "--save-dir", str(output), "--force"]
    for rank, printed in (("0", f"convert_hf_to_fp8.py: wrote {output}\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert fp8_tool.main(words) == 0
        assert capsys.readouterr().out == printed


# ---- what a conversion that does not end leaves


def test_a_full_disk_is_one_line(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # The headers, which come first, still fit.
    begin = HFOutput._begin_file

    def begin_then_fill(*words: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            begin(*words)

    pwrite = os.pwrite
    monkeypatch.setattr(HFOutput, "_begin_file", begin_then_fill)
    monkeypatch.setattr(os, "pwrite", full)
    assert fp8_tool.main(["--model-dir", str(models("qwen3")), "--save-dir", str(tmp_path / "out")]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert line.startswith(f"convert_hf_to_fp8.py: error: output {tmp_path / 'out'}: the disk is full (")
    assert ".out.tmp/model.safetensors); " in line
    assert line.endswith("free some space there, or name another directory; it was not made")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_not_said_of_the_output_and_that_it_was_not_made_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/model.safetensors")

    assert running.main("convert.py", convert, tmp_path / "out") == 1
    line = f"convert.py: error: [Errno 5] Input/output error: '/data/model.safetensors'; {tmp_path}/out was not made\n"
    assert capsys.readouterr().err == line


DIES = """
import os, signal, sys
sys.path.insert(0, {root!r})
from slime.convert.hf_files import HFOutput
write, calls = HFOutput.write, []
def dying(self, name, tensor):
    write(self, name, tensor)
    calls.append(name)
    if len(calls) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
HFOutput.write = dying
from tools import convert_hf_to_fp8
convert_hf_to_fp8.main(sys.argv[1:])
"""


def test_killed_in_the_middle(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing is under the output's name; the next conversion removes what was written."""
    words = ["--model-dir", str(models("qwen3")), "--save-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", DIES.format(root=str(TOOLS.parent)), *words]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".out.tmp"]
    assert not (tmp_path / ".out.tmp" / "config.json").exists()
    assert fp8_tool.main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_one_line_and_leaves_nothing(
    number: int,
    status: int,
    models: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Not even the directories above the output."""
    write, handler = HFOutput.write, signal.getsignal(signal.SIGTERM)

    def interrupted(self: HFOutput, name: str, tensor: torch.Tensor) -> None:
        write(self, name, tensor)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(HFOutput, "write", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    words = ["--model-dir", str(models("qwen3")), "--save-dir", str(tmp_path / "new" / "out")]
    capsys.readouterr()  # transformers tells how it writes the model
    assert fp8_tool.main(words) == status
    assert capsys.readouterr().err == "convert_hf_to_fp8.py: interrupted\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_does_not_end_the_cleaning_up(
    first: int, second: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    discard = atomic_io.discard_directory

    def impatient(final: Path) -> None:
        os.kill(os.getpid(), second)
        discard(final)

    def convert() -> None:
        with atomic_io.written_directory(tmp_path / "new" / "out") as directory:
            (directory / "begun").touch()
            monkeypatch.setattr(atomic_io, "discard_directory", impatient)
            os.kill(os.getpid(), first)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    assert running.main("x.py", convert, tmp_path) == status
    assert capsys.readouterr().err == "x.py: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_is_swallowed_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As Python swallows what is raised while an object is finalised. The status tells of one that did nothing."""
    monkeypatch.setattr(running, "_CLEANING_S", 0.0)
    done = []

    def convert(times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        done.append(times)

    def again() -> None:
        convert(2)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    assert running.main("x.py", again, tmp_path) == 130
    assert capsys.readouterr() == ("", "x.py: interrupted\n")
    assert running.main("x.py", lambda: convert(1), tmp_path) == 130
    assert capsys.readouterr() == (f"x.py: wrote {tmp_path}\n", "")
    assert done == [2, 1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, None)])
def test_an_interrupt_that_torch_holds_back_is_no_traceback(
    number: int | None, status: int | None, tmp_path: Path, capsys: Any
) -> None:
    """A rank is interrupted while it writes, and then told that the others, interrupted too, have gone."""

    def convert() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            if number is not None:
                os.kill(os.getpid(), number)
        raise RuntimeError("Connection closed by peer")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if status is None:
        with pytest.raises(RuntimeError, match="Connection closed"):
            running.main("x.py", convert, tmp_path)
        return
    assert running.main("x.py", convert, tmp_path) == status
    assert capsys.readouterr().err == "x.py: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_output_that_was_half_replaced_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when the old one has moved away and the new one is not there yet."""
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == ".out.tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), running.staged(tmp_path / "out", 0):
        pass
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["out", "out/old"]


def test_what_was_there_and_what_others_put_there_stays(tmp_path: Path) -> None:
    def interrupted() -> None:
        with running.staged(tmp_path / "mine" / "new" / "newer" / "out", 0) as directory:
            (directory.parents[1] / "notes.txt").touch()
            raise KeyboardInterrupt

    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == ["mine", "mine/new", "mine/new/notes.txt"]


@pytest.mark.parametrize(
    ("cause", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (BadInputError("x is not finite"), BadInputError)],
)
def test_torch_tells_an_interrupt_from_an_error(
    cause: BaseException, expected: type[BaseException], tmp_path: Path
) -> None:
    """dcp.save wraps either in an exception of its own."""
    from slime.backends.megatron import hf_to_torch_dist

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> dcp.SavePlan:
            raise cause

    with pytest.raises(expected, match=str(cause) or None):
        hf_to_torch_dist._save(tmp_path / "out", Planner(), running.Progress("x", 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("tool", [torch_dist_tool, fsdp_tool, fp8_tool])
def test_help(tool: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as done:
        tool.main(["--help"])
    assert done.value.code == 0
    assert "--force" in capsys.readouterr().out
