"""Agents of other people on a model that talks: the code of their page, as it is, trains SmolLM2 on sums. It answers badly, by the whole way.

`make test-agents` fetches the model into `models/` where it is not there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages.blocks import ROOT
from tests.shares import check_trained_share

from midflight.archive.ledger import ledger_of

from .frameworks import code_of

MODEL = Path(os.environ.get("MIDFLIGHT_PRETRAINED", ROOT / "models" / "smollm2-135m"))
STEPS = 2
SECONDS = 380.0
SETTINGS = (
    f"model.path={MODEL}",
    f"run.steps={STEPS}",
    "model.max_context=2048",
    "environment.max_tokens=48",
    "environment.sources.0.heldout=0",
    "environment.rewards=[]",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
)


@pytest.mark.parametrize("name", ["openai_agent", "pydantic_agent", "swe_agent"])
def test_the_agent_of_a_framework_trains_a_model_that_talks(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(code_of(name))
    settings = (*SETTINGS, f"environment.entry={name}:solve")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "midflight", "train", str(ROOT / "configs" / "pretrained-sums.toml"), "--folder", "run", *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"]) == (STEPS, 0), ended.stdout
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "step"]
    trained = [step["trainer"] for step in steps]
    assert all(math.isfinite(step["grad_norm"]) for step in trained) and any(step["grad_norm"] > 0 for step in trained), trained
    gaps = [step["mismatch/same_keys/mean"] for step in trained if "mismatch/same_keys/mean" in step]
    assert gaps and max(gaps) < 3e-5, trained
    ledger = ledger_of(run)
    check_trained_share(ledger.accounts.received_tokens, ledger.accounts.masked_tokens)
    assert ledger.balanced and ledger.accounts.trained_tokens == summary["trained_tokens"] > 0, ledger.mistakes
    shutil.rmtree(run)  # gigabytes, which pytest would keep
