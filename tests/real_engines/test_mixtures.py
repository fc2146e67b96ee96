"""Runs on real servers of models whose weights they want in other tensors than the trainer has: mixtures of experts, of which they take one
tensor each, and a text tower with others beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.mixtures import tiny_mixture, tiny_seeing
from tests.real.processes import CONFIG, Command, steps
from tests.real_engines.process import Kind, interpreter
from tests.real_engines.sites import save

from midflight.text.byte_tokenizer import write_byte_tokenizer

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
    lines = trained(save(tiny_mixture(model), tmp_path / "mixture"), tmp_path, kind=kind)
    if kind == "sglang":  # vLLM records nothing on a CPU
        assert [line["trainer"]["experts/recorded_share"] for line in lines] == [1.0] * 4


def test_the_text_tower_of_a_model_that_also_reads_images_trains_on_vllm(tmp_path: Path) -> None:
    folder = tiny_seeing(tmp_path / "seeing", kind="gemma3")
    write_byte_tokenizer(folder)
    trained(folder, tmp_path, kind="vllm")


def trained(model: Path, folder: Path, *, kind: Kind, more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Four steps, whose lines in the journal are returned. With no staleness every token of step n is of version n - 1: a version that did
    not arrive whole would show in the mismatch."""
    (folder / "small.toml").write_text(CONFIG)
    (folder / "letters.py").write_text(LETTERS)
    sets = [f"model.path={model}", f"engine.kind={kind}", f"engine.python={interpreter(kind)}", "run.steps=4", "rollout.max_staleness=0"]
    sets += ["trainer.learning_rate=0.01", "trainer.warmup_steps=0", "model.max_context=256", "environment.entry=letters:solve"]
    sets += ["gateway.request_seconds=200", "environment.rollout_seconds=200"]
    words = [word for each in (*sets, *more) for word in ("--set", each)]
    command = Command("train", "small.toml", "--folder", folder / "run", *words, folder=folder)
    try:
        assert command.wait(360) == 0, command.said
    finally:
        command.end()
    lines = steps(folder / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["trainer"]["mismatch/max"] < 1e-3 for line in lines), lines
    assert json.loads((folder / "run" / "summary.json").read_text())["weight_updates"] >= 3
    return lines
