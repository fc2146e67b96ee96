"""I8 in one process: the rollout side dies at any instant, without a word, and another goes on from its file and a checkpoint."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from midflight.testing.ring import SimulatedTrainer, SlowSteps
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories import segments
from midflight.trajectories.database import State
from midflight.trajectories.segments import SEGMENTS, place_of
from midflight.types import Batch, PackedBatch, Reason, Version
from midflight.types.facts import Alarmed, Stepped

from .site import Agents, Site, config, fast_engines

NUM_TASKS = 8
Place = tuple[int, int]
"""(epoch, index): a prompt's place in the stream, whatever its attempts."""


class Killed(Exception):
    """The instant of death."""


class Life:
    """A run from one death to the next; it saves a checkpoint every other step, and at its end."""

    def __init__(self, folder: Path, seed: int, *, staleness: int, version: Version, checkpoint: Version | None, steps: int) -> None:
        self.site = Site(
            config(staleness=staleness, every=2, steps=steps),
            folder,
            engines=fast_engines(2, by_version=True, version=version),
            agents=Agents(seed, failing=0.03, longest=1.5),
            num_tasks=NUM_TASKS,
            sdk=False,
        )
        self.site.trainer = self.trainer = SimulatedTrainer(version=version, on_step=self._on_step)
        self.checkpoint = checkpoint
        self.saved: Version = checkpoint or 0
        """Version of the last checkpoint on disk; version 0 is the model the run began with."""
        self.stepped: list[Batch] = []
        self.finished = set[tuple[int, ...]]()
        """Groups that waited for a step, or were in one, when it died."""

    def _on_step(self, batch: PackedBatch) -> None:
        self.stepped.append(next(taken for taken in self.site.taken if taken.lease == batch.lease))

    async def run(self, seconds: float | None, grave: Path) -> bool:
        """Whether it came to its last step. At its death, after `seconds`, `grave` gets the files as they are then."""
        died = False
        try:
            async with self.site.opened(version=self.trainer.version, checkpoint=self.checkpoint) as ring:
                slow = SlowSteps(ring.system, seconds=lambda: 0.4)
                await ring.train(self.trainer, self.trainer, self._death(seconds, grave), service=slow, stage=self._stage)
        except* Killed:
            died = True
        return not died

    def _stage(self) -> Callable[[], None]:
        return partial(self._save, self.trainer.version)

    def _save(self, version: Version) -> None:
        self.saved = version

    async def _death(self, seconds: float | None, grave: Path) -> None:
        """Waits for its instant. What follows in this process, such as the writer's last words, is not in `grave`."""
        if seconds is None:
            return
        await asyncio.sleep(seconds)
        with sqlite3.connect(self.site.folder / "store.sqlite") as file:
            self.finished.update(
                file.execute("SELECT epoch, position, attempt FROM groups WHERE state IN (?, ?)", (State.WAITING, State.LEASED))
            )
        grave.mkdir()
        for file in self.site.folder.glob("store.sqlite*"):
            shutil.copy(file, grave / file.name)
        if (self.site.folder / SEGMENTS).exists():
            shutil.copytree(self.site.folder / SEGMENTS, grave / SEGMENTS)
        raise Killed

    @property
    def survived(self) -> Iterable[Place]:
        """Prompts trained in steps that the last checkpoint contains."""
        return [(g.key.epoch, g.key.index) for batch in self.stepped if batch.train_version < self.saved for g in batch.groups]

    @property
    def next_version(self) -> Version:
        """A number that was never handed out, unless the checkpoint is the newest."""
        return self.saved if self.trainer.version <= self.saved else self.trainer.version + 1


def states(folder: Path) -> dict[Place, list[tuple[State, Reason | None]]]:
    """Of every attempt at each prompt."""
    found: dict[Place, list[tuple[State, Reason | None]]] = {}
    with sqlite3.connect(folder / "store.sqlite") as file:
        for epoch, index, state, reason in file.execute(
            "SELECT epoch, position, state, reason FROM groups ORDER BY epoch, position, attempt"
        ):
            found.setdefault((epoch, index), []).append((State(state), Reason(reason) if reason else None))
    return found


