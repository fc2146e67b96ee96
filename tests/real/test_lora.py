"""A run that trains adapters, in real processes: they alone travel, and what comes out is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from midflight.models.load import load_model
from midflight.models.lora import merged

from .processes import CONFIG, Command, steps

LORA = "[lora]\nrank = 4\n[trainer]\nlearning_rate = 0.01\nwarmup_steps = 0\n"
LETTERS = """
async def solve(task, client):
    answer = await client.completions.create(model="policy", prompt="x", max_tokens=6)
    text = answer.choices[0].text
    return sum(char.isascii() for char in text) / max(1, len(text))
"""


def test_adapters_are_trained_shipped_and_merged_and_the_base_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG + LORA)
    (tmp_path / "letters.py").write_text(LETTERS)
    run = tmp_path / "run"
    words = ("--folder", run, "--set", "run.steps=4", "--set", "environment.entry=letters:solve")
    command = Command("train", "small.toml", *words, folder=tmp_path)
    try:
        assert command.wait(90) == 0, command.said
    finally:
        command.end()
    assert [line["step"] for line in steps(run)] == [1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weight_updates"] > 0 and summary["failed_requests"] == 0
    base, adapters, plain = (
        load_file(path) for path in (*run.glob("start/*.safetensors"), *run.glob("adapter/*.safetensors"), *run.glob("model/*.safetensors"))
    )
    assert base.keys() == plain.keys() == load_file(run / "first" / "model.safetensors").keys()
    assert all(torch.equal(tensor, load_file(run / "first" / "model.safetensors")[name]) for name, tensor in base.items())
    assert all(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name), "they were 0 and have learnt"
    expected = merged(base, adapters, scale=2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.items())
    assert not hasattr(load_model(run / "model", dtype="float32"), "peft_config")
