"""Rollouts as OpenTelemetry traces, sent by the official SDK to a receiver that reads what the protocol says."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.archive.test_trace import AFTER_A_TOOL, TURN
from tests.trackers.journals import configure

from midflight.config.load import load_config
from midflight.observe.timeline import CommitTimed, RolloutTimed, RunStarted, Timed
from midflight.run.launcher.tracker_process import TrackerProcess
from midflight.trackers.spans import RolloutSpans
from midflight.trackers.tracker import make_tracker

WALL = 1_700_000_000.0
GOOD = RolloutTimed((0, 1, 0, 0), "sums", 1.0, 5.0, 1.0, 48, (TURN, AFTER_A_TOOL))
FAILED = RolloutTimed((0, 1, 0, 1), "sums", 6.0, 7.0, None, 0, failure="KeyError")


def encoded(*lines: Timed) -> list[bytes]:
    return [msgspec.json.encode(line) for line in lines]


def append(folder: Path, *lines: Timed) -> None:
    with (folder / "timeline.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in encoded(*lines))


@contextmanager
def receiver(status: int = 200) -> Generator[tuple[str, list[Any]]]:
    """The address of one that takes OTLP over HTTP, and the requests that it got."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    got: list[Any] = []

    class Receives(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            got.append(service.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Receives)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spans_of(got: list[Any]) -> list[Any]:
    return [span for request in got for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def said(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def test_a_rollout_is_a_span_with_its_parts_in_seconds_since_1970() -> None:
    spans = RolloutSpans()
    (found,) = spans.of(encoded(RunStarted(0.5, WALL), CommitTimed("engine0", 4, 2.2, 0.5, 0.1), GOOD))
    epoch = WALL - 0.5
    assert (found.began - epoch, found.ended - epoch, found.failure) == (1.0, 5.0, None)
    assert found.attributes == {
        "midflight.rollout": "0-1-0-0", "midflight.source": "sums", "midflight.kind": "training",
        "midflight.reward": 1.0, "midflight.tokens": 48, "midflight.truncated": False,
    }  # fmt: skip
    parts = [(part.name, round(part.began - epoch, 3), round(part.ended - epoch, 3)) for part in found.inner]
    assert parts == [
        ("queued", 1.0, 1.25), ("prefill", 1.25, 1.5), ("segment v3", 1.5, 2.25), ("paused", 2.1, 2.2), ("segment v4", 2.25, 3.0),
        ("tool", 3.0, 4.0), ("prefill", 4.0, 4.25), ("segment v4", 4.25, 4.5), ("reward", 4.5, 5.0),
    ]  # fmt: skip


def test_a_run_that_goes_on_tells_no_rollout_twice_and_takes_the_time_of_each_start() -> None:
    first = [RunStarted(0.0, WALL), GOOD]
    assert len(list(RolloutSpans().of(encoded(*first)))) == 1
    again = RolloutSpans(told=2)
    (found,) = again.of([*encoded(*first), b"not a line", *encoded(RunStarted(5.5, WALL + 1000.0), FAILED)])
    assert found.failure == "KeyError" and found.began == pytest.approx(WALL + 1000.5) and again.num_read == 5


def test_traces_reach_a_receiver_by_the_official_sdk_and_each_rollout_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of the process beside a run; the receiver is asked at its own address only."""
    configure(tmp_path, "otel")
    (tmp_path / "metrics.jsonl").touch()
    append(tmp_path, RunStarted(0.0, WALL), GOOD)
    with receiver() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        for line in (None, FAILED):
            if line is not None:
                append(tmp_path, line)
            complaints: list[str] = []
            run = TrackerProcess(load_config(tmp_path / "config.toml", [f"run.folder={tmp_path}"]), complaints.append)
            run.start()
            run.end(seconds=60.0)
            assert complaints == []
    spans = spans_of(got)
    roots = [span for span in spans if not span.parent_span_id]
    assert [said(root.attributes)["midflight.rollout"] for root in roots] == ["0-1-0-0", "0-1-0-1"]
    good, failed = roots
    assert (good.start_time_unix_nano, good.end_time_unix_nano) == (int((WALL + 1) * 1e9), int((WALL + 5) * 1e9))
    inner = [span.name for span in spans if span.parent_span_id == good.span_id and span.trace_id == good.trace_id]
    assert inner == ["queued", "prefill", "segment v3", "segment v4", "tool", "prefill", "segment v4", "reward"]
    assert failed.status.message == "KeyError" and failed.trace_id != good.trace_id
    resource = said(got[0].resource_spans[0].resource.attributes)
    assert (resource["service.name"], resource["midflight.project"]) == ("midflight", "midflight")


def test_a_receiver_that_refuses_is_an_error_of_the_tracker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midflight.trackers.delivery import tracked

    configure(tmp_path, "otel")
    with receiver(status=400) as (address, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        tracker = make_tracker("otel")
        tracker.open(tracked(load_config(tmp_path / "config.toml"), tmp_path))
        rollouts = list(RolloutSpans().of(encoded(RunStarted(0.0, WALL), GOOD)))
        with pytest.raises(ConnectionError, match="9 spans could not be sent to http"):
            tracker.spans(rollouts)
        tracker.flush()  # what could not be sent is lost, and not tried for ever
        tracker.close({})
