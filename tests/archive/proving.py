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
from typing import TYPE_CHECKING, Any

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
from midflight.types import Result, Task, Version, WeightManifest
from midflight.types.digests import StepChain
from midflight.types.facts import Fact

if TYPE_CHECKING:
    from openai import AsyncOpenAI

STORE = "store.sqlite"
FOLDERS = (SEGMENTS, "checkpoints")


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


class ScoringAgents(Agents):
    """Agents that say what their reward is made of. Some also begin a second conversation, so that they have two rows. Where `with_roles`
    is set, each asks a critic too, whose answers have a reward of their own."""

    with_roles = False

    async def __call__(self, task: Task, client: AsyncOpenAI) -> Result:
        reward = await super().__call__(task, client)
        assert reward is not None
        if self._random.random() < 0.3:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"again {task.data['question']}"}])
        roles: dict[str, float | None] = {}
        if self.with_roles:
            critic = client.role("critic")  # type: ignore[attr-defined]
            await critic.chat.completions.create(model="policy", messages=[{"role": "user", "content": "is it right?"}])
            roles["critic"] = None if self._random.random() < 0.2 else 1 - reward / 2  # None: it cannot be scored
        return Result(
            reward,
            roles=roles,
            components={"right": reward, "short": round(self._random.random(), 3)},
            metrics={"calls": 3.0},
            turns=(0.125,),
            fields={"said": task.id},
        )


class AgentsWithCritic(ScoringAgents):
    with_roles = True


AGENTS = (Agents, ScoringAgents, AgentsWithCritic)


