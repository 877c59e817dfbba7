"""The Grafana dashboard: everything that it draws is on a server's metrics page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.serve.service_thread import ServiceThread

FILE = Path(__file__).resolve().parents[2] / "docs/grafana.json"


def board() -> Any:
    return json.loads(FILE.read_text("utf-8"))


def test_every_metric_exists(running: ServiceThread) -> None:
    body = {"model": "stories", "prompt": "Once", "max_tokens": 3, "temperature": 0}
    assert running.post("/v1/completions", body).status == 200
    lines = [
        line
        for line in running.get("/metrics").body.decode().splitlines()
        if not line.startswith("#")
    ]
    metrics: dict[str, set[str]] = {}
    for line in lines:
        name, _, rest = line.partition("{")
        metrics.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    drawn = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    queries = drawn + [
        each["query"] for each in board()["templating"]["list"] if each["type"] == "query"
    ]
    names = {name for text in queries for name in re.findall(r"modelmill:\w+", text)}
    assert len(names) >= 12
    assert names <= set(metrics)
    for text in drawn:
        labels = set(re.findall(r"by \(([^)]*)\)", text)[0].split(", ")) | set(
            re.findall(r'(\w+)=~"', text)
        )
        for name in re.findall(r"modelmill:\w+", text):
            assert labels <= metrics[name], text


def test_the_board_is_whole() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
