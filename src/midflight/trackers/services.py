"""The trackers for TensorBoard, Weights & Biases, MLflow, Trackio and OpenTelemetry. Each uses the
library of its extra, which is imported when a run is opened.
"""

import itertools
import netrc
import os
import re
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from midflight.observe.readable import table_cell
from midflight.trackers.spans import RolloutSpan
from midflight.trackers.tracker import TrackedRun, Tracker

Cells = Sequence[Sequence[str | float | None]]


class TensorBoard(Tracker):
    """Writes event files into `tensorboard` of the run's folder, by tensorboardX, which needs
    neither torch nor TensorFlow.
    """

    def open(self, run: TrackedRun) -> None:
        self._number = len(list((run.folder / "tensorboard").glob("*")))
        self._folder = run.folder / "tensorboard"
        self._begin(None)
        if run.id is None:
            options = "\n".join(f"    {key} = {value!r}" for key, value in run.config.items())
            self._writer.add_text("config", options, 0)

    def _begin(self, purged: int | None) -> None:
        """Begins a new file. It tells readers, which read files in the order of their names, to
        forget the values in earlier files for steps from `purged` on.
        """
        self._number += 1
        writer = import_module("tensorboardX").SummaryWriter
        self._writer: Any = writer(
            str(self._folder), purge_step=purged, filename_suffix=f".{self._number:04d}"
        )

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Writes a histogram. Only the bins are known and not the values, so that sums are those
        of the middles of the bins.
        """
        total = 0.0
        squares = 0.0
        for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
            middle = (low + high) / 2
            total += middle * count
            squares += middle**2 * count
        self._writer.add_histogram_raw(
            name,
            edges[0],
            edges[-1],
            sum(counts),
            total,
            squares,
            list(edges[1:]),
            list(counts),
            step,
        )

    def table(self, step: int, name: str, columns: Sequence[str], rows: Cells) -> None:
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in rows:
            lines.append(f"| {' | '.join(map(_cell, row))} |")
        self._writer.add_text(name, "\n".join(lines), step)

    def picture(self, name: str, png: Path) -> None:
        """Writes the bytes of the picture as they are, without decoding them."""
        summaries: Any = import_module("tensorboardX.proto.summary_pb2").Summary
        data = png.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        image = summaries.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        self._writer.file_writer.add_summary(
            summaries(value=[summaries.Value(tag=name, image=image)]), 0
        )

    def rewind(self, step: int) -> bool:
        self._writer.close()
        self._begin(step + 1)
        return True

    def flush(self) -> None:
        self._writer.flush()

    def close(self, summary: Mapping[str, float | str]) -> None:
        self._writer.add_text(
            "summary", "\n".join(f"    {key} = {value!r}" for key, value in summary.items()), 0
        )
        self._writer.close()


def _cell(cell: str | float | None) -> str:
    """Returns the text of a cell in a Markdown table."""
    if cell is None:
        return ""
    return table_cell(f"{cell:.3f}" if isinstance(cell, float) else str(cell))


class WeightsAndBiases(Tracker):
    """Writes online if a key is known or `WANDB_MODE` says so. Otherwise it writes offline into
    `wandb` of the run's folder, for `wandb sync`.
    """

    def open(self, run: TrackedRun) -> str:
        self._wandb: Any = import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        name = run.id or uuid.uuid4().hex[:8]
        self._run: Any = self._wandb.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
            dir=str(run.folder),
            mode=mode,
            id=name,
            resume="allow" if mode == "online" else None,
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        return name

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        made = self._wandb.Histogram(np_histogram=(list(counts), list(edges)))
        self._run.log({name: made, "step": step})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Cells) -> None:
        made = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: made, "step": step})

    def picture(self, name: str, png: Path) -> None:
        self._run.log({name: self._wandb.Image(str(png))})

    def close(self, summary: Mapping[str, float | str]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


def _has_key() -> bool:
    """True if W&B would find a key without asking."""
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    return False


class MLflow(Tracker):
    """Writes into the store that `MLFLOW_TRACKING_URI` names, or else into files in `mlruns` of the
    run's folder. Histograms and tables are artifacts.
    """

    MAX_METRICS = 1000
    """Metrics in one request."""
    MAX_OPTIONS = 100
    """Options in one request."""
    MAX_LETTERS = 500
    """Letters of an option's value."""

    def open(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities: Any = import_module("mlflow.entities")
        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client: Any = import_module("mlflow.tracking").MlflowClient(where)
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        found = self._client.get_experiment_by_name(run.project)
        experiment = (
            self._client.create_experiment(run.project) if found is None else found.experiment_id
        )
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        options = [
            self._entities.Param(_key(key), str(value)[: self.MAX_LETTERS])
            for key, value in run.config.items()
        ]
        for begin in range(0, len(options), self.MAX_OPTIONS):
            self._client.log_batch(self._id, params=options[begin : begin + self.MAX_OPTIONS])
        return self._id

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_key(name), value, now, step) for name, value in numbers.items()
        ]
        for begin in range(0, len(metrics), self.MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + self.MAX_METRICS])

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        content = {"edges": list(edges), "counts": list(counts)}
        self._artifact(f"{_key(name)}/{step:06d}.json", content)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Cells) -> None:
        content = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._artifact(f"{_key(name)}/{step:06d}.json", content)

    def _artifact(self, path: str, value: object) -> None:
        self._client.log_text(self._id, msgspec.json.encode(value).decode(), path)

    def picture(self, name: str, png: Path) -> None:
        self._client.log_artifact(self._id, str(png))

    def close(self, summary: Mapping[str, float | str]) -> None:
        for name, value in summary.items():
            self._client.set_tag(self._id, f"summary.{_key(name)}", str(value)[: self.MAX_LETTERS])
        self._client.set_terminated(self._id)