def closed_as_too_old(folder: Path) -> set[tuple[int, ...]]:
    with sqlite3.connect(folder / "store.sqlite") as file:
        return set(file.execute("SELECT epoch, position, attempt FROM groups WHERE reason = ?", (Reason.REQUEUED,)))


def lives(folder: Path, seed: int, staleness: int) -> list[Life]:
    """One to three deaths, then a life to the end of its steps."""
    draw = random.Random(seed)
    deaths = [draw.uniform(0.0, 4.0) for _ in range(draw.randint(1, 3))]
    made: list[Life] = []
    version, checkpoint = 0, None
    for number, seconds in enumerate([*deaths, None]):
        life = Life(folder, seed + number, staleness=staleness, version=version, checkpoint=checkpoint, steps=12)
        grave = folder.with_name(f"{folder.name}-{number}")
        made.append(life)
        if run_virtual(life.run(seconds, grave), seed=seed, max_seconds=20_000):
            break
        folder, version, checkpoint = grave, life.next_version, life.saved
    return made


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_i8_after_any_deaths_no_prompt_is_lost_and_none_is_trained_twice(tmp_path: Path, staleness: int) -> None:
    num_deaths = 0
    for seed in range(10):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        made = lives(folder, seed, staleness)
        num_deaths += len(made) - 1
        trained = Counter(place for life in made for place in life.survived)
        assert set(trained.values()) == {1}, f"seed {seed}: trained twice: {[p for p, n in trained.items() if n > 1]}"

        found = states(made[-1].site.folder)
        assert [place for place in sorted(found) if place[0] == 0] == [(0, index) for index in range(NUM_TASKS)], (
            f"seed {seed}: a prompt lost"
        )
        for place, attempts in found.items():
            last, reason = attempts[-1]
            assert (last is State.TRAINED) == (place in trained), f"seed {seed}: {place} is {last}, trained {trained[place]} times"
            assert last is not State.DROPPED or reason in (Reason.NO_REWARD, Reason.TOO_FEW), f"seed {seed}: {place} dropped for {reason}"
            if place[0] == 0 and last is not State.DROPPED:
                assert last is State.TRAINED, f"seed {seed}: the epoch is over, but {place} is {last}"
        for life in made:
            lost = life.finished & closed_as_too_old(made[-1].site.folder)
            assert not lost, f"seed {seed}: {lost} had finished when it died, and were closed as too old"
            life.site.check_answers()
            for batch in life.trainer.batches:
                ages = batch.train_version - batch.versions[batch.loss_mask]
                assert ages.min() >= 0 and ages.max() <= staleness
    assert num_deaths > 10


