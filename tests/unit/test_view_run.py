"""tools/view_run.py: what it reads of a run's directory, what it makes of it, and its errors."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample, Status
from slime.utils.errors import BadInputError
from tests.recorded_run import HOSTILE, SPIKE, START, append, metric_lines, write_metrics, write_run, write_verdict
from tests.saved_rollouts import write_rollout
from tests.served import get, served
from tools import view_run
from tools.viewing.curves import Curve, about, downsampled, points, smoothed
from tools.viewing.run import RunSite
from tools.viewing.tail import Tail
from tools.web.server import Server

NUM_GPUS = 0
PAGES = ("page.html", "page.js", "charts.js")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def server(run_dir: Path) -> Iterator[Server]:
    samples = [
        Sample(group_index=i // 2, index=i, prompt="?", tokens=[1] * (3 + i), response_length=1 + i, reward=reward)
        for i, reward in enumerate((1.0, 0.0, 0.5, 0.5, None))
    ]
    samples[1].status, samples[4].response = Status.TRUNCATED, HOSTILE
    write_rollout(run_dir / "rollout_data" / "0.pt", 0, samples)
    write_rollout(run_dir / "rollout_data" / "eval_1.pt", 0, samples[:1])
    with served(RunSite(run_dir)) as server:
        yield server


# ---- lines that are appended ----


def lines_of(tail: Tail) -> list[str]:
    return [line.decode().strip() for _, _, line in tail.new()]


def test_each_line_is_read_once_and_half_a_line_is_held_back(tmp_path: Path) -> None:
    file, tail = tmp_path / "a", Tail(tmp_path / "a")
    assert lines_of(tail) == []
    with file.open("w") as output:
        for text, new in (("1\n2", ["1"]), ("", []), ("2\n3\n", ["22", "3"]), ("4", []), ("\n", ["4"])):
            output.write(text)
            output.flush()
            assert lines_of(tail) == new
    file.write_text("5\n")  # written anew
    assert lines_of(tail) == ["5"]


def test_a_file_that_became_too_long_is_read_to_its_end(tmp_path: Path) -> None:
    file, tail = tmp_path / "a", Tail(tmp_path / "a")
    file.write_text("1\n")
    assert lines_of(tail) == ["1"]
    with file.open("a") as output:
        output.write("2\n")
    file.rename(tmp_path / "a.1")
    file.write_text("3\n")
    assert lines_of(tail) == ["2", "3"]


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{i}\n" for i in range(1000)))
    assert lines_of(Tail(tmp_path / "a", last=8)) == ["998", "999"]


# ---- curves ----


@pytest.mark.parametrize("spike", [0, 1, 4999, 5000, 9998, 9999])
@pytest.mark.parametrize("size", [1e6, -1e6])
def test_spikes_stay(spike: int, size: float) -> None:
    y = [math.sin(i) for i in range(10_000)]
    y[spike] = size
    places = list(downsampled(y, 100))
    assert spike in places
    assert places == sorted(set(places))
    assert len(places) <= 202
    assert {0, 9999} <= set(places)


def test_few_values_are_all_kept_and_what_is_not_finite_is_a_gap() -> None:
    assert list(downsampled([1.0, 3.0, 2.0], 2)) == [0, 1, 2]
    curve = Curve("train/step", array("d", range(6)), array("d", [1, math.nan, 2, math.inf, math.nan, 3]))
    made = points(curve, 100, -math.inf, math.inf)
    assert made == {"x": [0, 1, 2, 3, 4, 5], "y": [1, None, 2, None, None, 3], "bad": [1, 3, 4]}
    assert points(curve, 100, 2, 3)["x"] == [2, 3]
    assert None not in points(curve, 1, -math.inf, math.inf)["y"]


def test_smoothing_is_an_average_without_a_bias_to_zero() -> None:
    assert list(smoothed([5.0] * 4, 0.9)) == pytest.approx([5.0] * 4)
    first, second, third = smoothed([1.0, 3.0, math.nan], 0.5)
    assert (first, second, third) == pytest.approx((1.0, (0.5 * 1 + 1 * 3) / 1.5, (0.5 * 1 + 1 * 3) / 1.5))
    # A range of a curve is smoothed as the whole is.
    curve = Curve("step", array("d", range(9)), array("d", [i**2 for i in range(9)]))
    whole = points(curve, 100, 0, 9, 0.8)["smooth"]["y"]
    assert points(curve, 100, 5, 9, 0.8)["smooth"]["y"] == whole[5:]


def test_what_is_done_again_takes_the_place_of_what_was_done_first(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(10))
    append(tmp_path / "metrics.jsonl", ({**line, "train/loss": 9.0} for line in metric_lines(range(6, 8))))
    site = RunSite(tmp_path)
    loss = site.answer("/api/curves", {"keys": "train/loss"})["run"]["train/loss"]
    assert loss["x"] == list(range(8))
    assert loss["y"][6:] == [9.0, 9.0]
    assert site.answer("/api/run", {})["steps"] == [0, 7, 8]


def test_the_registry_says_what_a_metric_is() -> None:
    assert about("rollout/num_rollouts")["unit"] == "responses"  # of two keys in one row, with a unit each
    assert about("eval/sums-pass@8")["unit"] == "chance"
    assert about("eval/sums-avg@2")["what"] == about("eval/sums")["what"]  # where the table says "the same"
    said = about("rollout/prompts_read")["what"]
    assert "where every prompt is" in said
    assert "](" not in said
    assert about("mine/own") == {"unit": "", "what": "", "when": ""}


def test_charts_are_grouped_by_prefix_and_statistics_share_one(run_dir: Path) -> None:
    append(run_dir / "metrics.jsonl", [{"rollout/step": 20, "mine": 1, "time": 1.0}])
    charts = RunSite(run_dir).answer("/api/run", {})["charts"]
    assert list(dict.fromkeys(chart["group"] for chart in charts)) == ["eval", "rollout", "train", "perf", "mine"]
    of_perf = [chart["title"] for chart in charts if chart["group"] == "perf"]
    assert of_perf[0] == "perf/rollout_time"  # as in the registry, and not by the alphabet
    assert of_perf.index("perf/wait_for_rollout_time") < of_perf.index("perf/update_weights_time")
    (lengths,) = [chart["keys"] for chart in charts if chart["title"] == "rollout/response_len"]
    assert lengths == [f"rollout/response_len/{which}" for which in ("max", "mean", "min")]
    assert not [chart for chart in charts if "time" in chart["keys"]]


# ---- the server ----


def test_curves_of_both_runs(run_dir: Path, tmp_path: Path) -> None:
    write_metrics(tmp_path / "other", range(5))
    with served(RunSite(run_dir, other=tmp_path / "other")) as server:
        assert get(server, "/api/run")[2]["compare"] == "other"
        answer = get(server, "/api/curves", keys="train/loss,train/grad_norm,none", buckets=3)[2]
        assert set(answer["run"]) == {"train/loss", "train/grad_norm"}
        assert max(answer["run"]["train/loss"]["y"]) == SPIKE[1]
        assert answer["run"]["train/grad_norm"]["bad"] == [3]
        assert answer["other"]["train/loss"]["x"] == [0, 1, 2, 3, 4]


def test_all_that_is_served_needs_the_token(server: Server) -> None:
    for path in (*server.site.pages, *server.site.routes):
        assert get(server, path, headers={})[0] == 403
    for path in server.site.pages:
        assert get(server, path)[0] == 200


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/api/curves?keys=train/loss&buckets=x", "buckets='x' is not a number from 1 to 2000"),
        ("/api/curves?keys=train/loss&buckets=100000", "buckets='100000'"),
        ("/api/curves?keys=train/loss&smoothing=1", "smoothing='1'"),
        ("/api/step?step=99", "there is no step 99"),
        ("/api/lanes?first=50&last=60", "no spans of rollouts 50 to 60; there are those of 0 to 19"),
        ("/api/rewards?rollout=../config.yaml", "there is no rollout '../config.yaml'"),
    ],
)
def test_a_wrong_question_gets_an_error(server: Server, path: str, complaint: str) -> None:
    status, _, answer = get(server, path)
    assert status == 400
    assert complaint in answer["error"]


def test_rewards_by_group(server: Server) -> None:
    answer = get(server, "/api/rewards")[2]
    assert (answer["names"], answer["name"]) == (["0.pt", "eval_1.pt"], "0.pt")
    assert (answer["zero_variance"], answer["several"], answer["count"]) == (1, 2, 2)
    assert answer["points"] == [[1, 1.0, 0], [2, 0.0, 1], [3, 0.5, 2], [4, 0.5, 3]]
    assert [(g["least"], g["mean"], g["largest"]) for g in answer["groups"]] == [(0.0, 0.5, 1.0), (0.5, 0.5, 0.5)]
    assert (answer["without_reward"], answer["statuses"]["truncated"]) == (1, 1)
    assert get(server, "/api/rollouts")[2]["names"] == ["0.pt", "eval_1.pt"]
    assert get(server, "/api/sample", rollout="0.pt", place=4)[2]["fields"]["response"] == HOSTILE


def test_rollouts_are_found_where_the_options_say_also_when_the_run_was_moved(run_dir: Path, tmp_path: Path) -> None:
    saved = [Sample(tokens=[1, 2], response_length=1, reward=1.0)]
    write_rollout(run_dir / "dump" / "r_7.pt", 7, saved)
    for pattern in (run_dir / "dump" / "r_{rollout_id:d}.pt", "/no/such/dump/r_{rollout_id}.pt"):
        (run_dir / "config.yaml").write_text(json.dumps({"debug": {"save_debug_rollout_data": str(pattern)}}))
        assert RunSite(run_dir).answer("/api/rewards", {})["names"] == ["r_7.pt"]
    assert RunSite(run_dir, dumps=[run_dir / "dump"]).answer("/api/rollouts", {})["names"] == ["r_7.pt"]
    (run_dir / "config.yaml").unlink()
    with pytest.raises(BadInputError, match="the run saves no rollouts"):
        RunSite(run_dir).answer("/api/rewards", {})


def test_faults_and_warnings(server: Server) -> None:
    answer = get(server, "/api/faults")[2]
    (fault,) = answer["events"]
    assert (fault["cause"], fault["what"]) == (HOSTILE, "an engine's server, or one of its processes, ended")
    router = {"time": "2026-11-27 00:00:04", "role": "router", "level": "ERROR", "text": "router: a worker is gone"}
    engine = {"time": "2026-11-27 00:00:01", "role": "engine_0", "level": "WARNING", "times": 3}
    first, second, third = answer["warnings"]
    assert engine.items() <= first.items()
    assert first["text"] == "Invalid HTTP request received."
    assert second["text"] == f"slime.driver {HOSTILE}"
    assert second["details"] == ["Traceback (most recent call last):", "  ValueError: no"]
    assert router.items() <= third.items()


def test_a_verdict_is_shown_if_there_is_a_whole_one(run_dir: Path) -> None:
    site = RunSite(run_dir)
    assert site.answer("/api/run", {})["verdict"] is None
    write_verdict(run_dir)
    verdict = site.answer("/api/run", {})["verdict"]
    assert (verdict["verdict"], verdict["sentences"][0]["keys"]) == ("yes", ["rollout/raw_reward"])
    for broken in (
        "",
        "[]",
        '"x"',
        '{"verdict": "x", "sentences": [{"sentence": 1}]}',
        '{"verdict": 1, "sentences": 2}',
    ):
        (run_dir / "verdict.json").write_text(broken)
        assert site.answer("/api/run", {})["verdict"] is None


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    still, follows = None, RunSite(tmp_path, follow=True)
    assert follows.answer("/api/run", {})["steps"] is None
    (tmp_path / "config.yaml").write_text(
        "rollout: {num_rollout: 3}\ndebug: {save_debug_rollout_data: 'r/{rollout_id}.pt'}\n"
    )
    run = follows.answer("/api/run", {})
    assert (run["of"], run["dumps"]) == (3, 1)
    for step in range(3):
        write_metrics(tmp_path, [step])
        with (tmp_path / "metrics.jsonl").open("a") as output:
            output.write('{"rollout/step": ')
        still = still or RunSite(tmp_path)
        assert follows.answer("/api/run", {})["steps"] == [0, step, step + 1]
        assert still.answer("/api/run", {})["steps"] == [0, 0, 1]
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(file.read_bytes().removesuffix(b'{"rollout/step": '))
    assert follows.answer("/api/run", {})["broken"] == 0


# ---- the page ----


def test_the_page_makes_no_html_of_text_and_takes_nothing_from_elsewhere() -> None:
    for name in PAGES:
        page = Path(view_run.__file__).with_name("viewing").joinpath(name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://|\bon\w+=\"", page
        )
        assert ' style="' not in page  # which the policy would stop


# ---- the command line ----


def test_errors_are_one_line_and_status_2(tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("broken", "{\n[]\n{}\n"), ("begun", '{"rollout/step": 0'), ("other", '{"a": 1}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "empty").mkdir()
    none_of = "none of its {} lines is one of a run's metrics"
    cases: list[tuple[list[Any], str]] = [
        (["none"], "none: no such directory"),
        (["empty"], "no metrics.jsonl in it: name a run's directory"),
        (["empty", "--follow"], "no metrics.jsonl in it: name a run's directory"),
        (["broken"], none_of.format(3)),
        (["broken", "--follow"], none_of.format(3)),
        (["other"], none_of.format(1)),
        (["begun"], "no line is complete yet; --follow waits for the first one"),
        (["run", "--compare", str(tmp_path / "empty")], "empty: no metrics.jsonl in it"),
        (["run", "--port", "70000"], "--port 70000"),
        (["run", "--host", "192.0.2.1"], "--host 192.0.2.1"),
    ]
    for (name, *flags), complaint in cases:
        assert view_run.main([str(tmp_path / name), *flags]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("view_run.py: error: ")
        assert output.err.count("\n") == 1
        assert complaint in output.err


def test_broken_lines_among_others_are_counted(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as output:
        output.write('{"rollout/step": 3, "tr\n{"time": 1}\n[1]\n\xff\n')
    append(run_dir / "metrics.jsonl", metric_lines([20]))
    run = RunSite(run_dir).answer("/api/run", {})
    assert (run["broken"], run["steps"]) == (4, [0, 20, 21])
    assert START > 0


def test_scores_alone_of_what_is_said_of_evaluations_are_above_everything_else(run_dir: Path) -> None:
    row = {"eval/step": 30, "time": 1.0, "eval/a": 0.5, "eval/a-avg@4": 0.5, "eval/a/standard_error": 0.1}
    append(run_dir / "metrics.jsonl", [row | {"eval/a/max_reward": 1.0, "eval/a/prompts": 48}])
    heads = [card["key"] for card in RunSite(run_dir).answer("/api/run", {})["head"]]
    assert "eval/a" in heads
    assert not [key for key in heads if key.startswith("eval/a/")]
