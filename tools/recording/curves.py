"""Golden curves: very short trainings on the CPU, each with its losses and a hash of the weights at its end. Equal means equal bits.

One training is supervised, one has a critic, one has adapters, and one each has the losses on which tests/trainer proves exactness; they
learn from drawn batches. The last is a whole ring on virtual time: agents and gateway over scripted engines, buffer, and the trainer.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tests.loop import site as ring_site
from tests.models import tiny
from tests.trainer import fixtures, test_exactness
from transformers import PreTrainedModel

from midflight.models.names import named_tensors
from midflight.observe.machine import machine
from midflight.testing.ring import SimulatedTrainer
from midflight.testing.virtual_time import run_virtual
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.supervised import SupervisedTrainer
from midflight.trainer.trainer import PolicyTrainer
from midflight.types import PackedBatch, Task
from recording import Found
from recording.comparing import changes

if TYPE_CHECKING:
    from openai import AsyncOpenAI

STEPS = 4
MADE_WITH = "made with "
ROUNDING = ("torch", "transformers", "processors")
"""What may change the last bits of a sum."""


def curves() -> Found:
    """The losses and the weights' hash of each training, and with what they were made."""
    torch.set_num_threads(1)
    return {
        **made_with(),
        "supervised": supervised(),
        "critic": from_batches(judged()),
        "adapters": from_batches(fixtures.trainer(tiny.tiny_adapted())),
        **{f"loss: {name}": from_batches(with_loss(name)) for name in test_exactness.LOSSES},
        "ring": ring(),
    }


def made_with() -> Found:
    found = machine()
    return {f"{MADE_WITH}{name}": found[name] for name in ROUNDING}


def differences(before: Found, now: Found) -> Iterator[str]:
    """Every bit counts, where both were made with the same."""
    names = [name for name in now if name.startswith(MADE_WITH) and now[name] != before.get(name)]
    if names:
        others = ", ".join(f"{name} {now[name]}, {before.get(name)} before" for name in names)
        yield f"{others}: bits may differ, so nothing is compared; record both in one environment"
        return
    yield from changes(before, now)


# --- Trainings --------------------------------------------------------------------------------------------------------


def supervised() -> str:
    trainer = SupervisedTrainer(small_model(), learning_rate=1e-2, micro_batch_tokens=8)
    examples = [
        ([257, *b"abc", 256, 258], [*b"cba", 256]),
        ([257, *b"no", 256, 258], [*b"on", 256]),
    ]
    losses = [trainer.step(examples) for _ in range(STEPS)]
    return curve(losses, trainer.model)


def from_batches(trainer: PolicyTrainer) -> str:
    losses = [trainer.step(aged_batch(version)).loss for version in range(STEPS)]
    return curve(losses, trainer.model)


def judged() -> PolicyTrainer:
    return fixtures.trainer(small_model(), scoring=Scoring("gae"), valuation=Valuation())


def with_loss(name: str) -> PolicyTrainer:
    return fixtures.trainer(
        small_model(),
        test_exactness.objective(name),
        updates_per_step=2,
        micro_batch_tokens=70,
        reference=small_model(seed=1),
    )


def ring() -> str:
    """A run in which versions are up to two steps old. Virtual time makes it the same every time."""
    trainer = fixtures.trainer(small_model())
    losses: list[float] = []

    def learn(batch: PackedBatch) -> None:
        losses.append(trainer.step(batch).loss)

    async def run(folder: Path) -> None:
        config = ring_site.config(steps=STEPS, staleness=2, size=4)
        engines = ring_site.fast_engines(2, by_version=True)
        site = ring_site.Site(config, folder, engines=engines, agents=asks_twice, sdk=False)
        site.trainer = SimulatedTrainer(on_step=learn)
        await site.run()

    with tempfile.TemporaryDirectory() as folder:
        run_virtual(run(Path(folder)))
    return curve(losses, trainer.model)


async def asks_twice(task: Task, client: AsyncOpenAI) -> float:
    """An agent of two turns. Its reward is the share of vowels in what the policy said."""
    messages = [{"role": "user", "content": str(task.data["question"])}]
    said = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        text = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        said += text
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))


# --- What they are made of, and what is kept of them ------------------------------------------------------------------


def small_model(*, seed: int = 0) -> PreTrainedModel:
    return tiny.tiny_model(seed=seed)


def aged_batch(version: int) -> PackedBatch:
    """Another batch for each version, whose tokens are of the last three."""
    batch = fixtures.batch(seed=version, version=version)
    ages = np.arange(len(batch.versions)) % 3
    batch.versions[:] = np.maximum(version - ages, 0)
    return batch


def curve(losses: list[float], model: PreTrainedModel) -> str:
    """A line for each loss, which is written so that no bit is lost, and one for the weights."""
    lines = [f"loss {loss.hex()} ({loss:.6g})" for loss in losses]
    return "\n".join([*lines, f"weights {fingerprint(model)}"])


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the names and bytes of all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(named_tensors(model).items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
