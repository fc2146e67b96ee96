"""A made run of any size, with store, journal, timeline and configuration, for `viewer.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from midflight.config import Config
from midflight.config.dump import as_toml
from midflight.observe.learning import histogram
from midflight.observe.lines import StepLine
from midflight.observe.status import Totals
from midflight.observe.timeline import CommitTimed, RolloutTimed, StepTimed, WaitTimed
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.trajectories.store import Store
from midflight.types import (
    Batch,
    Group,
    GroupKey,
    Reason,
    RolloutKey,
    Row,
    Task,
    Trajectory,
    TurnTimes,
)
from midflight.types.facts import (
    Admitted,
    Checkpointed,
    Fact,
    GroupClosed,
    GroupFinished,
    Leased,
    Stepped,
    TrajectoryKept,
)

GROUP_SIZE = 8
GROUPS_PER_STEP = 16
PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
EPOCH = 4000
"""Groups of an epoch."""
ROLLOUT_SECONDS = 4.0
BETWEEN_SECONDS = ROLLOUT_SECONDS / 32
"""The time from the beginning of one rollout to that of the next: 32 run at a time."""
LONG_WORDS = ("rain", "therefore", "seven", "answer", "wrong", "right", "tool", "city")
WORDS = (*"abcdefghijklmnopqrstuvwxyz", *LONG_WORDS)


def make(folder: Path, *, rollouts: int, tokens: int) -> None:
    """Writes a run in which one group in ten is dropped, and one rollout in forty has failed."""
    write_byte_tokenizer(folder / "start")
    steps = write_store(folder, rollouts=rollouts, tokens=tokens)
    (folder / "config.toml").write_text(as_toml(Config()))
    timeline: list[object] = []
    journal: list[object] = []
    for number in range(rollouts):
        timeline.append(rollout_line(number, tokens))
        step = number // PER_STEP
        if number % PER_STEP == PER_STEP - 1 and step < steps:
            ended = number * BETWEEN_SECONDS + ROLLOUT_SECONDS
            began = ended - PER_STEP * BETWEEN_SECONDS
            timeline.append(WaitTimed("trainer", "generation", began, ended - 6.0))
            timeline.append(StepTimed(step, step + 1, ended - 6.0, ended, PER_STEP * tokens))
            timeline.append(CommitTimed("engine0", step + 1, ended, 0.2, 0.01))
            journal.append(step_line(step + 1, ended, tokens))
    write_lines(folder / "timeline.jsonl", timeline)
    write_lines(folder / "metrics.jsonl", journal)


def write_lines(path: Path, lines: Iterable[object]) -> None:
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for line in lines:
            file.write(encode(line) + b"\n")


# --- The store ------------------------------------------------------------------------------------


def write_store(folder: Path, *, rollouts: int, tokens: int) -> int:
    """Returns the number of steps."""
    draw = np.random.default_rng(0)
    store = Store(folder / "store.sqlite", run="benchmark")
    groups: list[Group] = []
    version = 0
    for number in range(rollouts // GROUP_SIZE):
        group, facts = made_group(number, tokens, draw)
        if number % 10 == 0:
            facts.append(GroupClosed(group.key, Reason.ZERO_SPREAD, group.num_trainable))
        else:
            groups.append(group)
        if len(groups) == GROUPS_PER_STEP:
            following = version + 1
            batch = Batch(following, version, tuple(groups))
            facts.append(Leased(batch, {}, {}, {}))
            facts.append(Stepped(following, following, 0.0, 1.0, num_tokens=0, metrics={}))
            facts.append(Checkpointed(following))
            version = following
            groups = []
        store.write([deed_of(fact) for fact in facts])
    store.close()
    return version


def deed_of(fact: Fact) -> Callable[[Store], object]:
    return partial(apply_fact, fact)


def apply_fact(fact: Fact, store: Store) -> None:
    store.apply(fact)


def made_group(number: int, tokens: int, draw: np.random.Generator) -> tuple[Group, list[Fact]]:
    """The group, and what happened until it was finished."""
    epoch, position = divmod(number, EPOCH)
    key = GroupKey(epoch, position)
    source = "letters" if position % 3 else "sums"
    question = f"What is number {position}?"
    task = Task(f"task-{position % 1000}", source, {"question": question})
    kept = [made_trajectory(RolloutKey(key, n), task, tokens, draw) for n in range(GROUP_SIZE)]
    group = Group.of(key, task, kept)
    facts: list[Fact] = [Admitted(key, task)]
    facts += [TrajectoryKept(each, {}, {}) for each in kept]
    facts.append(GroupFinished(group, number + 1))
    return group, facts


def made_trajectory(
    key: RolloutKey, task: Task, tokens: int, draw: np.random.Generator
) -> Trajectory:
    words = " ".join(WORDS[at] for at in draw.integers(0, len(WORDS), tokens // 4))
    prompt = f"<|user|>{task.text('question')}<|end|><|assistant|>"
    text = (prompt + words).encode()[:tokens].ljust(tokens)
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    written = np.arange(tokens) >= len(prompt)
    logprobs = -draw.random(tokens, dtype=np.float32)
    versions = np.zeros(tokens, np.int32)
    failed = draw.random() < 1 / 40
    row = Row(ids, written, written, logprobs, versions, versions, turns=versions)
    reward = None if failed else round(float(draw.random()), 3)
    return Trajectory(
        key,
        task.id,
        task.source,
        reward,
        (row,),
        error="RolloutTimeout: the rollout took longer than 60 s" if failed else None,
        seconds=1.0,
        components={"right": reward or 0.0},
    )


# --- Timeline and journal -------------------------------------------------------------------------


def rollout_line(number: int, tokens: int) -> RolloutTimed:
    """A rollout takes 4 s and has three answers."""
    began = number * BETWEEN_SECONDS
    step = number // PER_STEP
    turns: list[TurnTimes] = []
    for at in range(3):
        asked = began + at
        attempts = (("engine0", asked),)
        turns.append(TurnTimes(asked, asked + 0.9, attempts, ((step, asked + 0.2),), tokens // 3))
    group, sample = divmod(number, GROUP_SIZE)
    epoch, position = divmod(group, EPOCH)
    return RolloutTimed(
        (epoch, position, 0, sample),
        "letters" if group % 3 else "sums",
        began,
        began + ROLLOUT_SECONDS,
        0.5,
        tokens,
        tuple(turns),
    )


def step_line(step: int, at: float, tokens: int) -> StepLine:
    rising = 0.2 + 0.6 * step / (step + 200)
    lengths = histogram([tokens * (5 + n) / 10 for n in range(6)])
    trainer: dict[str, float | None] = {
        "rho/ess": 0.9,
        "mismatch/mean": 1e-3,
        "entropy/estimate": 1.0 / (1 + step / 500),
        "rho/k3": 1e-3,
        "grad_norm": 0.5,
    }
    return StepLine(
        step=step,
        version=step,
        seconds=at,
        step_seconds=6.0,
        tokens=PER_STEP * tokens,
        groups=GROUPS_PER_STEP,
        rollouts=PER_STEP,
        reward=rising,
        reward_by_source={"letters": rising, "sums": rising / 2},
        components={"right": rising},
        staleness={0: 500, 1: 200},
        staleness_mean=0.3,
        staleness_max=1,
        generated_length=float(tokens),
        trained_length=float(tokens),
        truncated_share=0.02,
        histograms={
            "reward": histogram([0.0, 0.5, 1.0]),
            "generated_length": lengths,
            "trained_length": lengths,
        },
        generation_rate=2400.0,
        training_rate=2300.0,
        waits={"trainer for generation": 8.0},
        trainer=trainer,
        totals=Totals(),
    )
