"""What a Prometheus and a Grafana need of a run, in its directory: ``prometheus.yml``, ``grafana.json``, and in
``prometheus/`` lists of what to scrape, which are read again while they change, and the key."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.files.atomic_io import unfinished
from slime.observability.prometheus.exposition import metric_name

logger = logging.getLogger(__name__)
DIRECTORY = "prometheus"
KEY_FILE = "key"
_CONFIGURATION = f"""\
# prometheus --config.file=prometheus.yml in this directory; paths are relative to it.
global:
  scrape_interval: 10s
scrape_configs:
  - job_name: slime
    authorization:
      credentials_file: {DIRECTORY}/{KEY_FILE}
    file_sd_configs:
      - files: [{DIRECTORY}/driver.json]
        refresh_interval: 10s
  - job_name: sglang
    file_sd_configs:
      - files: [{DIRECTORY}/routers.json, {DIRECTORY}/engines.json]
        refresh_interval: 10s
"""
_REGISTRY = Path(__file__).parents[1] / "metrics.toml"
_CHOICE = re.compile(r"\{([\w,]+)\}")
_FREE = re.compile(r"<\w+>")
_OWN = (
    ("phase", 'slime_phase{run=~"$run"}'),
    ("seconds in the phase", 'slime_phase_seconds{run=~"$run"}'),
    ("weight version", 'slime_weight_version{run=~"$run"}'),
    ("engines", 'slime_engines{run=~"$run"}'),
    ("queues", 'slime_queue_length{run=~"$run"}'),
    ("running requests of engines", 'sglang:num_running_reqs{run=~"$run"}'),
    ("queued requests of engines", 'sglang:num_queue_reqs{run=~"$run"}'),
)
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def write_configuration(run_dir: Path) -> None:
    """``prometheus.yml`` and ``grafana.json``."""
    _write(run_dir / "prometheus.yml", _CONFIGURATION)
    _write(run_dir / "grafana.json", json.dumps(dashboard(), indent=1) + "\n")


def write_targets(run_dir: Path, kind: str, urls: Sequence[str]) -> None:
    """Say where ``kind`` (``driver``, ``routers``, ``engines``) of a run is to be scraped: at ``/metrics`` of these."""
    path = run_dir / DIRECTORY / f"{kind}.json"
    labels = {"run": run_dir.resolve().name, "process": kind}
    targets = [urlsplit(url).netloc for url in urls]
    text = json.dumps([{"targets": targets, "labels": labels}] if targets else []) + "\n"
    try:
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text)
    except OSError as error:  # a run does not end of this
        logger.warning("%s: %s; Prometheus does not find what is there now", path, error)


def _write(path: Path, text: str) -> None:
    unfinished(path).write_text(text)
    unfinished(path).replace(path)


def dashboard() -> dict[str, Any]:
    """A Grafana dashboard of the state, and of every metric of metrics.toml: a row a section, a panel a key."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, shown in _rows():
        panels.append(
            {"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}, "id": len(panels) + 1}
        )
        for at, (name, queries) in enumerate(shown):
            place = {"h": _HEIGHT, "w": _WIDTH, "x": at % _COLUMNS * _WIDTH, "y": top + 1 + at // _COLUMNS * _HEIGHT}
            panels.append(_panel(len(panels) + 1, name, queries, place))
        top += 1 + -(-len(shown) // _COLUMNS) * _HEIGHT
    run = {"name": "run", "type": "query", "datasource": _SOURCE, "query": "label_values(slime_phase_seconds, run)"}
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "slime",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, run | {"multi": True, "includeAll": True, "refresh": 2}]},
        "panels": panels,
    }


def _rows() -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    yield "state", [(title, [query]) for title, query in _OWN]
    for section, table in tomllib.loads(_REGISTRY.read_text(encoding="utf-8")).items():
        shown = [(key, list(_queries(key))) for keys in table["rows"] for key in keys.split(", ") if key != "time"]
        yield section.replace("_", " "), shown


def _queries(key: str) -> Iterator[str]:
    """What draws a key of the registry; ``{a,b}`` are lines of their own, and ``<...>`` stands for any word."""
    choice = _CHOICE.search(key)
    for each in choice[1].split(",") if choice else [""]:
        chosen = key if choice is None else key.replace(choice[0], each)
        parts = [metric_name(part) for part in _FREE.split(chosen)]
        if len(parts) == 1:
            yield f'{parts[0]}{{run=~"$run"}}'
        else:
            name = "[a-zA-Z0-9_]+".join([parts[0], *(part.removeprefix("slime_") for part in parts[1:])])
            yield f'{{__name__=~"{name}", run=~"$run"}}'


def _panel(number: int, title: str, queries: list[str], place: dict[str, int]) -> dict[str, Any]:
    targets = [{"refId": chr(ord("A") + at), "expr": query, "datasource": _SOURCE} for at, query in enumerate(queries)]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
    }
