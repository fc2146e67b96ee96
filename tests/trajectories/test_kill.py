"""I8: kill -9 at any instant. The process of `killed_run` is killed in the middle of its writes, again and again."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from midflight.trajectories.store import Store
from midflight.types.facts import GroupFinished

from .killed_run import checkpoint_of, go_back

ENDLESS = 10**9


def test_i8_no_finished_group_is_lost_and_none_is_trained_twice(tmp_path: Path) -> None:
    dice = random.Random(0)
    said: set[int] = set()
    drawn = 0
    for _ in range(5):
        said |= run_and_kill(tmp_path, after_lines=dice.randint(5, 60))
        drawn = check(tmp_path, said)
    assert "complete" in start(tmp_path, drawn).communicate()[0]
    version, learnt = checkpoint_of(tmp_path)
    assert version > 0 and Counter(learnt) == Counter(range(drawn))


def test_i8_deaths_at_random_instants_lose_no_group_and_no_token(tmp_path: Path) -> None:
    """`tests/real` has two hundred of them."""
    die_often(tmp_path, times=30, seed=1)


def die_often(folder: Path, *, times: int, seed: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("killed_often.py")), str(folder), str(times), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    _, deaths, _, groups, _, learnt = done.stdout.split()
    assert int(deaths) == times and int(groups) > times // 4 and int(learnt) > times // 8, "it was killed while it made groups and steps"


def start(folder: Path, total: int) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("killed_run.py")
    return subprocess.Popen([sys.executable, str(program), str(folder), str(total)], stdout=subprocess.PIPE, text=True)


def run_and_kill(folder: Path, *, after_lines: int) -> set[int]:
    """Indices of the groups that the process had said were finished."""
    finished: set[int] = set()
    with start(folder, ENDLESS) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if line.startswith("finished"):
                finished.add(int(line.split()[1]))
            if number == after_lines:
                process.kill()
    assert process.returncode == -9, "it was killed at work"
    return finished


def check(folder: Path, said: set[int]) -> int:
    """Returns how many prompts were drawn."""
    version, learnt = checkpoint_of(folder)
    store = Store(folder / "store.sqlite", run="killed")
    go_back(store, version)
    waiting = [fact.group.key.index for fact in store.facts() if isinstance(fact, GroupFinished)]
    unfinished = [u.key.index for u in store.unfinished()]
    _, drawn = store.next_position()
    store.close()
    assert said <= {*learnt, *waiting}, "a finished group was lost"
    assert sorted([*learnt, *waiting, *unfinished]) == list(range(drawn)), "a prompt was lost, or is there twice"
    return drawn
