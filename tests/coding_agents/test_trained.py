"""Claude Code, Codex and opencode are trained: whole runs of `midflight train` on a made model, in which each rollout runs the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.coding_agents.clis import MODULES
from tests.shares import check_trained_share

from midflight.archive.ledger import ledger_of

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "AGENTS_MODULES": str(MODULES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SECONDS = 500.0
"""For a whole run: its agents take some seconds each, the processes some more to start."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    subprocess.run([sys.executable, "examples/coding_agents.py", folder], cwd=ROOT, env=ENVIRON, check=True, timeout=SECONDS)
    return folder


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("agent", ["claude_code", "codex", "opencode"])
def test_a_coding_agent_is_trained_for_two_steps_and_every_token_is_accounted_for(agent: str, model: Path, tmp_path: Path) -> None:
    written = (ROOT / "configs" / "coding-agents.toml").read_text()
    for name, value in {
        'entry = "examples.coding_agents:codex"': f'entry = "examples.coding_agents:{agent}"',
        "heldout = 4": "heldout = 0",
    }.items():
        assert name in written
        written = written.replace(name, value)
    (tmp_path / "agents.toml").write_text(written)
    sets = ("run.steps=2", "rollout.group_size=2", f"model.path={model}", f"run.folder={tmp_path / 'run'}")
    command = [sys.executable, "-m", "midflight", "train", tmp_path / "agents.toml", *(word for each in sets for word in ("--set", each))]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["weight_updates"], summary["failed_requests"], summary["failed_rollouts"]) == (2, 2, 0, 0)
    ledger = ledger_of(tmp_path / "run")
    assert ledger.balanced and ledger.accounts.trained == 2, ledger.mistakes
    check_trained_share(ledger.accounts.received_tokens, ledger.accounts.masked_tokens)
    assert ledger.accounts.trained_tokens == summary["trained_tokens"] > 0
