"""A run in one process, made to be killed: groups finish, are leased, trained and checkpointed until `total` are learnt.

The weights are a JSON file: the version, and every group they have learnt from. Run as `killed_run.py FOLDER TOTAL`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from midflight.trajectories import Store
from midflight.types import Batch, GroupKey

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
    recovered = store.recover(version)
    version = max(version, recovered.highest_version or 0)
    waiting, lease, (_, index) = list(recovered.waiting), recovered.next_lease, recovered.next_position
    line = [u.key for u in recovered.unfinished]
    say("started")
    while len(learnt) < total:
        while len(waiting) < 3 and (line or index < total):
            started = line.pop(0) if line else GroupKey(0, index)
            if started.index == index:
                index += 1
            made = group(started)
            store.admit(started, task(started.index))
            for each in made.trajectories:
                store.record_turn(each.key, 0, turn(1, 2))
                store.finish_rollout(each)
            store.finish_group(started)
            say("finished", started.index)
            waiting.append(made)
        batch = Batch(lease, version, tuple(waiting[:2]))
        del waiting[:2]
        store.lease(batch)
        learnt.extend(g.key.index for g in batch.groups)
        store.done(lease)
        lease, version = lease + 1, version + 1
        if version % 3 == 0 or len(learnt) == total:
            save(folder, version, learnt)
            store.checkpointed(version)
            say("checkpoint", version)
    say("complete")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
