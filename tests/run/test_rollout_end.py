"""The end of a rollout process: what was said to held-out tasks is on disk by then, though a thread of its own writes it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

from tests.trajectories.test_heldout import kept

from midflight.config import load_config
from midflight.run.heartbeat import Heartbeat
from midflight.run.parts import RolloutSpec
from midflight.run.rollout.rollout_process import RolloutProcess
from midflight.trajectories.heldout import HELDOUT
from midflight.wire.server import listen

NUM = 200


def test_the_process_waits_at_its_end_for_what_was_said_to_held_out_tasks(tmp_path: Path) -> None:
    config = load_config(None, [f"run.folder={tmp_path}"]).model_dump_json()
    launcher = SimpleNamespace(heartbeat=Heartbeat(), tell=lambda _: None)
    with listen("127.0.0.1", 0) as listener:
        spec = RolloutSpec(config, "model", listener.fileno(), "http://127.0.0.1:1", "engines", "control", {})
        process = RolloutProcess(spec, launcher, listener)  # type: ignore[arg-type]
        for position in range(NUM):
            process._record(kept(1, position))
        process.close()
    with closing(sqlite3.connect(tmp_path / HELDOUT)) as file:
        assert file.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (NUM,)
    assert not [path.name for path in tmp_path.glob(f"{HELDOUT}-*")], "no journal is left"
