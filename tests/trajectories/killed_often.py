"""A process that starts the run of `killed_run` again and again, and kills it after a time that is drawn at random.

Run as `killed_often.py FOLDER TIMES SEED`. It forks, so that a life need not import anything first. After each death it looks at what
is left, and ends with an error if anything is lost.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from midflight.trajectories.store import Store
from midflight.types import Trajectory
from midflight.types.facts import GroupFinished

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import checkpoint_of, go_back, run
from making import group

ENDLESS = 10**9
LONGEST_SECONDS = 0.04
"""The time after which a life is killed at the latest. It trains some groups in it."""


def live_and_die(folder: Path, seconds: float, *, while_it_opens: bool) -> set[int]:
    """Returns the indices of the groups that the run had said were finished. The time counts from its start, or from when its store is
    open.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.dup2(writing, 1)
        try:
            run(folder, ENDLESS)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        if not while_it_opens:
            assert said.readline() == "started\n"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        lines = said.read().split("\n")[:-1]  # the last one may be cut short
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "it was killed at work"
    return {int(line.split()[1]) for line in lines if line.startswith("finished")}


def check(folder: Path, said: set[int]) -> None:
    version, learnt = checkpoint_of(folder)
    with closing(Store(folder / "store.sqlite", run="killed")) as store:
        go_back(store, version)
        assert not list(store.damaged())
        waiting = [fact.group for fact in store.facts() if isinstance(fact, GroupFinished)]
        unfinished = store.unfinished()
        _, drawn = store.next_position()
    indices = [made.key.index for made in waiting]
    assert said <= {*learnt, *indices}, "a finished group was lost"
    everywhere = sorted([*learnt, *indices, *(one.key.index for one in unfinished)])
    assert everywhere == list(range(drawn)), "a prompt was lost, or is there twice"
    for made in waiting:
        for found, expected in zip(made.trajectories, group(made.key).trajectories, strict=True):
            same_tokens(found, expected)
    for one in unfinished:
        for found in one.finished:
            same_tokens(found, group(one.key).trajectories[found.key.sample])


def same_tokens(found: Trajectory, expected: Trajectory) -> None:
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(found.rows[0], name), getattr(expected.rows[0], name))


def main(folder: Path, times: int, seed: int) -> None:
    dice = random.Random(seed)
    said: set[int] = set()
    for _ in range(times):
        seconds = dice.uniform(0.0, LONGEST_SECONDS)
        said |= live_and_die(folder, seconds, while_it_opens=dice.random() < 0.2)
        check(folder, said)
    print("deaths", times, "groups", len(said), "learnt", len(checkpoint_of(folder)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