class RecordedLife:
    """A run from one death to the next, with a journal, which saves a checkpoint every other step."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        staleness: int,
        policy: str,
        version: Version,
        checkpoint: Version | None,
        chain: str,
        steps: int,
        kind: int,
    ) -> None:
        self.folder = folder
        self.site = Site(
            config(staleness=staleness, every=2, steps=8, stale_policy=policy),
            folder,
            engines=fast_engines(2, by_version=True, version=version),
            agents=AGENTS[kind](seed, failing=0.03, longest=1.5),
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
        checkpoint = self.folder / "checkpoints" / f"version-{version:08d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps({"chain": chain}))

    async def _death(self, seconds: float | None, grave: Path) -> None:
        if seconds is None:
            return
        await asyncio.sleep(seconds)
        grave.mkdir()
        for file in [*self.folder.glob("store.sqlite*"), self.folder / "metrics.jsonl"]:
            shutil.copy(file, grave / file.name)
        for name in FOLDERS:
            if (self.folder / name).exists():
                shutil.copytree(self.folder / name, grave / name)
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
            folder,
            seed + number,
            staleness=staleness,
            policy=policy,
            version=version,
            checkpoint=checkpoint,
            chain=chain,
            steps=steps,
            kind=seed % 3,
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
    for name in FOLDERS:
        if (folder / name).exists():
            shutil.copytree(folder / name, into / name)
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
            self._link_column,
            self._fork,
            self._swapped_rows,
            self._no_such_value,
            self._step,
            self._lost_step,
            self._unsigned_steps,
            self._checkpoint,
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
        column = self._random.choice([column for column in range(10) if rows[row][column]])
        if isinstance(rows[row][column], list):  # one value for each run of equal ones, and the lengths of the runs
            rows[row][column][0] = _flipped(rows[row][column][0], self._random)
            self.what = f"column {column} of row {row} of rollout {rowid}"
            self._ask(folder, "UPDATE rollouts SET rows = ? WHERE rowid = ?", msgspec.msgpack.encode(rows), rowid)
            return True
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
        part = self._random.randrange(5)
        if part == 2:
            scored[2].append(0.5)
        elif part == 4:
            scored[4]["critic"] = {"reward": 0.5}
        else:
            scored[part]["kind"] = 0.5
        self.what = f"part {part} of what the reward of rollout {rowid} is made of"
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

    def _link_column(self, folder: Path) -> bool:
        number, event, sample, detail = self._one(folder, "seals", "number, event, sample, detail")
        column = self._random.choice(("event", "epoch", "position", "attempt", "sample", "detail"))
        if column == "event":
            value: object = self._random.choice([other for other in ("rollout", "waiting", "leased", "stale") if other != event])
        elif column == "detail":
            ended_again = "SELECT 1 FROM seals later JOIN seals this USING (epoch, position, attempt, sample) WHERE this.number = ? AND "
            if not detail or self._ask(folder, ended_again + "later.number > this.number", number):
                return False  # the rollout began again after a crash: nobody has what it was before
            value = msgspec.msgpack.encode([{"stale": 3}, {}] if event == "rollout" else [[0, 1, 0]])
        elif column == "sample":
            value = 7 if sample is None else sample + 100
        else:
            self._ask(folder, f"UPDATE seals SET {column} = {column} + 100 WHERE number = ?", number)
            self.what = f"{column} of link {number}, {event}"
            return True
        self.what = f"{column} of link {number}, {event}"
        self._ask(folder, f"UPDATE seals SET {column} = ? WHERE number = ?", value, number)
        return True

    def _fork(self, folder: Path) -> bool:
        """Where a trainer went on under another number."""
        if not self._ask(folder, "SELECT 1 FROM forks"):
            return False
        (rowid,) = self._one(folder, "forks")
        self.what = f"fork {rowid}"
        self._ask(folder, "UPDATE forks SET version = version + 1 WHERE rowid = ?", rowid)
        return True

    def _swapped_rows(self, folder: Path) -> bool:
        """The tokens of two rollouts change places."""
        one, other = self._random.sample(self._ask(folder, "SELECT rowid, rows FROM rollouts"), 2)
        self.what = f"the rows of rollouts {one[0]} and {other[0]}"
        self._ask(folder, "UPDATE rollouts SET rows = ? WHERE rowid = ?", other[1], one[0])
        self._ask(folder, "UPDATE rollouts SET rows = ? WHERE rowid = ?", one[1], other[0])
        return one[1] != other[1]

    def _no_such_value(self, folder: Path) -> bool:
        """A value that no program of ours writes: the proof says so, and does not fail."""
        table, column = self._random.choice(
            (
                ("rollouts", "scored"),
                ("rollouts", "rows"),
                ("rollouts", "reward"),
                ("groups", "state"),
                ("seals", "detail"),
                ("seals", "head"),
            )
        )
        value: object = self._random.choice((msgspec.msgpack.encode(7), b"\xc1", "text", msgspec.msgpack.encode([[1]])))
        keys = "number" if table == "seals" else "epoch, position, attempt"
        chosen = {"groups": "WHERE state != 'running' AND state != 'in_line'", "seals": "WHERE event = 'leased'"}.get(table, "")
        found = self._random.choice(self._ask(folder, f"SELECT {keys} FROM {table} {chosen}"))
        where = " AND ".join(f"{key} = ?" for key in keys.split(", "))
        self.what = f"{column} of {table} {found} is {value!r}"
        self._ask(folder, f"UPDATE {table} SET {column} = ? WHERE {where}", value, *found)
        return True

    def _lost_link(self, folder: Path) -> bool:
        (number,) = self._one(folder, "seals", "number")
        self.what = f"lost link {number}"
        self._ask(folder, "DELETE FROM seals WHERE number = ?", number)
        return True

    def _step(self, folder: Path) -> bool:
        lines = _lines(folder)
        line = self._random.choice([line for line in lines if line["kind"] == "step"])
        which = self._random.choice(("batch", "chain", "weights_after", "weights_before", "skipped", "version", "step", "loss"))
        if which in ("version", "step"):
            line[which] += 1
        elif which == "loss":
            measured = line.setdefault("trainer", {}) or {}
            line["trainer"] = {**measured, "loss": (measured.get("loss") or 0.0) + 0.5}
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

    def _unsigned_steps(self, folder: Path) -> bool:
        """The last steps, or all of them, without their digests."""
        lines = _lines(folder)
        steps = [line for line in lines if line["kind"] == "step"]
        first = self._random.randrange(len(steps))
        for line in steps[first:]:
            del line["digests"]
        self.what = f"no digests of steps from number {first} on"
        _write_lines(folder, lines)
        return True

    def _checkpoint(self, folder: Path) -> bool:
        """The digest that a checkpoint keeps, or the journal's line of it."""
        other = self._random.randbytes(32).hex()
        if self._random.random() < 0.5:
            state = self._random.choice(sorted(folder.glob("checkpoints/version-*/state.json")))
            self.what = f"the digest of {state.parent.name}"
            state.write_text(json.dumps({"chain": other}))
            return True
        lines = _lines(folder)
        line = self._random.choice([line for line in lines if line["kind"] == "checkpoint"])
        self.what = f"the journal's line of the checkpoint of version {line['version']}"
        line["digest"] = other
        _write_lines(folder, lines)
        return True


