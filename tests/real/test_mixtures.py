"""A run that trains a mixture of experts: what its engine recorded of its choices gets to the trainer, through every process between."""

from __future__ import annotations

from pathlib import Path

from tests.models.mixtures import tiny_mixture

from midflight.models.load import load_model, save_model
from midflight.text.byte_tokenizer import write_byte_tokenizer

from .processes import CONFIG, Command, steps


def test_the_trainer_sends_tokens_to_the_experts_that_the_engine_sent_them_to(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    write_byte_tokenizer(tmp_path / "mixture")
    save_model(tiny_mixture("qwen3_moe"), tmp_path / "mixture")
    sets = ["model.path=mixture", "engine.dtype=bfloat16", "run.steps=2"]
    words = [word for each in sets for word in ("--set", each)]
    command = Command("train", "small.toml", "--folder", "run", *words, folder=tmp_path)
    try:
        assert command.wait(90) == 0, command.said
    finally:
        command.end()
    assert [line["trainer"]["experts/recorded_share"] for line in steps(tmp_path / "run")] == [1.0, 1.0]
    assert load_model(tmp_path / "run" / "model", dtype="float32").config.num_local_experts == 8
