"""A trainer of several processes, in real runs: it trains as one does, and the death of any of them costs some steps and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from midflight.models.lora import merged

from .processes import CONFIG, Command, alive, segments, steps

LETTERS = """
async def solve(task, client):
    answer = await client.completions.create(model="policy", prompt="x", max_tokens=6)
    text = answer.choices[0].text
    return sum(char.isascii() for char in text) / max(1, len(text))
"""
OPTIONS = ("environment.entry=letters:solve", "trainer.learning_rate=0.01", "trainer.warmup_steps=0")


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "letters.py").write_text(LETTERS)
    started: list[Command] = []

    def start(folder: str, *arguments: str) -> Command:
        sets = [x for argument in (*OPTIONS, *arguments) for x in (["--set", argument] if "=" in argument else [argument])]
        started.append(Command("train", "small.toml", "--folder", folder, *sets, folder=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end()


@pytest.mark.parametrize("epochs", [1, 2])
def test_two_ranks_take_the_steps_of_one(train: Callable[..., Command], tmp_path: Path, epochs: int) -> None:
    exact = ("run.steps=3", "model.dtype=float64", "rollout.max_staleness=0", f"trainer.epochs_per_step={epochs}")
    for command in [train(f"of-{ranks}", *exact, f"trainer.ranks={ranks}") for ranks in (1, 2)]:
        assert command.wait(90) == 0, command.said
    one, two = (steps(tmp_path / f"of-{ranks}") for ranks in (1, 2))
    assert [line["step"] for line in two] == [1, 2, 3]
    for name in ("loss", "grad_norm", "reward/mean", "rho/mean", "tokens/trained"):
        values = [[line["trainer"][name] for line in lines] for lines in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-6), name
    weights = [load_file(tmp_path / f"of-{ranks}" / "model" / "model.safetensors") for ranks in (1, 2)]
    assert all(torch.allclose(weights[1][name], tensor, atol=1e-6) for name, tensor in weights[0].items())


def test_a_rank_killed_in_mid_run_and_a_resume_with_one_fewer_lose_no_adapter_and_leave_nothing(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("lora.rank=4", "objective.kl_coefficient=0.1", "trainer.checkpoint_every=2", "weights.transport=pull")
    command = train("run", *options, "trainer.ranks=2", "run.steps=24")  # more than a fast machine makes before the kill
    command.until(lambda: len(steps(run)) >= 4, "step 4")
    parts = [pid for found in command.parts().values() for pid in found]
    killed = command.kill("trainer", 1)
    assert command.wait(90) == 0, command.said
    assert "ended with signal SIGKILL" in command.said and "The trainer goes on from its last checkpoint" in command.said
    assert killed in parts and not [pid for pid in parts if alive(pid)] and not segments(run)
    assert [line["step"] for line in steps(run)] == list(range(1, 25))
    assert not list((run / "checkpoints").glob(".writing*"))

    resumed = train("run", *options, "trainer.ranks=1", "run.steps=26", "--resume")
    assert resumed.wait(90) == 0, resumed.said
    assert [line["step"] for line in steps(run)] == list(range(1, 27))
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    assert json.loads((newest / "state.json").read_text())["num_ranks"] == 1
    first, adapters, plain = (
        load_file(path)
        for path in (run / "first" / "model.safetensors", *run.glob("adapter/*.safetensors"), run / "model" / "model.safetensors")
    )
    assert all(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name), "they were 0 and have learnt"
    expected = merged(first, adapters, scale=2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.items())