def _flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(len(changed))] ^= 1
    return bytes(changed)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- Each column ----------------------------------------------------------------------------------

KEY = ("epoch", "position", "attempt")
PROTECTED = {
    "rollouts": (*KEY, "sample", "reward", "truncated", "room", "num_trainable", "rows", "scored"),
    "groups": (*KEY, "task", "state", "reason", "version"),
    "fates": (*KEY, "sample", "fate", "reason", "num_tokens"),
    "forks": ("checkpoint", "version"),
    "leases": ("lease", "train_version", "done"),
    "seals": ("number", "event", *KEY, "sample", "detail", "digest", "head"),
}
"""The columns of a store that the proof answers for."""
FREE = {
    "runs": ("name",),
    "numbers": ("name", "value"),
    "sources": ("name",),
    "turns": (*KEY, "sample", "number", "turn"),
    "rollouts": ("error", "seconds"),
    "groups": ("finished", "lease"),
    "changed": (*KEY, "copies"),
}
"""Those of which docs/audit.md says that it does not."""
_THAT_COUNT = {
    "groups": "WHERE state NOT IN ('running', 'in_line')",
    ("seals", "detail"): "WHERE event IN ('leased', 'admitted')",
}


def columns_of(store: Path) -> dict[str, tuple[str, ...]]:
    """The columns of every table."""
    with closing(sqlite3.connect(store)) as file:
        tables = file.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
        return {name: tuple(column for _, column, *_ in file.execute(f"PRAGMA table_info({name})")) for (name,) in tables}


class ColumnChange:
    """Changes one value of one column, in a row chosen by chance."""

    def __init__(self, table: str, column: str, seed: int) -> None:
        self._table = table
        self._column = column
        self._random = random.Random(f"{table}.{column} {seed}")
        self.what = ""

    def __call__(self, folder: Path) -> None:
        columns = columns_of(folder / STORE)[self._table]
        counts = _THAT_COUNT.get((self._table, self._column), _THAT_COUNT.get(self._table, ""))
        with closing(sqlite3.connect(folder / STORE)) as file:
            found = file.execute(f"SELECT * FROM {self._table} {counts}").fetchall()
            row = dict(zip(columns, self._random.choice(found), strict=True))
            value = self._other(row[self._column])
            self.what = f"{self._table}.{self._column} of {row}: {value!r}"
            where = " AND ".join(f"{name} IS ?" for name in columns)
            file.execute(f"UPDATE {self._table} SET {self._column} = ? WHERE {where}", (value, *row.values()))
            file.commit()

    def _other(self, value: object) -> object:
        match value:
            case None:
                return 1
            case 0 | 1 if self._column == "done":
                return 1 - value
            case bytes() if value:
                return _flipped(value, self._random)
            case bytes():
                return b"x"
            case str():
                return value + "x"
            case float():
                return value + 0.125
            case _:
                return value + 1000  # type: ignore[operator]


# --- A chain that was written anew ----------------------------------------------------------------


