"""Whole training runs of models whose layers keep states: engine and trainer each compute them in their own way, and agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.models.zoo import SIX_HYBRIDS, tiny

from midflight.models.export import export_model
from midflight.text.byte_tokenizer import END, write_byte_tokenizer

from .processes import Command, steps

NIGHTLY = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "explore", reason="takes seconds each: `make nightly` runs it")
ODD = '''
async def answer(task, client):
    """Half of all replies are right, whatever the model."""
    done = await client.chat.completions.create(model="policy", messages=task.messages)
    return float(sum(map(ord, done.choices[0].message.content or "")) % 2)
'''
CONFIG = """
[run]
name = "hybrid"
steps = 3
[model]
path = "model"
max_context = 64
[environment]
entry = "odd:answer"
max_tokens = 6
[[environment.sources]]
dataset = "spell_backward"
size = 40
heldout = 1
prompt = "reverse {word}"
content = "word"
options = { min_word_len = 3, max_word_len = 5 }
[rollout]
groups_per_step = 2
group_size = 4
max_staleness = 0
"""


@pytest.mark.parametrize("name", [name if name == "qwen3_5-text" else pytest.param(name, marks=NIGHTLY) for name in SIX_HYBRIDS])
def test_a_hybrid_trains_on_what_its_engine_sampled(name: str, tmp_path: Path) -> None:
    train(name, tmp_path)


def test_a_model_of_which_nothing_can_be_kept_trains_on_what_its_engine_sampled_and_its_start_says_how_slow_that_is(tmp_path: Path) -> None:
    said = train("recurrent_gemma", tmp_path)
    assert said.count("engine0: recurrent_gemma is served without keeping anything of a sequence") == 1
    assert "times as long as at the first (measured here)" in " ".join(said.split())


def train(name: str, folder: Path) -> str:
    """Three steps from a folder of the model. Gives what was said."""
    model = tiny(name)
    model.config.eos_token_id = END
    write_byte_tokenizer(folder / "tokenizer")
    export_model(model, folder / "tokenizer", folder / "model")
    (folder / "odd.py").write_text(ODD)
    (folder / "hybrid.toml").write_text(CONFIG)
    command = Command("train", folder / "hybrid.toml", "--folder", folder / "run", folder=folder)
    try:
        assert command.wait(150) == 0, command.said
    finally:
        command.end()
    found = [line["trainer"] for line in steps(folder / "run")]
    assert len(found) == 3 and all(step["grad_norm"] > 0 for step in found)
    # At `max_staleness = 0` every token is of the weights that are trained, those of the second and third step of a version handed over.
    assert all(step["mismatch/max"] < 1e-3 for step in found)
    return command.said
