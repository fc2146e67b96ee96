"""Whole runs from folders of recurrent and convolutional models: what the engine sampled is what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.zoo import SIX_HYBRIDS, tiny
from tests.real.processes import CONFIG, Command, steps

from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", SIX_HYBRIDS)
def test_three_steps_from_a_folder_have_next_to_no_mismatch(name: str, tmp_path: Path) -> None:
    model, config = tmp_path / "model", tmp_path / "small.toml"
    write_byte_tokenizer(model)
    tiny(name, vocab_size=Tokenizer.load(model).vocab_size).save_pretrained(model)
    head, _, rest = CONFIG.partition("[model]")
    config.write_text(f'{head}[model]\npath = "{model}"\nmax_context = 64\n[environment]{rest.partition("[environment]")[2]}')
    command = Command(
        "train",
        config,
        "--folder",
        tmp_path / "run",
        "--set",
        "run.steps=3",
        "--set",
        "rollout.max_staleness=0",
        folder=tmp_path,
        forked=False,
    )
    try:
        assert command.wait(240) == 0, command.said
    finally:
        command.end()
    found = steps(tmp_path / "run")
    assert len(found) == 3
    for line in found:
        assert line["trainer"]["mismatch/mean"] < 1e-3, line["trainer"]
