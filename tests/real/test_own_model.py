"""`midflight init --model`, from a model to a run: what it writes passes the dry run, and trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .processes import ENVIRON, Command, steps, without_waiting

SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=256")


def done(*arguments: object, folder: Path, status: int = 0) -> str:
    command = Command(*arguments, folder=folder)
    assert command.wait(300) == status, command.said
    return command.said


def test_what_is_written_for_a_model_passes_the_dry_run_and_trains(tmp_path: Path) -> None:
    done("new-model", "model", *[word for size in SIZES for word in ("--set", f"model.{size}")], folder=tmp_path)
    said = done("init", "mine", "--model", "model", folder=tmp_path)
    assert "measured with " in said and "chosen: all weights at a learning rate of 0.0003" in said
    project = tmp_path / "mine"
    files = {path.name for path in project.iterdir()}
    assert files == {"run.toml", "rewards.py", "environment.py", "test_project.py", "tasks.jsonl"}
    shown = done("train", "run.toml", "--dry-run", folder=project)
    assert "trainer.learning_rate" in shown and re.search(r"total +\S+ [MG]B", shown)
    done("train", "run.toml", "--set", "run.steps=2", "--set", "environment.max_tokens=4", folder=project)
    assert len(steps(project / "runs" / "mine")) == 2
    own = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=project, env=ENVIRON, capture_output=True, text=True, check=False)
    assert own.returncode == 0, own.stdout


def test_a_broken_file_and_unknown_tasks_leave_no_project(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF and no more")
    said = done("init", "mine", "--model", "cut.gguf", folder=tmp_path, status=2)
    assert "reading 'cut.gguf': it is no whole GGUF file" in said and without_waiting(said).count("midflight: ") == 2, said
    done("new-model", "model", *[word for size in SIZES for word in ("--set", f"model.{size}")], folder=tmp_path)
    said = done("init", "mine", "--model", "model", "--tasks", "chain_summ", folder=tmp_path, status=2)
    assert "chain_sum" in said.splitlines()[-1], said
    assert not (tmp_path / "mine").exists()
