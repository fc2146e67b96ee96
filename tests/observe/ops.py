"""What the board and the alerts in `ops` ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

OPS = Path(__file__).parents[2] / "ops"
BOARD: dict[str, Any] = json.loads((OPS / "grafana" / "midflight.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def panels() -> Iterator[dict[str, Any]]:
    """Those that show something."""
    return (panel for panel in BOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    variables = [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in RULES] + variables


def asked(expressions: Iterable[str]) -> set[str]:
    """The names of series in them."""
    return {name for expression in expressions for name in re.findall(r"\bmidflight_\w+", expression)}


def series_of(text: str) -> set[str]:
    """Every name under which `/metrics` has, or will have, a number: a counter with labels has none before it counts."""
    return {f"{family.name}{suffix}" for family in text_string_to_metric_families(text) for suffix in SUFFIXES.get(family.type, ())}
