"""Where tasks come from: a source of a million rows, and a curriculum.

    python benchmarks/tasks.py --parts rows [--rows 1000000] [--format jsonl|csv|parquet]
    python benchmarks/tasks.py --parts curriculum

**rows**: what the source takes of a rollout process. Memory is resident, of a process of its own
that has imported what a rollout process does. Times are seconds of one core.

**curriculum**: rollouts until a policy reaches a given reward, with tasks in turn and with tasks
chosen by pass rate (`[curriculum]`), on the same mixed set. The stream of tasks and the pools are
those of a run. The policy is a simulation: task i is passed with probability
1 / (1 + exp(difficulty_i - skill - own_i)), the impossible ones never. A step takes the policy
gradient of its groups, with GRPO's advantages, for `skill`, which all tasks share, and for what is
the task's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from harness.arguments import Arguments
from harness.processes import apart, resident_mib
from harness.report import Report, make_parts

from midflight.config.sources import CurriculumSection, SourceSection
from midflight.environments.seeded_stream import SeededStream
from midflight.environments.sources import Source, load_sources
from midflight.types import GroupKey, Task

# --- Rows -----------------------------------------------------------------------------------------

DRAWS = 10_000


def rows(options: argparse.Namespace, report: Report) -> None:
    with TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        path = write_rows(Path(folder), options.rows, options.format)
        size = path.stat().st_size / 2**20
        report.say(f"{options.rows:,} rows, {size:.0f} MB of {options.format}")
        report.table("after", "CPU", "resident")
        for heldout in (0, 256):
            apart(print_source, path, heldout)


def write_rows(folder: Path, count: int, kind: str) -> Path:
    """Writes rows of about 200 bytes as JSON."""
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        from datasets import Dataset

        Dataset.from_list(list(made_rows(count))).to_parquet(path)
        return path
    with path.open("w") as file:
        if kind == "csv":
            file.write("question,answer,notes\n")
        for row in made_rows(count):
            line = ",".join(map(str, row.values())) if kind == "csv" else json.dumps(row)
            file.write(line + "\n")
    return path


def made_rows(count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        more = number % 97
        yield {
            "question": f"Ann has {number} nuts and finds {more} more. How many are they now?",
            "answer": number + more,
            "notes": "n" * 80,
        }


def print_source(path: Path, heldout: int) -> None:
    """Prints the rows of the table for one source, in a process of its own."""
    # what such a process has in memory anyway
    import_module("midflight.run.rollout.rollout_process")
    began = time.process_time()
    for what in used_source(path, heldout):
        seconds = time.process_time() - began
        print(f"| {what} | {seconds:.2f} s | {resident_mib():.0f} MB |", flush=True)
        began = time.process_time()


def used_source(path: Path, heldout: int) -> Iterator[str]:
    """Uses the source as a run does; yields what was done."""
    from midflight.run.launcher.checks.tasks import LOOKING_SECONDS, look_at_rows

    yield "before"
    section = SourceSection(path=path, answer="answer", heldout=heldout)
    sources = load_sources([section], seed=0)
    yield f"sources loaded, {heldout} held out"
    stream = SeededStream(sources, seed=0)
    stream.next()
    yield "order of an epoch, first task"
    for _ in range(DRAWS):
        stream.next()
    yield f"{DRAWS:,} further tasks"
    looked = look_at_rows(sources[0], section, needs_answer=True, seconds=LOOKING_SECONDS)
    total = len(sources[0].training) + len(sources[0].heldout)
    yield "every row looked at, as before a run" + (" (not all)" if looked < total else "")


# --- Curriculum -----------------------------------------------------------------------------------

GROUP = 8
BATCH = 16
SHARED = 0.02
OWN = 0.5
"""Step sizes of what all tasks share, and of a task's own part."""
IMPOSSIBLE = float("inf")
WAYS = {
    "in turn": CurriculumSection(),
    "learnability": CurriculumSection(priority="learnability"),
}


