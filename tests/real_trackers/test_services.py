"""Weights & Biases offline, MLflow on a local file store, Trackio in its own database: each by its own library, and read back by it."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.journals import configure, evaluation, resumed, samples, step, write
from tests.trackers.test_tensorboard import png

FIRST = (step(1, 0.1), step(2, 0.2), evaluation(2, 0.5), samples(2), step(3, 0.3), step(4, 0.4))
AGAIN = (*FIRST[:4], resumed(2, 9.0), step(3, 0.9), step(4, 0.9), step(5, 0.5))
"""A checkpoint of step 2: steps 3 and 4 are made again. These services keep what was lost."""
POINTS = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def followed(folder: Path, tracker: str, **environ: str) -> None:
    """Two starts of a run, each beside a process of its own, as a launcher has it."""
    configure(folder, tracker)
    (folder / "plot.png").write_bytes(png(4, 3))
    (folder / "summary.json").write_text('{"steps": 5, "name": "tried"}')
    packages = os.pathsep.join(path for path in sys.path if path)
    for lines in (FIRST, AGAIN):
        write(folder, *lines)
        done = subprocess.run(
            [sys.executable, "-m", "midflight.trackers.process", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=170,
            env={**os.environ, "PYTHONPATH": packages, "HOME": str(folder), **environ},
        )
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert said == [{"tracker": tracker, "error": None}], (done.stdout, done.stderr[-3000:])


def test_wandb_offline(tmp_path: Path) -> None:
    followed(tmp_path, "wandb", WANDB_API_KEY="")
    records = [record for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")) for record in records_of(file)]
    history = [
        {item_name(item): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert sorted((int(row["step"]), row["rollout/reward_mean"]) for row in history if "rollout/reward_mean" in row) == POINTS
    assert [(int(row["step"]), row["eval/spell/reward"]) for row in history if "eval/spell/reward" in row] == [(2, 0.5)]
    assert any("rollout/reward_histogram" in key for row in history for key in row) and any(
        "rollout/samples" in key for row in history for key in row
    )
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("midflight", "tried")} and len({run.run_id for run in runs}) == 1
    assert any(item.key == "rollout.max_staleness" and item.value_json == "4" for run in runs for item in run.config.update)


def records_of(file: Path) -> list[Any]:
    """By W&B's own messages. The frame round them is that of LevelDB's log: blocks of 32 KiB, in which a record is whole (1) or in parts."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def item_name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def test_mlflow_on_a_local_file_store(tmp_path: Path) -> None:
    followed(tmp_path, "mlflow", MLFLOW_TRACKING_URI="")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("midflight")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "rollout/reward_mean")] == POINTS
    assert (run.info.run_name, run.info.status, run.data.params["rollout.max_staleness"]) == ("tried", "FINISHED", "4")
    assert run.data.metrics["eval/spell/reward"] == 0.5 and run.data.tags["summary.steps"] == "5"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"plot.png", "rollout", "train"}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "rollout/samples/000002.json")).read_text())
    assert table["columns"][0] == "source" and table["data"][0][2] == 1.0


def test_trackio_in_its_own_database(tmp_path: Path) -> None:
    followed(tmp_path, "trackio", TRACKIO_DIR="")
    assert [(row["step"], row["rollout/reward_mean"]) for row in rows_of(tmp_path) if "rollout/reward_mean" in row] == POINTS
    assert [row["step"] for row in rows_of(tmp_path) if "eval/spell/reward" in row] == [2]
    assert any("rollout/samples" in row for row in rows_of(tmp_path)) and any(
        "rollout/reward_histogram" in row for row in rows_of(tmp_path)
    )


def rows_of(folder: Path) -> list[Mapping[str, Any]]:
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        return [
            {"step": number, **json.loads(numbers)} for number, numbers in base.execute("SELECT step, metrics FROM metrics ORDER BY id")
        ]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_service_that_cannot_be_reached_is_said_once(tracker: str, tmp_path: Path) -> None:
    """Nobody listens on port 9."""
    configure(tmp_path, tracker)
    write(tmp_path, *FIRST)
    far = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "3"}
    far |= {
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "HOME": str(tmp_path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "midflight.trackers.process", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **far},
    )
    try:
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    said = [json.loads(line) for line in out.splitlines()]
    assert len([words for words in said if words["error"] is not None]) == 1, said
