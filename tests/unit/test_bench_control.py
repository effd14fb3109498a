"""The benchmark of the control plane: its engines are believed by the real proof of a push."""

from __future__ import annotations

import pytest

from slime.backends.sglang.loads.loaded import Loaded
from tools import bench_control
from tools.benchmarks import control

NUM_GPUS = 0


def test_engines_say_what_a_push_has_sent() -> None:
    """In another process, over HTTP: anything else would fail the push."""
    found = control.measure(engines=3, ranks=2, parameters=5, pushes=1)
    assert found.processor_s > 0
    assert found.wall_s > 0
    told = control.answers(2, 5)["/weights_checker"]["ranks"]
    assert [rank["parallelism_info"]["tp_rank"] for rank in told] == [0, 1]
    assert len(Loaded.of_strings(told[0]["checksums"]).parameters) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engines 8,x", "--engines 8,x is not a list of numbers such as 8,16"),
        ("--ranks -1", "--ranks -1: -1 is below 0"),
        ("--width 0", "--width 0 is not above 0"),
    ],
)
def test_a_wrong_command_line_is_told(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_control.parse(words.split())
    assert message in capsys.readouterr().err
    assert bench_control.parse([]).engines == [8, 16, 32, 64]
    assert bench_control.parse(["--ranks", "0"]).ranks == []
