"""`midflight rollouts` with the example trainer, which knows only the HTTP API: real processes, real weights."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

from .processes import CONFIG, ENVIRON, Command, alive, segments, steps

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_trainer.py"
STEPS = 5
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=64")


def test_a_trainer_of_sixty_lines_trains_over_http_and_its_versions_go_live(tmp_path: Path) -> None:
    sets = [word for size in SIZES for word in ("--set", f"model.{size}")]
    made = Command("new-model", tmp_path / "model", *sets, folder=tmp_path / "making")
    assert made.wait() == 0, made.said
    (tmp_path / "small.toml").write_text(CONFIG)
    run = tmp_path / "run"
    command = Command("rollouts", "small.toml", "--folder", run, "--set", f"model.path={tmp_path / 'model'}", folder=tmp_path)
    try:
        command.until(lambda: (run / "endpoint.json").exists(), "endpoint.json")
        assert stat.S_IMODE((run / "endpoint.json").stat().st_mode) == 0o600
        endpoint = json.loads((run / "endpoint.json").read_text())
        command.until(lambda: f"ready: {endpoint['url']}" in command.said, "address")
        assert command.said.count(endpoint["control_token"]) == 1
        trainer = subprocess.run(
            [sys.executable, EXAMPLE, run / "endpoint.json", "--steps", str(STEPS)], env=ENVIRON, capture_output=True, text=True, timeout=60
        )
        parts = [pid for found in command.parts().values() for pid in found]
        assert trainer.returncode == 0, trainer.stderr + command.said
        assert [line.rpartition("served ")[2] for line in trainer.stdout.splitlines()] == [str(n + 1) for n in range(STEPS)]
        assert command.wait() == 0, command.said
    finally:
        command.end()
    assert not [pid for pid in parts if alive(pid)] and not segments(run) and not (run / "endpoint.json").exists()
    check_accounts(run)


def check_accounts(run: Path) -> None:
    """Every step trained the two groups of four that it took, once, and the journal has the trainer's own metric (I1, I8)."""
    assert [(line["step"], line["version"]) for line in steps(run)] == [(n + 1, n + 1) for n in range(STEPS)]
    with sqlite3.connect(run / "store.sqlite") as store:
        assert store.execute("SELECT COUNT(*) FROM groups WHERE state = 'trained'").fetchone() == (2 * STEPS,)
        assert store.execute("SELECT COUNT(*) FROM leases").fetchone() == (0,)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (STEPS, 0, 0)
    assert summary["weight_updates"] >= STEPS and summary["max_token_staleness"] <= 4


def test_a_model_must_be_given_for_a_trainer_that_brings_its_own(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    command = Command("rollouts", "small.toml", folder=tmp_path)
    assert command.wait() == 2 and "model.path" in command.said and not (tmp_path / "runs" / "run" / "endpoint.json").exists()
