"""TensorBoard, read back by its own reader."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.trackers.journals import evaluation, resumed, samples, step

from midflight.config.load import load_config
from midflight.observe.lines import Line
from midflight.trackers.delivery import DeliveryLog, tell, tracked
from midflight.trackers.services import TensorBoard


def png(width: int, height: int) -> bytes:
    """A black one."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\0" * 3 * width for _ in range(height))
    begin = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", begin) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def follow(folder: Path, *lines: Line) -> None:
    """One start of a run."""
    told, tracker = DeliveryLog(folder / "trackers" / "tensorboard.told"), TensorBoard()
    config = load_config(None, ["run.name=tried", "rollout.max_staleness=3"])
    tracker.open(tracked(config, folder, id=None if told.is_new else ""))
    for line in lines:
        tell(tracker, line, told)
    tracker.flush()
    (folder / "plot.png").write_bytes(png(4, 3))
    tracker.picture("plot", folder / "plot.png")
    tracker.close({"steps": 4})


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_scalars_histograms_samples_config_and_plot_are_read_back(tmp_path: Path) -> None:
    follow(tmp_path, step(1, 0.25), step(2, 0.75), evaluation(2, 0.5), samples(2))
    found = read(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("rollout/reward_mean")] == [(1, 0.25), (2, 0.75)]
    assert [(e.step, e.value) for e in found.Scalars("eval/spell/reward")] == [(2, 0.5)]
    bins = found.Histograms("rollout/reward_histogram")[0].histogram_value
    assert (bins.num, list(bins.bucket_limit), list(bins.bucket)) == (8, [0.5, 1.0], [6, 2])
    assert bins.sum == pytest.approx(6 * 0.25 + 2 * 0.75)
    picture = found.Images("plot")[0]
    assert (picture.width, picture.height) == (4, 3) and picture.encoded_image_string == png(4, 3)
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    assert "rollout.max_staleness = 3" in texts["config/text_summary"]
    assert "| spell | 7 | 1.000 | spell \\| abc | &lt;b>cba&lt;/b><br>Done |" in texts["rollout/samples/text_summary"]


def test_a_resumed_run_goes_on_without_a_double_point(tmp_path: Path) -> None:
    """Steps 3 and 4 are lost and made again: what is read is what the run that goes on says of them."""
    follow(tmp_path, *(step(n, 0.1) for n in (1, 2, 3, 4)))
    follow(tmp_path, step(1, 0.1), step(2, 0.1), resumed(2, 9.0), *(step(n, 0.9) for n in (3, 4, 5)))
    points = [(e.step, round(e.value, 3)) for e in read(tmp_path).Scalars("rollout/reward_mean")]
    assert points == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9), (5, 0.9)]
    follow(tmp_path, step(1, 0.1), step(2, 0.1), resumed(2, 9.0), *(step(n, 0.9) for n in (3, 4, 5)), resumed(5, 20.0), step(6, 0.8))
    points = [(e.step, round(e.value, 3)) for e in read(tmp_path).Scalars("rollout/reward_mean")]
    assert points == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9), (5, 0.9), (6, 0.8)]