def difficulties(number: int) -> list[float]:
    """A third is easy (pass rate 0.95 and more at first), a third from even to one in a thousand, a
    third impossible.
    """
    third = number // 3
    easy = [-3.0 - i / third for i in range(third)]
    hard = [7.0 * i / third for i in range(third)]
    return easy + hard + [IMPOSSIBLE] * (number - 2 * third)


class Policy:
    """`chances` of all tasks to be passed."""

    def __init__(self, difficulty: Sequence[float]) -> None:
        self._difficulty = np.array(difficulty)
        self._own = np.zeros(len(difficulty))
        self._skill = 0.0

    @property
    def chances(self) -> np.ndarray:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(self._difficulty - self._skill - self._own))

    def learn(self, groups: Sequence[tuple[int, np.ndarray]]) -> None:
        """Learns from the rewards of the groups of a step. The score of a Bernoulli of logit
        x is reward - p.
        """
        chances = self.chances
        for task, rewards in groups:
            spread = rewards.std(ddof=1)
            if spread:
                advantages = (rewards - rewards.mean()) / spread
                gradient = float((advantages * (rewards - chances[task])).mean())
                self._own[task] += OWN * gradient
                self._skill += SHARED * gradient


def rollouts_until(
    reward: float, curriculum: CurriculumSection, *, tasks: int, seed: int, most: int
) -> int:
    """Trains until the mean chance over all tasks that can be passed is `reward`, and returns the
    number of rollouts; `most` where it is not reached.
    """
    difficulty = difficulties(tasks)
    possible = np.isfinite(difficulty)
    policy = Policy(difficulty)
    dice = random.Random(seed)
    source = Source("mixed", 1.0, tuple(Task(str(i), "mixed") for i in range(tasks)))
    stream = SeededStream([source], seed=seed, curriculum=curriculum)
    for step in range(most // (GROUP * BATCH)):
        chances = policy.chances
        if chances[possible].mean() >= reward:
            return step * GROUP * BATCH
        drawn = [begin(stream) for _ in range(BATCH)]
        ended: list[tuple[int, np.ndarray]] = []
        for _, task in drawn:
            ended.append((task, np.array([dice.random() for _ in range(GROUP)]) < chances[task]))
        groups = [(task, passed.astype(np.float64)) for task, passed in ended]
        for (key, _), (_, rewards) in zip(drawn, groups, strict=True):
            stream.curriculum.ended(key, rewards.tolist())
        policy.learn(groups)
    return most


def begin(stream: SeededStream) -> tuple[GroupKey, int]:
    key, task = stream.next()
    stream.curriculum.begun(key)
    return key, int(task.id)


def curriculum(options: argparse.Namespace, report: Report) -> None:
    report.say(
        f"rollouts until a mean reward of {options.reward:g} on the possible two thirds of "
        f"{options.tasks} tasks, {options.seeds} seeds"
    )
    table = report.table("curriculum", "rollouts", "range", "in turn / so")
    first = 0.0
    for name, section in WAYS.items():
        found: list[int] = []
        for seed in range(options.seeds):
            number = rollouts_until(
                options.reward, section, tasks=options.tasks, seed=seed, most=options.most
            )
            found.append(number)
        mean = statistics.mean(found)
        first = first or mean
        spread = f"{min(found):,} to {max(found):,}"
        table.row(name, f"{mean:,.0f}", spread, f"{first / mean:.2f}")
        if name == "learnability":
            report.figure("rollouts to a reward of 0.9: in turn / by learnability", first / mean)


PARTS = {"rows": rows, "curriculum": curriculum}


def main() -> None:
    arguments = Arguments(__doc__)
    arguments.option("--parts", [*PARTS], choices=[*PARTS])
    arguments.option("--rows", 1_000_000, smoke=3000)
    arguments.option("--format", "jsonl", choices=("jsonl", "csv", "parquet"))
    arguments.option("--tasks", 300, smoke=60, help="of part `curriculum`")
    arguments.option("--reward", 0.9, help="mean chance over the tasks that can be passed")
    arguments.option("--seeds", 5, smoke=1)
    arguments.option("--most", 400_000, smoke=4000, help="rollouts before it gives up")
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