def test_i8_rollouts_that_had_ended_before_the_death_are_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = Life(folder, 3, staleness=1, version=0, checkpoint=None, steps=10)
    grave = tmp_path / "grave"
    assert not run_virtual(first.run(2.0, grave), seed=3)
    with sqlite3.connect(grave / "store.sqlite") as file:
        ended = set(file.execute("SELECT epoch, position, attempt, sample FROM rollouts WHERE reward IS NOT NULL").fetchall())
    second = Life(grave, 4, staleness=1, version=first.next_version, checkpoint=first.saved, steps=2)
    assert run_virtual(second.run(None, tmp_path), seed=4)
    again = {(k.group.epoch, k.group.index, k.group.attempt, k.sample) for k in second.site.received}
    assert ended and not ended & again


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_a_group_that_the_disk_has_damaged_begins_again_with_an_alarm_and_is_trained(tmp_path: Path, state: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = Life(folder, 3, staleness=1, version=0, checkpoint=None, steps=10)
    grave = tmp_path / "grave"
    assert not run_virtual(first.run(3.1, grave), seed=3)
    with sqlite3.connect(grave / "store.sqlite") as file:
        epoch, index, attempt, value = file.execute(
            "SELECT epoch, position, attempt, rows FROM rollouts JOIN groups USING (epoch, position, attempt) "
            "WHERE state = ? AND num_trainable > 0",
            (state,),
        ).fetchone()
    place = place_of(value)
    assert place is not None
    segment = grave / SEGMENTS / f"{place.segment:016x}.segment"
    data = bytearray(segment.read_bytes())
    data[place.offset + place.length // 2] ^= 8
    segment.write_bytes(data)
    second = Life(grave, 4, staleness=1, version=first.next_version, checkpoint=first.saved, steps=12)
    assert run_virtual(second.run(None, tmp_path), seed=4)
    (alarm,) = [alarm for alarm in second.site.seen.of(Alarmed) if alarm.name == "damaged"]
    assert str(segment) in alarm.text and "Its group begins again." in alarm.text
    damaged, again, *_ = states(grave)[epoch, index][attempt:]
    assert damaged == (State.DROPPED, Reason.DAMAGED)
    assert again[0] is State.TRAINED
    assert {(key.group.epoch, key.group.index, key.group.attempt) for key in second.site.received} >= {(epoch, index, attempt + 1)}


def test_a_run_that_keeps_an_hour_removes_what_training_does_not_need_and_trains_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segments, "time", SimpleNamespace(time=lambda: time.time() + 7200))
    life = Life(tmp_path, 3, staleness=1, version=0, checkpoint=None, steps=12)
    run = life.site.config.run.model_copy(update={"keep_trajectories": "1h"})
    life.site.config = life.site.config.model_copy(update={"run": run})
    assert run_virtual(life.run(None, tmp_path), seed=3)
    removed = len(list((tmp_path / SEGMENTS).glob("*.removed")))
    left = len(list((tmp_path / SEGMENTS).glob("*.segment")))
    assert removed > 20 and left < 10, "each rollout has a segment of its own"
    assert len(life.trainer.batches) == 12
    with sqlite3.connect(tmp_path / "store.sqlite") as file:
        assert file.execute("SELECT COUNT(*) FROM seals WHERE event = 'rollout'").fetchone()[0] >= removed


def num_leases(folder: Path) -> int:
    with sqlite3.connect(folder / "store.sqlite") as file:
        return int(file.execute("SELECT COUNT(*) FROM leases").fetchone()[0])


def test_i8_a_run_that_died_after_its_last_step_goes_on_to_its_end_and_leaves_no_batch_on_lease(tmp_path: Path) -> None:
    """What it draws before it sees that all steps are made waits again."""
    first = Life(tmp_path, 3, staleness=2, version=0, checkpoint=None, steps=4)
    assert run_virtual(first.run(None, tmp_path), seed=3)
    second = Life(tmp_path, 4, staleness=2, version=4, checkpoint=4, steps=4)
    second.trainer.num_steps = 4
    assert run_virtual(second.run(None, tmp_path), seed=4)
    assert second.site.taken and not second.trainer.batches
    assert num_leases(tmp_path) == 0
    assert second.site.books.num_leased == 0


def test_i8_a_batch_that_was_drawn_ahead_waits_again_at_the_end(tmp_path: Path) -> None:
    """As of a run that ends by its rewards, with the batch of the next step in its hands."""
    life = Life(tmp_path, 3, staleness=2, version=0, checkpoint=None, steps=4)

    async def run() -> None:
        async with life.site.opened() as ring:

            async def trainer() -> None:
                batch = await ring.system.take(0)
                await ring.system.take(1)
                await ring.system.done(Stepped(batch.lease, 1, started=0.0, ended=1.0, num_tokens=1, metrics={}))
                await ring.system.checkpointed(1)
                await ring.system.finish(1)

            await ring.serve(trainer())

    run_virtual(run(), seed=3)
    assert len(life.site.taken) == 2
    assert num_leases(tmp_path) == 0
    assert life.site.books.num_leased == 0
