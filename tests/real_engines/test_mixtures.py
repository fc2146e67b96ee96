"""Runs that train mixtures of experts on real servers, which take one tensor for each expert where the trainer has one for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.mixtures import tiny_mixture
from tests.real.processes import CONFIG, Command, steps
from tests.real_engines.process import Kind, interpreter
from tests.real_engines.sites import save

pytestmark = pytest.mark.timeout(400)

LETTERS = """
async def solve(task, client):
    answer = await client.completions.create(model="policy", prompt="x", max_tokens=6)
    text = answer.choices[0].text
    return sum(char.isascii() for char in text) / max(1, len(text))
"""


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_mixture_trains_on_a_real_server_and_each_version_is_the_one_that_is_served(kind: Kind, model: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "letters.py").write_text(LETTERS)
    folder = save(tiny_mixture(model), tmp_path / "mixture")
    sets = [f"model.path={folder}", f"engine.kind={kind}", f"engine.python={interpreter(kind)}", "run.steps=4", "rollout.max_staleness=0"]
    sets += ["trainer.learning_rate=0.01", "trainer.warmup_steps=0", "model.max_context=256", "environment.entry=letters:solve"]
    sets += ["gateway.request_seconds=200", "environment.rollout_seconds=200"]
    words = [word for each in sets for word in ("--set", each)]
    command = Command("train", "small.toml", "--folder", tmp_path / "run", *words, folder=tmp_path)
    try:
        assert command.wait(360) == 0, command.said
    finally:
        command.end()
    lines = steps(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # With no staleness every token of step n is of version n - 1: a version that did not arrive whole would show here.
    assert all(line["trainer"]["mismatch/max"] < 1e-3 for line in lines), lines
    if kind == "sglang":  # vLLM records nothing on a CPU
        assert [line["trainer"]["experts/recorded_share"] for line in lines] == [1.0] * 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["weight_updates"] >= 3