class Forger:
    """Changes something that a run trained on, and then every digest that follows from it: somebody who knows the formulas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.what = ""

    def __call__(self, folder: Path) -> None:
        with closing(sqlite3.connect(folder / STORE)) as file:
            trained = file.execute(
                "SELECT epoch, position, attempt, sample, rows FROM rollouts JOIN groups USING (epoch, position, attempt) "
                "WHERE state = 'trained' AND reward IS NOT NULL AND num_trainable > 0"
            ).fetchall()
            *key, blob = self._random.choice(trained)
            change = self._random.choice((self._token, self._logprob, self._key_version, self._reward, self._lost))
            change(file, folder, tuple(key), blob)
            file.commit()
        self.what = f"{change.__name__} of {key}, and every digest after it"
        recompute_chain(folder)

    def _token(self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes) -> None:
        self._number(file, folder, key, blob, 0, lambda number: number ^ 1)

    def _logprob(self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes) -> None:
        self._number(file, folder, key, blob, 3, lambda number: number ^ 1 << 20)

    def _key_version(self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes) -> None:
        self._number(file, folder, key, blob, 5, lambda number: number - 1)

    def _number(
        self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes, column: int, change: Callable[[int], int]
    ) -> None:
        """Changes the bits of a number of an array of 32 bits, at a token that was trained."""
        rows = plain_rows(folder, blob)
        row = self._random.choice([row for row in rows if any(row[2])])
        place = self._random.choice([place for place, is_trained in enumerate(row[2]) if is_trained])
        numbers = np.frombuffer(row[column], "<i4").copy()
        numbers[place] = change(int(numbers[place]))
        row[column] = numbers.tobytes()
        file.execute(f"UPDATE rollouts SET rows = ? WHERE {OF_ROLLOUT}", (msgspec.msgpack.encode(rows), *key))

    def _reward(self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes) -> None:
        file.execute(f"UPDATE rollouts SET reward = reward + 0.25 WHERE {OF_ROLLOUT}", key)

    def _lost(self, file: sqlite3.Connection, folder: Path, key: tuple[int, ...], blob: bytes) -> None:
        """Takes out a rollout with its tokens and its links. `recompute_chain` numbers the others."""
        for table in ("rollouts", "fates", "seals"):
            file.execute(f"DELETE FROM {table} WHERE {OF_ROLLOUT}", key)


OF_ROLLOUT = "epoch = ? AND position = ? AND attempt = ? AND sample = ?"


def recompute_chain(folder: Path) -> None:
    """Writes the digests of all answers, rollouts, groups and steps of a run as they follow from what is in its files now."""
    _sign_answers(folder)
    with opened(folder / STORE, folder / SEGMENTS) as store:
        rollouts = {(one.key, one.sample): one for one in store.rollouts()}
        links = list(store.links())
        digests = {link.number: link.digest for link in links}
        newest = {(link.key, link.sample): link for link in links if link.event == "rollout"}
        for place, link in newest.items():
            task = msgspec.msgpack.decode(store.groups[link.key].task)
            rows = [formulas.row(row.arrays, row.role, [record[4] for record in row.records]) for row in rollouts[place].rows]
            counts = msgspec.msgpack.decode(link.detail or b"")
            digests[link.number] = formulas.rollout((*place[0], place[1]), task, rollouts[place].columns, counts, rows)
    head = b""
    heads: dict[int, tuple[int, str]] = {}
    with closing(sqlite3.connect(folder / STORE)) as file:
        for number, link in enumerate(links, start=1):
            head = formulas.link(head, digests[link.number])
            heads[link.number] = (number, head.hex())
            file.execute(
                "UPDATE seals SET number = ?, digest = ?, head = ? WHERE number = ?", (number, digests[link.number], head, link.number)
            )
        file.commit()
    _write_steps_anew(folder, heads)


def _sign_answers(folder: Path) -> None:
    names = ("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions")
    with closing(sqlite3.connect(folder / STORE)) as file:
        for rowid, blob in file.execute("SELECT rowid, rows FROM rollouts").fetchall():
            rows = plain_rows(folder, blob)
            for row in rows:
                before = b""
                for record in row[11]:
                    record[4] = before = formulas.turn(dict(zip(names, row, strict=False)), record, before)
            if place_of(blob) is None:
                file.execute("UPDATE rollouts SET rows = ? WHERE rowid = ?", (msgspec.msgpack.encode(rows), rowid))
        file.commit()


def _write_steps_anew(folder: Path, heads: dict[int, tuple[int, str]]) -> None:
    """`heads` has the new number and head of each link by its number before. Every link before one that was taken out is there."""
    written = tomllib.loads((folder / "config.toml").read_text())["rollout"]
    rules = Rules(written["max_staleness"], written["stale_policy"])
    lines = _lines(folder)
    before = b""
    anew: dict[str, str] = {"": ""}
    with opened(folder / STORE, folder / SEGMENTS) as store:
        for line in (line for line in lines if line["kind"] == "step"):
            digests, version = line["digests"], line["version"]
            keys = [group.key for group in store.groups.values() if group.made == version]
            digests["batch"] = batch_digest(list(groups_of(store, keys, version, rules)), version).hex()
            digests["seals"] = [heads[max(known for known in heads if known <= number)] for number, _ in digests["seals"]]
            loss = [(line.get("trainer") or {}).get(name) for name in ("loss", "grad_norm")]
            before = formulas.step(before, version, digests, loss)
            anew[digests["chain"]] = before.hex()
            digests["chain"] = before.hex()
    for line in (line for line in lines if line["kind"] == "checkpoint"):
        line["digest"] = anew[line.get("digest", "")]
    _write_lines(folder, lines)
    for state in folder.glob("checkpoints/version-*/state.json"):
        state.write_text(json.dumps({"chain": anew[json.loads(state.read_text())["chain"]]}))