def _key(name: str) -> str:
    """The name in the form that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name)


class Trackio(Tracker):
    """Writes into `TRACKIO_DIR`, or else into `trackio` of the run's folder."""

    def open(self, run: TrackedRun) -> str:
        os.environ["TRACKIO_DIR"] = os.environ.get("TRACKIO_DIR") or str(
            (run.folder / "trackio").resolve()
        )
        self._trackio: Any = import_module("trackio")
        name = run.id or f"{run.name}-{uuid.uuid4().hex[:4]}"
        self._run: Any = self._trackio.init(
            project=run.project, name=name, config=dict(run.config), resume="allow"
        )
        return name

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        made = self._trackio.Histogram(np_histogram=(list(counts), list(edges)))
        self._run.log({name: made}, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Cells) -> None:
        made = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: made}, step=step)

    def picture(self, name: str, png: Path) -> None:
        self._run.log({name: self._trackio.Image(str(png))})

    def close(self, summary: Mapping[str, float | str]) -> None:
        self._run.finish()


class OpenTelemetry(Tracker):
    """Sends each rollout as a trace, by OTLP over HTTP, to `OTEL_EXPORTER_OTLP_ENDPOINT`, or else
    to port 4318 of this machine.

    The numbers of steps do not go there: Prometheus has them. `OTEL_TRACES_SAMPLER` may choose some
    of the rollouts.
    """

    MAX_SPANS = 512
    """Spans in one request."""

    def open(self, run: TrackedRun) -> None:
        sdk = import_module("opentelemetry.sdk.trace")
        self._api = import_module("opentelemetry.trace")
        said = {
            "service.name": "midflight",
            "midflight.run": run.name,
            "midflight.project": run.project,
        }
        resource = import_module("opentelemetry.sdk.resources").Resource.create(said)
        self._ended: list[Any] = []
        provider: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)

        def keep(_: object, span: object) -> None:
            self._ended.append(span)

        collects = type("Collects", (sdk.SpanProcessor,), {"on_end": keep})
        provider.add_span_processor(collects())
        self._tracer: Any = provider.get_tracer("midflight")
        self._exporter: Any = import_module(
            "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        ).OTLPSpanExporter()

    def spans(self, rollouts: Sequence[RolloutSpan]) -> None:
        for rollout in rollouts:
            self._add(rollout, None)
        self.flush()

    def _add(self, span: RolloutSpan, outer: Any) -> None:
        made = self._tracer.start_span(
            span.name, outer, attributes=span.attributes, start_time=int(span.began * 1e9)
        )
        if span.failure is not None:
            made.set_attribute("error.type", span.failure)
            made.set_status(self._api.StatusCode.ERROR, span.failure)
        for part in span.inner:
            self._add(part, self._api.set_span_in_context(made))
        made.end(int(span.ended * 1e9))

    def flush(self) -> None:
        """Sends the spans. Spans that could not be sent are lost here, but are still in the run's
        timeline, which `midflight trace` draws.
        """
        ended = list(self._ended)
        self._ended.clear()
        for at in range(0, len(ended), self.MAX_SPANS):
            if self._exporter.export(ended[at : at + self.MAX_SPANS]).name != "SUCCESS":
                raise ConnectionError(
                    f"{len(ended) - at} spans could not be sent to {self._exporter._endpoint}"
                )

    def close(self, summary: Mapping[str, float | str]) -> None:
        self._exporter.shutdown()
