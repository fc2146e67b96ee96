"""Runs on virtual time with store, journal and digests, which may die and go on; and what somebody may change in them."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.loop.site import Agents, Site, config, fast_engines

from midflight.archive.prove import formulas
from midflight.archive.prove.batches import Rules, batch_digest, groups_of
from midflight.archive.prove.proof import RunProof, prove
from midflight.archive.prove.record import opened
from midflight.observe.journal import Journal
from midflight.observe.run_state import RunState
from midflight.testing.ring import SimulatedTrainer, SlowSteps
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.segments import SEGMENTS, place_of, read
from midflight.types import Version, WeightManifest
from midflight.types.digests import StepChain
from midflight.types.facts import Fact

STORE = "store.sqlite"


class Died(Exception):
    pass


class CountingTrainer(SimulatedTrainer):
    """Its weights have the name of the steps in them, whatever their version is called."""

    def __init__(self, version: Version, steps_before: int) -> None:
        super().__init__(version=version)
        self.steps_before = steps_before

    @property
    def weights(self) -> int:
        return self.steps_before + self.num_steps

    def publish(self, version: Version) -> WeightManifest:
        return replace(super().publish(version), fingerprint=f"{self.weights:064x}")


class RecordedLife:
    """A run from one death to the next, with a journal, which saves a checkpoint every other step."""

    def __init__(
        self, folder: Path, seed: int, *, staleness: int, policy: str, version: Version, checkpoint: Version | None, chain: str, steps: int
    ) -> None:
        self.folder = folder
        self.site = Site(
            config(staleness=staleness, every=2, steps=8, stale_policy=policy),
            folder,
            engines=fast_engines(2, by_version=True, version=version),
            agents=Agents(seed, failing=0.03, longest=1.5),
            num_tasks=8,
            sdk=False,
        )
        (folder / "config.toml").write_text(
            f'[rollout]\nmax_staleness = {staleness}\nstale_policy = "{policy}"\ngroups_per_step = 2\ngroup_size = 2\n'
        )
        self.trainer = CountingTrainer(version, steps)
        self.saved = checkpoint or 0
        self.saved_chain = chain
        self.saved_steps = steps
        self.checkpoint = checkpoint
        self.chain = StepChain(chain)
        self._state = RunState(start_version=version, clock=lambda: 0.0)
        self._journal = Journal(folder / "metrics.jsonl", self._state, resume_at=checkpoint)
        self.site.on_fact = self._record

    def _record(self, fact: Fact) -> None:
        self._state.apply(fact)
        self._journal.apply(fact)

    async def run(self, seconds: float | None, grave: Path) -> None:
        """Leaves a copy of the files as they are at its death in `grave`."""
        died = False
        try:
            async with self.site.opened(version=self.trainer.version, checkpoint=self.checkpoint) as ring:
                slow = SlowSteps(ring.system, seconds=lambda: 0.4)
                death = self._death(seconds, grave)
                await ring.train(self.trainer, self.trainer, death, service=slow, stage=self._stage, chain=self.chain)
        except* Died:
            died = True
        finally:
            self._journal.close()
        self.ended = not died

    def _stage(self) -> Callable[[], None]:
        return partial(self._save, self.trainer.version, self.chain.head, self.trainer.weights)

    def _save(self, version: Version, chain: str, steps: int) -> None:
        self.saved = version
        self.saved_chain = chain
        self.saved_steps = steps

    async def _death(self, seconds: float | None, grave: Path) -> None:
        if seconds is None:
            return
        await asyncio.sleep(seconds)
        grave.mkdir()
        for file in [*self.folder.glob("store.sqlite*"), self.folder / "metrics.jsonl"]:
            shutil.copy(file, grave / file.name)
        if (self.folder / SEGMENTS).exists():
            shutil.copytree(self.folder / SEGMENTS, grave / SEGMENTS)
        raise Died

    @property
    def next_version(self) -> Version:
        return self.saved if self.trainer.version <= self.saved else self.trainer.version + 1


def honest_run(folder: Path, seed: int) -> Path:
    """The folder of a run that died up to three times and came to its end."""
    draw = random.Random(seed)
    deaths: list[float | None] = [draw.uniform(0.0, 4.0) for _ in range(draw.randint(0, 3))]
    staleness = draw.choice((0, 1, 4))
    policy = draw.choice(("wait", "drop", "mask", "requeue"))
    version, checkpoint, chain, steps = 0, None, "", 0
    folder.mkdir(parents=True)
    for number, seconds in enumerate([*deaths, None]):
        life = RecordedLife(
            folder, seed + number, staleness=staleness, policy=policy, version=version, checkpoint=checkpoint, chain=chain, steps=steps
        )
        grave = folder.with_name(f"{folder.name}-{number}")
        run_virtual(life.run(seconds, grave), seed=seed, max_seconds=20_000)
        if life.ended:
            break
        folder, version, checkpoint = grave, life.next_version, life.saved
        chain, steps = life.saved_chain, life.saved_steps
    with closing(sqlite3.connect(folder / STORE)) as file:  # what is copied from now on is one file
        file.execute("PRAGMA journal_mode = DELETE")
    return folder


def digest_of(folder: Path) -> str:
    return prove(folder).digest


def proof_after(folder: Path, into: Path, change: Callable[[Path], None], *, digest: str | None = None) -> RunProof:
    """The proof of a copy of the run that was changed."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for name in (STORE, "metrics.jsonl", "config.toml"):
        shutil.copy(folder / name, into / name)
    shutil.copytree(folder / SEGMENTS, into / SEGMENTS)
    change(into)
    return prove(into, digest=digest)


