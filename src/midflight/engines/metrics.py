"""The engine's numbers for Prometheus, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from midflight.types import EngineHealth


class EngineCollector(Collector):
    def __init__(self, reading: Callable[[], EngineHealth]) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        health = self._reading()
        yield CounterMetricFamily("midflight_engine_output_tokens", "Output tokens since the engine started", value=health.num_tokens)
        yield GaugeMetricFamily("midflight_engine_running_requests", "Requests decoded together", value=health.num_running)
        yield GaugeMetricFamily("midflight_engine_waiting_requests", "Requests waiting for a slot", value=health.num_waiting)
        yield GaugeMetricFamily("midflight_engine_weight_version", "Version of the weights served", value=health.version)
        yield GaugeMetricFamily("midflight_engine_paused", "1 while paused", value=float(health.paused))
