"""What Prometheus reads of a run, by its own parser; where it finds it; and who is let in."""

from __future__ import annotations

import json
import math
import re
import socket
import stat
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slime.observability.metrics import MetricsLogger
from slime.observability.prometheus.exposition import State, exposition, metric_name
from slime.observability.prometheus.files import dashboard, write_targets
from slime.observability.prometheus.server import Prometheus
from slime.utils.errors import BadInputError
from tools.website.registry import METRICS

NUM_GPUS = 0
ENGINES = [
    {"name": "engine 0", "url": "http://10.0.0.1:30000", "state": "serves"},
    {"name": "engine 1", "url": "http://10.0.0.2:30000", "state": "serves"},
    {"name": 'engine "2"', "url": "", "state": 'starts\n"again"\\'},
]
STATE = State("push weights of version 3", 1.5, 0.25, "3", ENGINES, "learning")


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of an exposition, by its name and labels; an error where one is there twice."""
    found: dict[Any, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_the_state_is_what_the_parser_reads() -> None:
    read = samples(exposition(STATE, {"rollout/prompts_buffered": 7.0}))
    assert read["slime_phase", (("phase", "push weights"),)] == 1
    assert (read["slime_phase_seconds", ()], read["slime_driver_silent_seconds", ()]) == (1.5, 0.25)
    assert (read["slime_weight_version", ()], read["slime_engines_alive", ()]) == (3, 3)
    assert read["slime_engines", (("state", "serves"),)] == 2
    assert read["slime_engines", (("state", 'starts\n"again"\\'),)] == 1
    assert read["slime_queue_length", (("queue", "buffered"),)] == read["slime_rollout_prompts_buffered", ()] == 7
    assert read["slime_verdict", (("verdict", "learning"),)] == 1
    assert not [key for key in samples(exposition(State(), {})) if key[0] in ("slime_weight_version", "slime_verdict")]


@pytest.mark.parametrize(
    ("phase", "label"),
    [
        ("rollout 12", "rollout"),
        ("push weights of version 3", "push weights"),
        ("evaluation of weight version 40", "evaluation"),
        ("hand over rollout 3, after the prompts that are being drawn", "hand over rollout"),
        ("add http://10.0.0.1:30000", "add"),
        ("start engines", "start engines"),
    ],
)
def test_a_phase_is_the_same_series_every_time(phase: str, label: str) -> None:
    assert ("slime_phase", (("phase", label),)) in samples(exposition(State(phase), {}))


def test_every_metric_there_is_has_a_name_that_the_parser_takes() -> None:
    keys = [key for metric in METRICS for key in metric.keys]
    odd = {"rollout/zero_std/count_-0.5": 1.0, "eval/a b-pass@8": math.nan, "x/inf": math.inf, "x/minus": -math.inf}
    read = samples(exposition(STATE, dict.fromkeys(keys, 0.5) | odd))
    assert len(read) > len(keys)
    assert read["slime_rollout_zero_std_count__0_5", ()] == 1
    assert math.isnan(read["slime_eval_a_b_pass_8", ()])
    assert (read["slime_x_inf", ()], read["slime_x_minus", ()]) == (math.inf, -math.inf)


def test_two_keys_of_one_name_are_one_series() -> None:
    assert samples(exposition(STATE, {"a/b": 1.0, "a_b": 2.0, "phase": 9.0}))["slime_a_b", ()] == 2


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Prometheus]:
    made = Prometheus(args_of(tmp_path), lambda: STATE)
    yield made
    made.close()


def args_of(run_dir: Path, **changes: Any) -> Namespace:
    values = {"run_dir": str(run_dir), "prometheus_host": "127.0.0.1", "prometheus_port": 0}
    return Namespace(**values | {"sglang_enable_metrics": True, "use_tensorboard": False, "use_wandb": False} | changes)


def get(url: str, key: str = "") -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=10)


def test_metrics_are_served_to_who_has_the_key(served: Prometheus, tmp_path: Path) -> None:
    key_file = tmp_path / "prometheus" / "key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    for key in ("", "another"):
        refused = get(f"{served.url}/metrics", key)
        assert (refused.status_code, "slime_" in refused.text) == (401, False)
    log = MetricsLogger(args_of(tmp_path))
    log.add(served)
    log.log({"rollout/raw_reward": 0.25}, "rollout/step", 4)
    log.log({"train/loss": 0.5, "perf/step_time": 2.0}, "train/step", 9)
    reply = get(f"{served.url}/metrics", key_file.read_text())
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    read = samples(reply.text)
    assert [read[name, ()] for name in ("slime_rollout_raw_reward", "slime_rollout_step", "slime_train_step")] == [
        0.25,
        4,
        9,
    ]
    assert get(f"{served.url}/other").status_code == 404


def test_health_is_whether_the_driver_looks_at_its_actors(tmp_path: Path) -> None:
    silent = [0.5]
    made = Prometheus(args_of(tmp_path), lambda: State("rollout 3", 12.34, silent[0]))
    reply = get(f"{made.url}/healthz")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "phase": "rollout 3", "seconds": 12.3})
    silent[0] = 301.0
    reply = get(f"{made.url}/healthz")
    assert (reply.status_code, reply.json()["status"]) == (503, "stuck")
    made.close()
    with pytest.raises(requests.ConnectionError):
        get(f"{made.url}/healthz")
    made.close()


def test_targets_follow_the_engines_that_there_are(served: Prometheus, tmp_path: Path) -> None:
    def targets(kind: str) -> Any:
        return json.loads((tmp_path / "prometheus" / f"{kind}.json").read_text())

    labels = {"run": tmp_path.name, "process": "driver"}
    assert targets("driver") == [{"targets": [served.url.removeprefix("http://")], "labels": labels}]
    served.write({"perf/step_time": 1.0}, "rollout/step", 0)
    assert targets("engines")[0]["targets"] == ["10.0.0.1:30000", "10.0.0.2:30000"]
    served.close()
    assert targets("driver") == targets("engines") == []


def test_engines_without_metrics_are_not_scraped(tmp_path: Path) -> None:
    made = Prometheus(args_of(tmp_path, sglang_enable_metrics=False), lambda: STATE)
    made.write({"perf/step_time": 1.0}, "rollout/step", 0)
    made.close()
    assert json.loads((tmp_path / "prometheus" / "engines.json").read_text()) == []


def test_the_configuration_finds_driver_router_and_engines(served: Prometheus, tmp_path: Path) -> None:
    write_targets(tmp_path, "routers", ["http://127.0.0.1:29000/metrics"])
    served.write({"perf/step_time": 1.0}, "rollout/step", 0)
    configuration = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    found = {}
    for job in configuration["scrape_configs"]:
        (discovery,) = job["file_sd_configs"]
        for file in discovery["files"]:
            for entry in json.loads((tmp_path / file).read_text()):
                found |= dict.fromkeys(entry["targets"], entry["labels"]["process"])
    assert found == {
        served.url.removeprefix("http://"): "driver", "127.0.0.1:29000": "routers", "10.0.0.1:30000": "engines",
        "10.0.0.2:30000": "engines",
    }  # fmt: skip
    (own, _) = configuration["scrape_configs"]
    key = (tmp_path / own["authorization"]["credentials_file"]).read_text()
    assert get(f"{served.url}/metrics", key).status_code == 200


def test_the_dashboard_has_a_panel_for_every_metric() -> None:
    made = dashboard()
    panels = [panel for panel in made["panels"] if panel["type"] == "timeseries"]
    titles = {panel["title"] for panel in panels}
    assert {key for metric in METRICS for key in metric.keys} - titles == {"time"}
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    by_title = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}
    assert by_title["rollout/raw_reward"] == ['slime_rollout_raw_reward{run=~"$run"}']
    assert by_title["rollout/response_len/{mean,median,max,min}"][1] == 'slime_rollout_response_len_median{run=~"$run"}'
    (query,) = by_title["eval/<name>-pass@<k>"]
    pattern = re.search(r'__name__=~"([^"]*)"', query)
    assert pattern is not None
    assert re.fullmatch(pattern[1], metric_name("eval/gsm8k-pass@8"))
    assert not re.fullmatch(pattern[1], metric_name("eval/gsm8k"))


def test_a_port_that_is_taken_is_one_line_and_a_variable_of_a_container_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_PORT", "tcp://10.1.2.3:9090")
    monkeypatch.setenv("SLIME_PROMETHEUS_PORT", "tcp://10.1.2.3:9090")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInputError, match=f"--prometheus-port {port}: .*in use"):
            Prometheus(args_of(tmp_path, prometheus_port=port), lambda: STATE)
    made = Prometheus(args_of(tmp_path), lambda: STATE)
    assert get(f"{made.url}/healthz").ok
    made.close()
