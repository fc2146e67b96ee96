"""`midflight ledger --prove --witness N`: a step again, with a witness for each of its samples that
shows whether the sample had a gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midflight.config.load import past_config
from midflight.errors import NoRun
from midflight.run.replay.bundle import batches_of
from midflight.run.replay.recorded_steps import lines_of
from midflight.run.replay.step import ReplayedStep, checkpoint_before, replay_step
from midflight.trainer.own_loss import objective_of


@dataclass(frozen=True, slots=True)
class Witness:
    """One rollout of a step."""

    number: int
    """Its number in the batch."""
    num_tokens: int
    """Its tokens that the step trained on, by the books."""
    expected: bool
    """True if some of these tokens has an advantage and was neither masked nor clipped."""
    gradient: float
    """The sum of the magnitudes of its tokens' derivatives."""

    @property
    def holds(self) -> bool:
        return (self.gradient > 0) == self.expected


def witnesses(
    folder: Path, number: int, *, seed: int | None = None
) -> tuple[ReplayedStep, tuple[Witness, ...]]:
    """Makes the newest step again that can be made, and returns it with the witnesses of so many of
    its rollouts, chosen by chance. Without a seed nobody can know beforehand which.
    """
    config = past_config(folder / "config.toml")
    if config.trainer.epochs_per_step > 1 or not objective_of(config).needs_advantage:
        raise NoRun(
            f"the loss of {folder} gives tokens a gradient that its books do not say by themselves "
            "(trainer.epochs_per_step above 1, or a term beside the advantage); --witness cannot "
            "judge its steps."
        )
    replayed = replay_step(folder, _newest(folder), batches_of)
    found = list(witnesses_of(replayed))
    chosen = random.Random(seed).sample(found, min(number, len(found)))
    return replayed, tuple(sorted(chosen, key=lambda one: one.number))


def _newest(folder: Path) -> int:
    for step in sorted(lines_of(folder), reverse=True):
        try:
            checkpoint_before(folder, step)
        except NoRun:
            continue
        return step
    raise NoRun(
        f"{folder} has no step whose checkpoint is kept; raise trainer.keep_checkpoints for the next "
        "run."
    )


def witnesses_of(replayed: ReplayedStep) -> Iterator[Witness]:
    """The witnesses of all rollouts of a step."""
    batch = replayed.batch
    watch = replayed.watch
    tokens = watch.tokens
    rollout = tokens.rollout.cpu().numpy()
    _, _, weight, below, above, *masked = watch.record.readings.cpu().numpy()
    gone = np.zeros(len(rollout), np.bool_)
    for line in (below, above, *masked):
        gone |= line > 0
    counts = (tokens.advantage.cpu().numpy() != 0) & ~gone & (weight != 0)
    lengths = np.diff(batch.row_offsets)
    rollout_of = np.repeat(batch.row_rollout, lengths)
    for number in range(len(batch.rewards)):
        own = rollout == number
        yield Witness(
            number,
            int(batch.loss_mask[rollout_of == number].sum()),
            bool(counts[own].any()),
            float(np.abs(watch.witness.numpy()[own]).sum()),
        )