def plain_rows(folder: Path, blob: bytes) -> list[list[Any]]:
    """The rows of a rollout as a store of an older Midflight has them: each array in full, in the index itself."""
    rows = msgspec.msgpack.decode(read((folder / SEGMENTS,), blob))
    for row in rows:
        for at, value in enumerate(row[:6]):
            if isinstance(value, list):
                runs = np.frombuffer(value[0], np.dtype((np.void, 1 if at in (1, 2) else 4)))
                row[at] = np.repeat(runs, np.frombuffer(value[1], "<i4")).tobytes()
    return rows


# --- Tampering ------------------------------------------------------------------------------------


class Tampering:
    """One change of something that is protected, chosen by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.what = ""

    def __call__(self, folder: Path) -> None:
        kinds: list[Callable[[Path], bool]] = [
            self._array,
            self._segment,
            self._record_of_turn,
            self._rollout_column,
            self._scored,
            self._group,
            self._lost_rollout,
            self._added_rollout,
            self._lost_group,
            self._trained_elsewhere,
            self._fate,
            self._lost_fate,
            self._link,
            self._lost_link,
            self._step,
            self._lost_step,
        ]
        while not self._random.choice(kinds)(folder):
            pass

    def _ask(self, folder: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(folder / STORE)) as file:
            found = file.execute(sql, values).fetchall()
            file.commit()
            return found

    def _one(self, folder: Path, table: str, columns: str = "rowid") -> tuple[Any, ...]:
        return self._random.choice(self._ask(folder, f"SELECT {columns} FROM {table}"))

    def _array(self, folder: Path) -> bool:
        """A bit of an array of a row."""
        rowid, blob = self._one(folder, "rollouts", "rowid, rows")
        rows = plain_rows(folder, blob)
        if not rows:
            return False
        row = self._random.randrange(len(rows))
        column = self._random.randrange(6)
        data = bytearray(rows[row][column])
        place = self._random.randrange(len(data))
        data[place] ^= 1 if column in (1, 2) else 1 << self._random.randrange(8)
        rows[row][column] = bytes(data)
        self.what = f"column {column} of row {row} of rollout {rowid}"
        self._ask(folder, "UPDATE rollouts SET rows = ? WHERE rowid = ?", msgspec.msgpack.encode(rows), rowid)
        return True

    def _segment(self, folder: Path) -> bool:
        """A bit of a segment."""
        rowid, blob = self._one(folder, "rollouts", "rowid, rows")
        place = place_of(blob)
        if place is None:
            return False
        file = folder / SEGMENTS / f"{place.segment:016x}.segment"
        data = bytearray(file.read_bytes())
        data[place.offset + self._random.randrange(place.length)] ^= 1 << self._random.randrange(8)
        file.write_bytes(data)
        self.what = f"the place of rollout {rowid} in {file.name}"
        return True

    def _record_of_turn(self, folder: Path) -> bool:
        rowid, blob = self._one(folder, "rollouts", "rowid, rows")
        rows = plain_rows(folder, blob)
        if not rows:
            return False
        records = self._random.choice(rows)[11]
        record = self._random.choice(records)
        which = self._random.randrange(5)
        if which < 3:
            record[which] += 1
        else:
            data = bytearray(record[which])
            data[self._random.randrange(len(data))] ^= 4
            record[which] = bytes(data)
        self.what = f"field {which} of a turn of rollout {rowid}"
        self._ask(folder, "UPDATE rollouts SET rows = ? WHERE rowid = ?", msgspec.msgpack.encode(rows), rowid)
        return True

    def _rollout_column(self, folder: Path) -> bool:
        (rowid,) = self._one(folder, "rollouts")
        column, change = self._random.choice(
            [
                ("reward", "COALESCE(reward, 0) + 0.125"),
                ("truncated", "1 - truncated"),
                ("room", "COALESCE(room, 0) + 1"),
                ("num_trainable", "num_trainable + 1"),
            ]
        )
        self.what = f"{column} of rollout {rowid}"
        self._ask(folder, f"UPDATE rollouts SET {column} = {change} WHERE rowid = ?", rowid)
        return True

    def _scored(self, folder: Path) -> bool:
        rowid, blob = self._one(folder, "rollouts", "rowid, scored")
        scored = msgspec.msgpack.decode(blob)
        scored[self._random.randrange(2)]["kind"] = 0.5
        self.what = f"components of rollout {rowid}"
        self._ask(folder, "UPDATE rollouts SET scored = ? WHERE rowid = ?", msgspec.msgpack.encode(scored), rowid)
        return True

    def _group(self, folder: Path) -> bool:
        *key, task, state = self._one(folder, "groups", "epoch, position, attempt, task, state")
        if state in ("running", "in_line"):
            return False
        where = "WHERE epoch = ? AND position = ? AND attempt = ?"
        if self._random.random() < 0.5:
            self.what = f"the task of group {key}"
            self._ask(folder, f"UPDATE groups SET task = ? {where}", task.replace(b"numbers", b"letters", 1), *key)
        else:
            self.what = f"the state of group {key}, {state}"
            other = "dropped" if state != "dropped" else "waiting"
            self._ask(folder, f"UPDATE groups SET state = ?, reason = 'shutdown', version = NULL {where}", other, *key)
        return True

    def _lost_rollout(self, folder: Path) -> bool:
        *key, rowid = self._one(folder, "rollouts", "epoch, position, attempt, sample, rowid")
        self.what = f"lost rollout {key}"
        self._ask(folder, "DELETE FROM rollouts WHERE rowid = ?", rowid)
        if self._random.random() < 0.5:  # with its tokens
            self._ask(folder, "DELETE FROM fates WHERE epoch = ? AND position = ? AND attempt = ? AND sample = ?", *key)
        return True

    def _added_rollout(self, folder: Path) -> bool:
        (rowid,) = self._one(folder, "rollouts")
        self.what = f"rollout {rowid} a second time"
        columns = "reward, truncated, room, error, seconds, num_trainable, rows, scored"
        self._ask(
            folder, f"INSERT INTO rollouts SELECT epoch, position, attempt, sample + 100, {columns} FROM rollouts WHERE rowid = ?", rowid
        )
        return True

    def _lost_group(self, folder: Path) -> bool:
        *key, state = self._one(folder, "groups", "epoch, position, attempt, state")
        if state in ("running", "in_line"):
            return False
        self.what = f"lost group {key}"
        self._ask(folder, "DELETE FROM groups WHERE epoch = ? AND position = ? AND attempt = ?", *key)
        return True

    def _trained_elsewhere(self, folder: Path) -> bool:
        *key, version = self._one(folder, "groups", "epoch, position, attempt, version")
        if version is None:
            return False
        self.what = f"the step of group {key}"
        change = self._random.choice((-1, 1, 100))
        self._ask(folder, "UPDATE groups SET version = version + ? WHERE epoch = ? AND position = ? AND attempt = ?", change, *key)
        return True

    def _fate(self, folder: Path) -> bool:
        *key, fate, reason = self._one(folder, "fates", "epoch, position, attempt, sample, fate, reason")
        self.what = f"{fate} {reason} tokens of {key}"
        where = "WHERE epoch = ? AND position = ? AND attempt = ? AND sample = ? AND fate = ? AND reason = ?"
        self._ask(folder, f"UPDATE fates SET num_tokens = num_tokens + 1 {where}", *key, fate, reason)
        return True

    def _lost_fate(self, folder: Path) -> bool:
        *key, fate, reason = self._one(folder, "fates", "epoch, position, attempt, sample, fate, reason")
        self.what = f"lost {fate} {reason} tokens of {key}"
        where = "WHERE epoch = ? AND position = ? AND attempt = ? AND sample = ? AND fate = ? AND reason = ?"
        self._ask(folder, f"DELETE FROM fates {where}", *key, fate, reason)
        return True

    def _link(self, folder: Path) -> bool:
        number, digest, head, _ = self._one(folder, "seals", "number, digest, head, detail")
        column = self._random.choice(("digest", "head"))
        data = bytearray(digest if column == "digest" else head)
        data[self._random.randrange(len(data))] ^= 16
        self.what = f"{column} of link {number}"
        self._ask(folder, f"UPDATE seals SET {column} = ? WHERE number = ?", bytes(data), number)
        return True

    def _lost_link(self, folder: Path) -> bool:
        (number,) = self._one(folder, "seals", "number")
        self.what = f"lost link {number}"
        self._ask(folder, "DELETE FROM seals WHERE number = ?", number)
        return True

    def _step(self, folder: Path) -> bool:
        lines = _lines(folder)
        line = self._random.choice([line for line in lines if line["kind"] == "step"])
        which = self._random.choice(("batch", "chain", "weights_after", "weights_before", "skipped", "version"))
        if which == "version":
            line["version"] += 1
        elif which == "skipped":
            line["digests"]["skipped"] = not line["digests"]["skipped"]
        else:
            text = line["digests"][which]
            place = self._random.randrange(len(text))
            letter = "0" if text[place] != "0" else "1"
            line["digests"][which] = text[:place] + letter + text[place + 1 :]
        self.what = f"{which} of the line of step {line['step']}"
        _write_lines(folder, lines)
        return True

    def _lost_step(self, folder: Path) -> bool:
        lines = _lines(folder)
        line = self._random.choice([line for line in lines if line["kind"] == "step"])
        lines.remove(line)
        self.what = f"lost line of step {line['step']}"
        _write_lines(folder, lines)
        return True


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_chain_anew(folder: Path) -> None:
    """Changes a token of a trained rollout, and then every digest that follows from it: the work of somebody who knows the formulas."""
    with closing(sqlite3.connect(folder / STORE)) as file:
        *key, sample, blob = file.execute(
            "SELECT epoch, position, attempt, sample, rows FROM rollouts JOIN groups USING (epoch, position, attempt) "
            "WHERE state = 'trained' AND reward IS NOT NULL AND num_trainable > 0"
        ).fetchone()
        rows = plain_rows(folder, blob)
        rows[0][0] = b"\x07" + rows[0][0][1:]
        before = b""
        for record in rows[0][11]:
            arrays = dict(zip(("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions"), rows[0], strict=False))
            record[4] = before = formulas.turn(arrays, record, before)
        where = "epoch = ? AND position = ? AND attempt = ? AND sample = ?"
        file.execute(f"UPDATE rollouts SET rows = ? WHERE {where}", (msgspec.msgpack.encode(rows), *key, sample))
        file.commit()
    with opened(folder / STORE, folder / SEGMENTS) as store:
        changed = next(one for one in store.rollouts(tuple(key)) if one.sample == sample)
        link = next(link for link in store.links() if link.key == tuple(key) and link.sample == sample)
        task = msgspec.msgpack.decode(store.groups[tuple(key)].task)
        counts = msgspec.msgpack.decode(link.detail or b"")
        own = [formulas.row(row.arrays, row.role, [record[4] for record in row.records]) for row in changed.rows]
        digest = formulas.rollout((*key, sample), task, changed.columns, counts, own)
        links = [(one.number, digest if one.number == link.number else one.digest) for one in store.links()]
    heads: dict[int, str] = {}
    head = b""
    with closing(sqlite3.connect(folder / STORE)) as file:
        for number, own_digest in links:
            head = formulas.link(head, own_digest)
            heads[number] = head.hex()
            file.execute("UPDATE seals SET digest = ?, head = ? WHERE number = ?", (own_digest, head, number))
        file.commit()
    _write_steps_anew(folder, heads)


def _write_steps_anew(folder: Path, heads: dict[int, str]) -> None:
    written = tomllib.loads((folder / "config.toml").read_text())["rollout"]
    rules = Rules(written["max_staleness"], written["stale_policy"])
    lines = _lines(folder)
    before = b""
    with opened(folder / STORE, folder / SEGMENTS) as store:
        for line in (line for line in lines if line["kind"] == "step"):
            digests, version = line["digests"], line["version"]
            keys = [group.key for group in store.groups.values() if group.made == version]
            digests["batch"] = batch_digest(list(groups_of(store, keys, version, rules)), version).hex()
            digests["seals"] = [[number, heads[number]] for number, _ in digests["seals"]]
            loss = [(line.get("trainer") or {}).get(name) for name in ("loss", "grad_norm")]
            before = formulas.step(before, version, digests, loss)
            digests["chain"] = before.hex()
    _write_lines(folder, lines)
