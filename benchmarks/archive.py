"""How long it takes to look at a large run: the first page of its groups, others filtered and sorted, one conversation, words found.

    python benchmarks/archive.py                     100 000 rollouts of 300 tokens each (0.8 GB), made first in about a minute
    python benchmarks/archive.py --smoke             800 rollouts, and no bar
    python benchmarks/archive.py --folder DIR        keeps the store there, for the next time

Says for each look the median and the largest of five, in milliseconds, and exits with 1 where a page takes over 300 ms or the first over a
second. The first look is made by a process that has just opened the run; the file may lie in the system's cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from smoke import options_of

from midflight.archive.groups import GroupFilter, GroupOrder, page_of
from midflight.archive.search import WordIndex
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.trajectories.store import Store
from midflight.types import Batch, Group, GroupKey, Reason, RolloutKey, Row, Task, Trajectory
from midflight.types.facts import Admitted, Checkpointed, GroupClosed, GroupFinished, Leased, Stepped, TrajectoryKept

FIRST_MS, PAGE_MS = 1000.0, 300.0
GROUP_SIZE, GROUPS_PER_STEP = 8, 16
WORDS = (*"abcdefghijklmnopqrstuvwxyz", "rain", "therefore", "seven", "answer", "wrong", "right", "tool", "city")


def make(folder: Path, *, rollouts: int, tokens: int, seed: int = 0) -> None:
    """A run's store: of every ten groups one is dropped, and one rollout in forty has failed."""
    write_byte_tokenizer(folder / "start")
    draw = np.random.default_rng(seed)
    store = Store(folder / "store.sqlite", run="benchmark")
    groups: list[Group] = []
    version = 0
    for number in range(rollouts // GROUP_SIZE):
        with_group = _group(number, tokens, draw)
        store.write([_deed(fact) for fact in with_group[1]])
        if number % 10 == 0:
            store.apply(GroupClosed(with_group[0].key, Reason.ZERO_SPREAD, with_group[0].num_trainable))
        else:
            groups.append(with_group[0])
        if len(groups) == GROUPS_PER_STEP:
            batch = Batch(version + 1, version, tuple(groups))
            step = Stepped(version + 1, version + 1, started=0.0, ended=1.0, num_tokens=0, metrics={})
            store.write([_deed(Leased(batch, {}, {}, {})), _deed(step), _deed(Checkpointed(version + 1))])
            version, groups = version + 1, []
    store.close()


def _deed(fact: object) -> Callable[[Store], object]:
    return lambda store: store.apply(fact)  # pyright: ignore[reportArgumentType]


def _group(number: int, tokens: int, draw: np.random.Generator) -> tuple[Group, list[object]]:
    epoch, position = divmod(number, 4000)
    key = GroupKey(epoch, position)
    task = Task(f"task-{position % 1000}", "letters" if position % 3 else "sums", {"question": f"What is number {position}?"})
    kept = [_trajectory(RolloutKey(key, sample), task, tokens, draw) for sample in range(GROUP_SIZE)]
    group = Group.of(key, task, kept)
    return group, [Admitted(key, task), *(TrajectoryKept(each, {}, {}) for each in kept), GroupFinished(group, number + 1)]


def _trajectory(key: RolloutKey, task: Task, tokens: int, draw: np.random.Generator) -> Trajectory:
    said = " ".join(WORDS[at] for at in draw.integers(0, len(WORDS), tokens // 4))
    prompt = f"<|user|>{task.text('question')}<|end|><|assistant|>"
    ids = np.frombuffer((prompt + said).encode()[:tokens].ljust(tokens), np.uint8).astype(np.int32)
    written = np.arange(tokens) >= len(prompt)
    logprobs = -draw.random(tokens, dtype=np.float32)
    versions = np.zeros(tokens, np.int32)
    failed = draw.random() < 1 / 40
    row = Row(ids, written, written, logprobs, versions, versions, turns=versions)
    reward = None if failed else round(float(draw.random()), 3)
    error = "RolloutTimeout: the rollout took longer than 60 s" if failed else None
    return Trajectory(key, task.id, task.source, reward, (row,), error=error, seconds=1.0, components={"right": reward or 0.0})


def looks(folder: Path) -> dict[str, Callable[[], object]]:
    """What people do, by name."""
    words = WordIndex(folder)
    return {
        "first page, newest groups": lambda: page_of(folder, GroupFilter()),
        "a page in the middle": lambda: page_of(folder, GroupFilter(), first=6000),
        "groups of a step": lambda: page_of(folder, GroupFilter(version=40)),
        "groups of a source": lambda: page_of(folder, GroupFilter(source="sums")),
        "groups of a failure": lambda: page_of(folder, GroupFilter(failure="RolloutTimeout")),
        "lowest reward first": lambda: page_of(folder, GroupFilter(), order=GroupOrder.WORST),
        "largest spread of a source first": lambda: page_of(folder, GroupFilter(source="letters"), order=GroupOrder.SPREAD),
        "dropped ones": lambda: page_of(folder, GroupFilter(fate="zero_spread")),
        "two words that many hold": lambda: page_of(folder, GroupFilter(words="rain therefore"), words=words),
        "a phrase": lambda: page_of(folder, GroupFilter(words='"rain therefore seven"'), words=words),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rollouts", type=int, default=100_000)
    options.add_argument("--tokens", type=int, default=300)
    options.add_argument("--folder", type=Path)
    given = options_of(options, rollouts=800)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = given.folder or Path(scratch) / "run"
        if not (folder / "store.sqlite").exists():
            begun = time.perf_counter()
            make(folder, rollouts=given.rollouts, tokens=given.tokens)
            print(f"made in {time.perf_counter() - begun:.1f} s, {(folder / 'store.sqlite').stat().st_size / 1e6:.0f} MB")
        return _measured(folder) and not given.smoke


def _measured(folder: Path) -> int:
    late = False
    begun = time.perf_counter()
    page_of(folder, GroupFilter())
    first = (time.perf_counter() - begun) * 1000
    begun = time.perf_counter()
    while not (grown := WordIndex(folder).grow(5.0)).complete:
        print(f"  words of {grown.done} of {grown.total} rollouts indexed", flush=True)
    print(
        f"words of {grown.total} rollouts indexed in {time.perf_counter() - begun:.1f} s, {WordIndex(folder).path.stat().st_size / 1e6:.0f} MB"
    )
    print(f"{first:8.1f} ms  the first look of a process (at most {FIRST_MS:.0f})")
    for name, look in looks(folder).items():
        taken: list[float] = []
        for _ in range(5):
            begun = time.perf_counter()
            look()
            taken.append((time.perf_counter() - begun) * 1000)
        print(f"{statistics.median(taken):8.1f} ms  {name} (largest {max(taken):.1f}, at most {PAGE_MS:.0f})")
        late |= statistics.median(taken) > PAGE_MS
    return int(late or first > FIRST_MS)


if __name__ == "__main__":
    sys.exit(main())
