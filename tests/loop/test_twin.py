"""The whole ring against `examples/one_file_grpo.py`, in float64 (I2): with `max_staleness` 0 they are the same computation."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from tests.facts import Facts

from midflight.config.sections import Config, EngineSection, EnvironmentSection, ModelSection, RolloutSection, RunSection, TrainerSection
from midflight.environments.tasks import SeededStream, Source
from midflight.models.load import load_model
from midflight.models.names import named_tensors
from midflight.run.engine.engine_process import make_engine
from midflight.run.trainer.trainer_process import ModelWeights, PublishedVersions, first_model, put_together
from midflight.testing.ring import open_ring
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.step import StepReport
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import PackedBatch, Task
from midflight.types.facts import Leased
from midflight.weights.transports.select import publisher

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WORDS = ("ab", "cde", "fg", "hij", "k", "lm", "no", "pqr")
CONFIG = Config(
    run=RunSection(name="twin", seed=5, steps=3),
    model=ModelSection(dtype="float64", hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_context=32),
    engine=EngineSection(max_running=6, max_batch_tokens=64),  # fewer than are admitted: some answers join a batch under way
    environment=EnvironmentSection(max_tokens=6, temperature=0.9),
    rollout=RolloutSection(groups_per_step=2, group_size=4, max_staleness=0),
    trainer=TrainerSection(learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5, micro_batch_tokens=40, checkpoint_every=0),
)


def score(reply: str) -> float:
    """A reward that a policy which knows nothing gets in several sizes. Only ASCII counts: the rest need not be UTF-8."""
    return sum(ord(c) for c in reply if ord(c) < 128) % 3 / 2


async def scored(task: Task, client: AsyncOpenAI) -> float:
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(task.data["question"])}])
    return score(completion.choices[0].message.content or "")


class Watched:
    """A trainer that keeps its batches and reports."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self.batches: list[PackedBatch] = []
        self.reports: list[StepReport] = []

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def num_steps(self) -> int:
        return self._trainer.num_steps

    def step(self, batch: PackedBatch) -> StepReport:
        self.batches.append(batch)
        self.reports.append(self._trainer.step(batch))
        return self.reports[-1]


def answers(batch: PackedBatch) -> list[tuple[list[int], list[int], float]]:
    """(prompt, sampled tokens, reward) of each rollout, in the batch's order."""
    found: list[tuple[list[int], list[int], float]] = []
    for row, rollout in enumerate(batch.row_rollout.tolist()):
        span = slice(batch.row_offsets[row], batch.row_offsets[row + 1])
        ids, mask = batch.token_ids[span], batch.loss_mask[span]
        found.append((ids[~mask].tolist(), ids[mask].tolist(), float(batch.rewards[rollout])))
    return found


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"
    spec = importlib.util.spec_from_file_location("one_file_grpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def ring(model_folder: Path, folder: Path, source: Source, trainer: Watched, outbox: ModelWeights, seen: Facts) -> int:
    """A whole run; gives the version that the engine attests at its end."""
    engine = make_engine(CONFIG, model_folder, name="engine", version=0)
    opened = open_ring(
        CONFIG,
        [engine],
        tokenizer=Tokenizer.load(model_folder),
        sources=[source],
        environment=scored,
        folder=folder,
        record=seen.apply,
    )
    async with opened as made:
        await made.train(trainer, outbox, engine.run())
    return made.serving.fleet.served_version()


def test_i2_without_staleness_three_steps_of_the_ring_are_those_of_the_synchronous_twin(
    twin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompts, tokens and rewards of every rollout, and losses and weights equal to 1e-6."""
    folder = first_model(CONFIG.model, tmp_path / "model", seed=3)
    source = Source("words", 1.0, tuple(Task(word, "words", {"question": word, "answer": word[::-1]}) for word in WORDS))
    stream = SeededStream([source], seed=CONFIG.run.seed)
    order = [stream.task_at(0, index) for index in range(len(WORDS))]

    monkeypatch.setattr(
        twin, "exact_match", lambda r, answer: score(twin.decode(r.answer[: r.answer.index(256)] if 256 in r.answer else r.answer))
    )
    theirs = twin.load(str(folder), dtype=torch.float64)
    before = [p.detach().clone() for p in theirs.parameters()]
    steps = twin.run(
        theirs,
        [(str(task.data["question"]), str(task.data["answer"])) for task in order],
        steps=3,
        groups=2,
        samples=4,
        max_tokens=6,
        temperature=0.9,
        learning_rate=1e-2,
        warmup_steps=2,
        max_grad_norm=0.5,
        run_name="twin",
        run_seed=5,
    )

    model = load_model(folder, dtype="float64")
    trainer = Watched(trainer_of(CONFIG, model))
    seen = Facts()
    with publisher("shared_memory", name=f"midflight-twin-{os.getpid()}", folder=tmp_path / "weights") as weights:
        outbox = ModelWeights(
            put_together(lambda: named_tensors(model), weights, dtype="float64"), PublishedVersions(tmp_path / "published")
        )
        assert asyncio.run(ring(folder, tmp_path, source, trainer, outbox, seen)) == 3

    for step, batch, report in zip(steps, trainer.batches, trainer.reports, strict=True):
        assert answers(batch) == [(r.prompt, r.answer, r.reward) for r in step.rollouts]
        assert len({r.reward for r in step.rollouts}) > 1, "equal rewards would teach nothing, and prove nothing"
        assert report.loss == pytest.approx(step.loss, abs=1e-6)
    assert all(set(fact.staleness) == {0} for fact in seen.of(Leased))
    ours = named_tensors(model)
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(theirs.parameters(), before, strict=True))
    apart = max(float((ours[name] - p).detach().abs().max()) for name, p in theirs.named_parameters())
    assert moved > 1e-3 and apart < 1e-6
