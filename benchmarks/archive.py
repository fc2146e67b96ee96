"""How long it takes to look at a large run: the first page of its groups, others filtered and
sorted, one conversation, words found.

    python benchmarks/archive.py
        100 000 rollouts of 300 tokens each (0.8 GB), made first in about a minute
    python benchmarks/archive.py --smoke
        800 rollouts, and no bar
    python benchmarks/archive.py --folder DIR
        keeps the run there, for the next time
    python benchmarks/archive.py --pages
        pages of a viewer in place of looks: processor time, answer, first paint in Chromium

Says for each look the median and the largest of five, in milliseconds, and exits with 1 where a
page takes over 300 ms or the first over a second. The first look is made by a process that has just
opened the run; the file may lie in the system's cache. Of pages the first visit to a viewer that
has just started stands beside the median of the next five; the bar is a second for each.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from smoke import options_of

from midflight.archive.groups import GroupFilter, GroupOrder, page_of
from midflight.archive.search import WordIndex
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
    GroupClosed,
    GroupFinished,
    Leased,
    Stepped,
    TrajectoryKept,
)

encode = msgspec.json.Encoder().encode
FIRST_MS = 1000.0
PAGE_MS = 300.0
GROUP_SIZE = 8
GROUPS_PER_STEP = 16
WORDS = (
    *"abcdefghijklmnopqrstuvwxyz",
    "rain",
    "therefore",
    "seven",
    "answer",
    "wrong",
    "right",
    "tool",
    "city",
)


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
            store.apply(
                GroupClosed(with_group[0].key, Reason.ZERO_SPREAD, with_group[0].num_trainable)
            )
        else:
            groups.append(with_group[0])
        if len(groups) == GROUPS_PER_STEP:
            batch = Batch(version + 1, version, tuple(groups))
            step = Stepped(
                version + 1, version + 1, started=0.0, ended=1.0, num_tokens=0, metrics={}
            )
            store.write(
                [_deed(Leased(batch, {}, {}, {})), _deed(step), _deed(Checkpointed(version + 1))]
            )
            version = version + 1
            groups = []
    store.close()
    beside(folder, rollouts=rollouts, steps=version, tokens=tokens)


def beside(folder: Path, *, rollouts: int, steps: int, tokens: int) -> None:
    """The journal, the timeline and the configuration of the same run: a rollout takes 4 s and has
    three answers, 32 run at a time.
    """
    (folder / "config.toml").write_text(as_toml(Config()))
    each = 4.0 / 32
    per_step = GROUP_SIZE * GROUPS_PER_STEP
    with (
        (folder / "timeline.jsonl").open("wb") as lines,
        (folder / "metrics.jsonl").open("wb") as journal,
    ):
        for number in range(rollouts):
            began = number * each
            step = number // per_step
            turns = [
                TurnTimes(
                    began + n,
                    began + n + 0.9,
                    (("engine0", began + n),),
                    ((step, began + n + 0.2),),
                    tokens // 3,
                )
                for n in range(3)
            ]
            group, sample = divmod(number, GROUP_SIZE)
            key = (*divmod(group, 4000), 0, sample)
            lines.write(
                encode(
                    RolloutTimed(
                        key,
                        "letters" if group % 3 else "sums",
                        began,
                        began + 4.0,
                        0.5,
                        tokens,
                        tuple(turns),
                    )
                )
                + b"\n"
            )
            if number % per_step == per_step - 1 and step < steps:
                at = began + 4.0
                for line in (
                    WaitTimed("trainer", "generation", at - per_step * each, at - 6.0),
                    StepTimed(step, step + 1, at - 6.0, at, per_step * tokens),
                    CommitTimed("engine0", step + 1, at, 0.2, 0.01),
                ):
                    lines.write(encode(line) + b"\n")
                journal.write(encode(_step_line(step + 1, at, per_step, tokens)) + b"\n")


def _step_line(step: int, at: float, rollouts: int, tokens: int) -> StepLine:
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
        tokens=rollouts * tokens,
        groups=GROUPS_PER_STEP,
        rollouts=rollouts,
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


def _deed(fact: object) -> Callable[[Store], object]:
    return lambda store: store.apply(fact)  # pyright: ignore[reportArgumentType]


def _group(number: int, tokens: int, draw: np.random.Generator) -> tuple[Group, list[object]]:
    epoch, position = divmod(number, 4000)
    key = GroupKey(epoch, position)
    task = Task(
        f"task-{position % 1000}",
        "letters" if position % 3 else "sums",
        {"question": f"What is number {position}?"},
    )
    kept = [
        _trajectory(RolloutKey(key, sample), task, tokens, draw) for sample in range(GROUP_SIZE)
    ]
    group = Group.of(key, task, kept)
    return group, [
        Admitted(key, task),
        *(TrajectoryKept(each, {}, {}) for each in kept),
        GroupFinished(group, number + 1),
    ]


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
    return Trajectory(
        key,
        task.id,
        task.source,
        reward,
        (row,),
        error=error,
        seconds=1.0,
        components={"right": reward or 0.0},
    )


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
        "largest spread of a source first": lambda: page_of(
            folder, GroupFilter(source="letters"), order=GroupOrder.SPREAD
        ),
        "dropped ones": lambda: page_of(folder, GroupFilter(fate="zero_spread")),
        "two words that many hold": lambda: page_of(
            folder, GroupFilter(words="rain therefore"), words=words
        ),
        "a phrase": lambda: page_of(
            folder, GroupFilter(words='"rain therefore seven"'), words=words
        ),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rollouts", type=int, default=100_000)
    options.add_argument("--tokens", type=int, default=300)
    options.add_argument("--folder", type=Path)
    options.add_argument("--pages", action="store_true", help="measure pages of a viewer")
    given = options_of(options, rollouts=800)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = given.folder or Path(scratch) / "run"
        if not (folder / "store.sqlite").exists():
            begun = time.perf_counter()
            make(folder, rollouts=given.rollouts, tokens=given.tokens)
            print(
                f"made in {time.perf_counter() - begun:.1f} s, "
                f"{(folder / 'store.sqlite').stat().st_size / 1e6:.0f} MB"
            )
        return (seen(folder) if given.pages else _measured(folder)) and not given.smoke


def _measured(folder: Path) -> int:
    late = False
    begun = time.perf_counter()
    page_of(folder, GroupFilter())
    first = (time.perf_counter() - begun) * 1000
    begun = time.perf_counter()
    while not (grown := WordIndex(folder).grow(5.0)).complete:
        print(f"  words of {grown.done} of {grown.total} rollouts indexed", flush=True)
    print(
        f"words of {grown.total} rollouts indexed in {time.perf_counter() - begun:.1f} s, "
        f"{WordIndex(folder).path.stat().st_size / 1e6:.0f} MB"
    )
    print(f"{first:8.1f} ms  the first look of a process (at most {FIRST_MS:.0f})")
    for name, look in looks(folder).items():
        taken: list[float] = []
        for _ in range(5):
            begun = time.perf_counter()
            look()
            taken.append((time.perf_counter() - begun) * 1000)
        print(
            f"{statistics.median(taken):8.1f} ms  {name} (largest {max(taken):.1f}, at most "
            f"{PAGE_MS:.0f})"
        )
        late |= statistics.median(taken) > PAGE_MS
    return int(late or first > FIRST_MS)


# --- Pages of a viewer ----------------------------------------------------------------------------

CHROMIUM = os.environ.get("MIDFLIGHT_CHROMIUM") or shutil.which("chromium")
PAGES = {
    "/": "/",
    "time": "/run/{run}/time",
    "groups": "/run/{run}/groups",
    "conversation": "/run/{run}/conversation?epoch=0&position=12&attempt=0&sample=3",
    "ledger": "/run/{run}/ledger",
}


def seen(folder: Path) -> int:
    """Each page by a viewer of its own that has just started: how soon it answers, and in Chromium
    how soon there is something to see.
    """
    late = False
    for name, path in PAGES.items():
        with viewer(folder) as (address, process):
            url = address + path.format(run=folder.name)
            before = _processor_ms(process)
            answers = [_answered(url)]
            worked = _processor_ms(process) - before
            answers += [_answered(url) for _ in range(5)]
        with viewer(folder) as (address, _):
            paints = _painted(address + path.format(run=folder.name))
        again = f"{statistics.median(answers[1:]):7.0f} ms"
        shown = (
            "  no Chromium"
            if not paints
            else f"  painted {paints[0]:5.0f} ms, again {statistics.median(paints[1:]):5.0f} ms"
        )
        print(
            (
                f"{name:14} takes {worked:4.0f} ms of processor time, answers {answers[0]:5.0f} "
                f"ms, again{again}{shown}"
            ),
            flush=True,
        )
        late |= max([answers[0], *paints[:1]]) > FIRST_MS
    return int(late)


@contextmanager
def viewer(folder: Path) -> Generator[tuple[str, int]]:
    """Its address, and its process."""
    command = [sys.executable, "-m", "midflight", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("viewer: ").strip().rstrip("/")
        while True:  # it listens before it serves
            try:
                urllib.request.urlopen(f"{address}/health", timeout=60).read()
                break
            except OSError:
                time.sleep(0.05)
        yield address, process.pid
        process.terminate()


def _processor_ms(process: int) -> float:
    """That it has used so far, which says more than a clock on a machine with other things to
    do.
    """
    used = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return 1000 * sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def _answered(url: str) -> float:
    begun = time.perf_counter()
    urllib.request.urlopen(url, timeout=120).read()
    return (time.perf_counter() - begun) * 1000


def _painted(url: str) -> list[float]:
    """From the request to the first content on the screen; the browser itself runs already. Empty
    without one.
    """
    try:
        # `make test-view` installs it
        playwright: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        return []
    if CHROMIUM is None:
        return []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        found: list[float] = []
        for _ in range(4):
            page.goto(url)
            page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            found.append(
                page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
        browser.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
