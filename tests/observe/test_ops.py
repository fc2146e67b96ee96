"""The board for Grafana and the alerts for Prometheus in `ops`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from tests.observe.ops import BOARD, OPS, RULES, asked, expressions, panels, series_of
from tests.observe.test_observers import tell_everything

from midflight.observe.prometheus import Metrics
from midflight.observe.status import LearningStatus
from midflight.types import Accounts

UNITS = ["none", "short", "s", "bytes", "percentunit"]
PLACE = {"type": "object", "required": ["h", "w", "x", "y"], "additionalProperties": {"type": "integer", "minimum": 0}}
SOURCE = {"type": "object", "required": ["type", "uid"], "properties": {"type": {"const": "prometheus"}}}
TARGET = {"type": "object", "required": ["refId", "datasource", "expr"], "properties": {"expr": {"minLength": 1}, "datasource": SOURCE}}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": {"type": "string", "minLength": 1},
        "schemaVersion": {"type": "integer", "minimum": 36, "maximum": 42},
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "time": {"type": "object", "required": ["from", "to"], "additionalProperties": {"type": "string"}},
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {"list": {"items": {"required": ["name", "type"], "properties": {"type": {"enum": ["query", "datasource"]}}}}},
        },
        "panels": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos"],
                "properties": {"type": {"enum": ["row", "stat", "timeseries"]}, "gridPos": PLACE, "id": {"type": "integer"}},
                "if": {"properties": {"type": {"enum": ["stat", "timeseries"]}}},
                "then": {
                    "required": ["datasource", "targets", "fieldConfig", "options"],
                    "properties": {
                        "datasource": SOURCE,
                        "targets": {"type": "array", "minItems": 1, "items": TARGET},
                        "fieldConfig": {
                            "required": ["defaults", "overrides"],
                            "properties": {"defaults": {"properties": {"unit": {"enum": UNITS}}}},
                        },
                    },
                },
            },
        },
    },
}
"""Of what Grafana's own schema of a dashboard says, what this one uses: it has far more kinds of panels."""


def told() -> str:
    metrics = Metrics()
    tell_everything(metrics)
    metrics.learning = lambda: LearningStatus(1, 1, 1, 1, 1, 1)
    metrics.accounts = lambda: Accounts(1, 1, 1, 0, 2, {"stale": 2})
    metrics.requests, metrics.memory = lambda: {"engine0": 3}, lambda: {("trainer", "7"): 2**20}
    return metrics.text().decode()


def test_the_board_is_one_by_grafanas_schema() -> None:
    jsonschema.validate(BOARD, SCHEMA)
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    letters = [[target["refId"] for target in panel["targets"]] for panel in panels()]
    assert all(len(set(found)) == len(found) for found in letters)


def test_no_panel_lies_on_another_and_none_beyond_the_24_columns() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_every_query_asks_for_what_metrics_have() -> None:
    assert len(expressions()) > 40 and asked(expressions()) - series_of(told()) == set()


def test_the_labels_that_queries_and_legends_name_are_those_of_the_metric() -> None:
    labels = {"instance", "job"} | set(re.findall(r'(\w+)="', told()))
    named = [name for panel in panels() for target in panel["targets"] for name in re.findall(r"\{\{\s*(\w+)", target["legendFormat"])]
    named += [name for expression in expressions() for found in re.findall(r"by \(([^)]*)\)", expression) for name in found.split(", ")]
    named += [name for rule in RULES for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)]
    assert len(named) > 20 and set(named) <= labels


def test_what_an_operator_needs_is_on_the_board() -> None:
    shown = asked(target["expr"] for panel in panels() for target in panel["targets"])
    needed = ("engine_requests", "groups", "trained_tokens_by_age_total", "handovers_total", "failed_rollouts_total", "tokens")
    needed += (
        "failed_requests_total",
        "turn_seconds_bucket",
        "process_bytes",
        "waited_seconds_total",
        "engine_quarantined",
        "alarms_total",
    )
    assert {f"midflight_{name}" for name in needed} <= shown


def test_each_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["alert"].startswith("Midflight")
        assert rule["annotations"].keys() == {"summary", "description"} and rule["annotations"]["description"].endswith(".")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is of Prometheus, which is not installed")
def test_promtool_reads_every_query_and_the_alerts_ring_when_they_should(tmp_path: Path) -> None:
    queries = [re.sub(r"\$__rate_interval", "1m", target["expr"]) for panel in panels() for target in panel["targets"]]
    rules = [{"record": f"midflight:panel{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    for command in (
        ("check", "rules", str(tmp_path / "board.yml")),
        ("check", "config", str(OPS / "prometheus" / "prometheus.yml")),
        ("test", "rules", str(OPS / "prometheus" / "alerts.test.yml")),
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
