"""A run in one process, made to be killed: groups finish, are leased, trained and checkpointed until `total` are learnt.

The weights are a JSON file: the version, and every group they have learnt from. Run as `killed_run.py FOLDER TOTAL`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from midflight.trajectories.store import Store
from midflight.types import Batch, GroupKey
from midflight.types.facts import (
    Admitted,
    CarriedOver,
    Checkpointed,
    GroupFinished,
    Interrupted,
    Leased,
    Stepped,
    TrajectoryKept,
    TurnKept,
    WentBack,
)

sys.path.insert(0, str(Path(__file__).parent))
from making import group, task, turn


def checkpoint_of(folder: Path) -> tuple[int, list[int]]:
    saved = folder / "weights.json"
    return tuple(json.loads(saved.read_text())) if saved.exists() else (0, [])  # pyright: ignore[reportReturnType]


def save(folder: Path, version: int, learnt: list[int]) -> None:
    (folder / "weights.new").write_text(json.dumps([version, learnt]))
    (folder / "weights.new").replace(folder / "weights.json")


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run(folder: Path, total: int) -> None:
    version, learnt = checkpoint_of(folder)
    store = Store(folder / "store.sqlite", run="killed")
    version = go_back(store, version)
    facts = list(store.facts())
    waiting = [fact.group for fact in facts if isinstance(fact, GroupFinished)]
    (carried,) = [fact for fact in facts if isinstance(fact, CarriedOver)]
    lease, order, (_, index) = carried.num_leases + 1, carried.num_finished, store.next_position()
    line = list(carried.in_line)
    say("started")
    while len(learnt) < total:
        while len(waiting) < 3 and (line or index < total):
            started = line.pop(0) if line else GroupKey(0, index)
            if started.index == index:
                index += 1
            made, order = group(started), order + 1
            store.apply(Admitted(started, task(started.index)))
            for each in made.trajectories:
                store.apply(TurnKept(each.key, 0, turn(1, 2)))
                store.apply(TrajectoryKept(each, {}, {}))
            store.apply(GroupFinished(made, order))
            say("finished", started.index)
            waiting.append(made)
        batch = Batch(lease, version, tuple(waiting[:2]))
        del waiting[:2]
        store.apply(Leased(batch, {}, {}, {}))
        learnt.extend(g.key.index for g in batch.groups)
        store.apply(Stepped(lease, version + 1, started=0.0, ended=1.0, num_tokens=0, metrics={}))
        lease, version = lease + 1, version + 1
        if version % 3 == 0 or len(learnt) == total:
            save(folder, version, learnt)
            store.apply(Checkpointed(version))
            say("checkpoint", version)
    say("complete")


def go_back(store: Store, checkpoint: int) -> int:
    """After a death: what the checkpoint has is final, all else waits or is in line again. Returns the version to go on with."""
    highest = next(fact.highest_version for fact in store.facts() if isinstance(fact, CarriedOver)) or 0
    store.apply(Interrupted())
    store.apply(WentBack(checkpoint, max(checkpoint, highest), store.groups_after(checkpoint)))
    return max(checkpoint, highest)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
