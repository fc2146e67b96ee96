"""Synchronous against asynchronous training on the demo task, with replies that take a long-tailed
time; and what the trainer's core brings when it generates.

    python benchmarks/overlap.py                          three rounds, about six minutes
    python benchmarks/overlap.py --rounds 1 --steps 30    about two minutes
    python benchmarks/overlap.py --parts lend devices     about six minutes

**overlap**: each round runs, one after the other and on the same cores: `max_staleness = 0`, the
asynchronous ring, generation alone, training alone. The ideal is the slower of the last two; see
`sides/half_rings.py` for what "alone" leaves out. All runs see the same tasks with the same delays.
Beside the share of the ideal stands that of the ideal under the bound on age, which no admission
gets round: a step waits for every group that the next one would find too old (`bounded_rate`). A
sample is one rollout that was trained on (or given back, or stepped on again). The first run makes
the model that all start from: `configs/demo.toml` up to the end of its warm start, kept under
--folder.

**lend**: real runs with and without `engine.lend`, in turn, on the same cores; the third kind has a
second engine all the time, which costs the trainer its core. The model has random weights, so
answers are long. There are more rollouts than one engine has slots, and a batch is several times as
many. With `--lend-groups 4 --lend-slots 64` a batch waits for its last answers, which no engine
makes sooner.

**devices**: the production code over scripted engines on virtual time, so that each has a device of
its own whatever this machine is: 16 slots, 20 ms a token, and a request that comes or moves waits
1 ms for each token that it has, before its first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.arguments import Arguments
from harness.processes import environment
from harness.report import Report, make_parts
from harness.ring import Measured, ring
from harness.rounds import alternate, median_of
from harness.runs import DEMO, SMALL, train, train_command
from sides.delayed_environment import Delays
from sides.half_rings import generation_alone, training_alone

from midflight.config import Config, load_config
from midflight.environments.sources import Source
from midflight.testing.ring import SimulatedTrainer, SlowSteps, open_ring
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, GenerateRequest, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BOUND_STEPS = 500
"""The pace under the bound on age is taken from these: it varies by some hundredths then."""
Runs = dict[str, list[Measured]]


# --- Overlap --------------------------------------------------------------------------------------


def overlap(options: argparse.Namespace, report: Report) -> None:
    os.environ["MIDFLIGHT_DELAY_MEDIAN_SECONDS"] = str(options.delay)
    os.environ["MIDFLIGHT_DELAY_SIGMA"] = str(options.sigma)
    model = warm_model(options)
    found: Runs = {}
    for number in range(options.rounds):
        made = four_runs(options, model)
        for name, measured in made.items():
            found.setdefault(name, []).append(measured)
        last = {name: [measured] for name, measured in made.items()}
        report.say(f"round {number + 1}: {result_line(options, last)}")
    print_overlap(options, found, report)
    asynchronous = rate_of(found["asynchronous"])
    report.figure("asynchronous, of the ideal, in percent", 100 * asynchronous / ideal_of(found))
    ratio = asynchronous / rate_of(found["synchronous"])
    report.figure("asynchronous / synchronous, slow replies", ratio)


def four_runs(options: argparse.Namespace, model: Path) -> dict[str, Measured]:
    """One round."""
    sync_steps = options.sync_steps or max(3, options.steps // 6)
    config = overlap_config(options, model, "synchronous", steps=1 + sync_steps, staleness=0)
    found = {"synchronous": ring(config, warmup=1)}
    warmup = options.warmup
    steps = warmup + options.steps
    config = overlap_config(options, model, "asynchronous", steps=steps)
    found["asynchronous"] = ring(config, warmup=warmup)
    config = overlap_config(options, model, "generation", steps=steps)
    found["generation alone"], batches = generation_alone(config, model, warmup=warmup)
    config = overlap_config(options, model, "training", steps=steps)
    found["training alone"] = training_alone(config, model, batches, warmup=warmup)
    return found


def overlap_config(
    options: argparse.Namespace, model: Path, name: str, *, steps: int, staleness: int | None = None
) -> Config:
    """The demo's, from a model that is warm already, with delayed replies, and without evaluations
    and checkpoints on the way.
    """
    settings = [
        "environment.entry=sides.delayed_environment:answer",
        # it blocks nothing, and counts the rollouts of a task in its process
        "environment.workers=0",
        f"model.path={model}",
        f"run.folder={options.folder / name}",
        f"run.steps={steps}",
        "run.restarts=0",
        "warm_start.target_accuracy=none",
        "trainer.checkpoint_every=0",
        "environment.sources.0.heldout=0",
        "environment.sources.1.heldout=0",
        f"rollout.max_in_flight={options.in_flight}",
        f"rollout.max_staleness={options.staleness if staleness is None else staleness}",
        "rollout.buffer_groups=none",
    ]
    return load_config(options.config, [*settings, *options.set])


def warm_model(options: argparse.Namespace) -> Path:
    """What all runs start from. It is made once."""
    folder = options.folder / "model"
    if not (folder / "start" / "config.json").exists():
        print(f"making the model to start from in {folder}", flush=True)
        command = train_command(options.config, ["run.steps=1", *options.set], folder=folder)
        train([*command, "--overwrite"], said=options.folder / "model.txt")
    return folder / "start"


def print_overlap(options: argparse.Namespace, found: Runs, report: Report) -> None:
    rollout = config_of_table(options).rollout
    report.say(
        f"\ndelay: log-normal, median {options.delay:g} s, sigma {options.sigma:g}; "
        f"{rollout.groups_per_step} groups of {rollout.group_size} a step, max_staleness "
        f"{rollout.max_staleness} (0), max_in_flight {rollout.max_in_flight}; medians of "
        f"{options.rounds} rounds"
    )
    processes: set[str] = set()
    for runs in found.values():
        for run in runs:
            processes |= run.cpu.keys()
    names = sorted(processes)
    table = report.table(
        "run",
        "steps",
        "samples/s (spread)",
        "s/step",
        *(f"CPU s/step: {name}" for name in names),
        "all",
    )
    size = rollout.groups_per_step * rollout.group_size
    for name, runs in found.items():
        rates = [run.samples_per_second for run in runs]
        cpu = [median_of(runs, lambda run, part=part: run.cpu.get(part, 0.0)) for part in names]
        table.row(
            name,
            runs[0].num_steps,
            f"{rate_of(runs):.1f} ({min(rates):.1f}-{max(rates):.1f})",
            f"{size / rate_of(runs):.3f}",
            *(f"{seconds:.3f}" for seconds in cpu),
            f"{sum(cpu):.3f}",
        )
    for name, runs in found.items():
        if name != "training alone":
            report.say(last_round(name, runs[-1]))
    report.say(f"\n{result_line(options, found)}")


def last_round(name: str, run: Measured) -> str:
    """Who waited for whom, longest first."""
    longest = sorted(run.waits.items(), key=lambda wait: -wait[1])
    waits = ", ".join(f"{who} {seconds:.3f}" for who, seconds in longest) or "nobody waits"
    stage, pause = run.handover
    return f"{name}, last round, s/step: {waits}; handover: stage {stage:.3f}, pause {pause:.3f}"


def result_line(options: argparse.Namespace, found: Runs) -> str:
    synchronous = rate_of(found["synchronous"])
    asynchronous = rate_of(found["asynchronous"])
    generation = rate_of(found["generation alone"])
    training = rate_of(found["training alone"])
    ideal = ideal_of(found)
    handover = median_of(found["asynchronous"], lambda run: sum(run.handover))
    bounded = bounded_rate(options, ideal, training, handover=handover)
    return (
        f"synchronous {synchronous:.1f}, asynchronous {asynchronous:.1f} samples/s: "
        f"{asynchronous / synchronous:.2f} times as fast; ideal min({generation:.1f}, "
        f"{training:.1f}): {asynchronous / ideal:.1%} reached; under the bound on age "
        f"{bounded:.1f}: {asynchronous / bounded:.1%} reached"
    )


def bounded_rate(
    options: argparse.Namespace, ideal: float, training: float, *, handover: float
) -> float:
    """Samples a second at the pace of the ideal, where the groups of a step begin the moment its
    version is served, each rollout takes its delay and nothing else, and the step S versions later
    begins when the last of them has ended: later none of them may be trained.

    To begin them later, or more of them under one version, only makes the longest of them end
    later.
    """
    rollout = config_of_table(options).rollout
    size = rollout.groups_per_step * rollout.group_size
    delays = Delays.from_environment()
    ends = [0.0]
    begun = 0.0
    ended = 0.0
    for step in range(BOUND_STEPS):
        oldest = step - rollout.max_staleness
        begun = max(begun + size / ideal, ended, ends[oldest] if oldest >= 0 else 0.0)
        ended = begun + size / training
        tasks = [Task(f"{step}-{number}", "bound", {}) for number in range(size)]
        longest = max(delays.of(task, 0) for task in tasks)
        ends.append(ended + handover + longest)
    return size * BOUND_STEPS / begun


def config_of_table(options: argparse.Namespace) -> Config:
    """Returns that of the asynchronous run."""
    start = options.folder / "model" / "start"
    return overlap_config(options, start, "asynchronous", steps=options.steps)


def rate_of(runs: Sequence[Measured]) -> float:
    return median_of(runs, lambda run: run.samples_per_second)


def ideal_of(found: Runs) -> float:
    return min(rate_of(found["generation alone"]), rate_of(found["training alone"]))


# --- Lending --------------------------------------------------------------------------------------

LENDING = {
    "one engine": (),
    "and one that is lent": ("engine.lend=true",),
    "two engines": ("engine.count=2",),
}
LEND_WARMUP = 2
"""Steps of each run that do not count."""


def lend(options: argparse.Namespace, report: Report) -> None:
    steps = options.lend_steps
    deeds = {
        name: lambda name=name: ring(lend_config(options, name, steps), warmup=LEND_WARMUP)
        for name in LENDING
    }
    found = alternate(deeds, rounds=options.rounds)
    alone = [run.samples_per_second for run in found["one engine"]]
    table = report.table(
        "run",
        "samples a second",
        "of one engine, round by round",
        "trainer waits, s a step",
        "CPU s a step: trainer",
        "engines",
        "all",
    )
    for name, runs in found.items():
        rates = [run.samples_per_second for run in runs]
        ratios = [f"{rate / base:.2f}" for rate, base in zip(rates, alone, strict=True)]
        table.row(
            name,
            f"{statistics.median(rates):.1f}",
            ", ".join(ratios),
            f"{median_of(runs, trainer_waits):.1f}",
            f"{median_of(runs, lambda run: run.cpu_of('trainer')):.2f}",
            f"{median_of(runs, lambda run: run.cpu_of('engine')):.2f}",
            f"{median_of(runs, lambda run: run.cpu_of('')):.2f}",
        )


def trainer_waits(run: Measured) -> float:
    return sum(seconds for who, seconds in run.waits.items() if who.startswith("trainer"))


def lend_config(options: argparse.Namespace, name: str, steps: int) -> Config:
    settings = [
        f"run.folder={options.folder / name.replace(' ', '-')}",
        f"run.steps={LEND_WARMUP + steps}",
        f"model.hidden_size={32 if options.smoke else 256}",
        "model.max_context=512",
        f"environment.max_tokens={8 if options.smoke else 200}",
        "warm_start.target_accuracy=none",
        "trainer.checkpoint_every=0",
        "environment.sources.0.heldout=0",
        "environment.sources.1.heldout=0",
        f"rollout.groups_per_step={options.lend_groups}",
        "rollout.group_size=8",
        "rollout.max_staleness=2",
        f"engine.max_running={options.lend_slots}",
        "rollout.buffer_groups=none",
        "rollout.max_in_flight=none",
    ]
    return load_config(DEMO, [*settings, *LENDING[name]])


# --- Lending on devices of their own --------------------------------------------------------------


class Prefilling(ScriptedEngine):
    """A request waits 1 ms for each token that it has."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0.001 * len(request.input_ids))
        async for chunk in super().generate(request):
            yield chunk


async def asks_once(task: Task, client: AsyncOpenAI) -> float:
    await client.completions.create(
        model="policy", prompt=str(task.data["question"]), max_tokens=200
    )
    return float(int(task.id) % 2)


async def virtual_seconds(more: tuple[str, ...], step_seconds: float, steps: int) -> float:
    """Returns what a run takes whose steps take so long."""
    settings = [
        f"run.steps={steps}",
        "rollout.groups_per_step=8",
        "rollout.group_size=8",
        "rollout.max_staleness=2",
        "engine.max_running=16",
        "environment.max_tokens=200",
    ]
    config = load_config(None, [*settings, *more])
    tokenizer = scripted_tokenizer()
    script = Script(mean_length=80)
    engines: list[Prefilling] = []
    for number in range(2 if more else 1):
        engine = Prefilling(
            f"engine{number}",
            script=script,
            capabilities=replace(CAPABLE, max_running=16),
            tokenizer=tokenizer,
            step_seconds=0.02,
            chunk_tokens=4,
        )
        engines.append(engine)
    tasks = tuple(Task(str(number), "numbers", {"question": f"n{number}"}) for number in range(512))
    with tempfile.TemporaryDirectory() as folder:
        made = open_ring(
            config,
            engines,
            tokenizer=tokenizer,
            sources=[Source("numbers", 1.0, tasks)],
            environment=asks_once,
            folder=Path(folder),
        )
        async with made as opened:
            began = asyncio.get_running_loop().time()
            trainer = SimulatedTrainer()
            service = SlowSteps(opened.system, seconds=lambda: step_seconds)
            await opened.train(trainer, trainer, service=service)
            return asyncio.get_running_loop().time() - began


def devices(options: argparse.Namespace, report: Report) -> None:
    steps = LEND_WARMUP + options.lend_steps
    table = report.table(
        "a step of the trainer takes",
        "one engine: a batch in",
        "with one that is lent",
        "with two engines",
    )
    for step_seconds in (1.0, 2.0, 4.0):
        found: list[float] = []
        for more in LENDING.values():
            run = virtual_seconds(more, step_seconds, steps)
            found.append(run_virtual(run, max_seconds=1e6) / steps)
        one, lent, two = found
        times = (f"{one / lent:.2f} times as many", f"{one / two:.2f} times as many")
        table.row(f"{step_seconds:g} s", f"{one:.1f} s", *times)


PARTS = {"overlap": overlap, "lend": lend, "devices": devices}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", ["overlap"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option(
        "--steps", 60, smoke=2, help="measured steps of every run but the synchronous one"
    )
    arguments.option("--warmup", 15, smoke=2, help="steps before them that do not count")
    arguments.option(
        "--sync-steps",
        None,
        smoke=1,
        type=int,
        help="measured steps of the synchronous run (default: a sixth)",
    )
    arguments.option(
        "--delay", 0.5, smoke=0.0, help="median of the log-normal delay of a reply, in seconds"
    )
    arguments.option("--sigma", 0.75, help="standard deviation of its logarithm")
    # One for each slot of the demo's engine. More would ask the two cores for more than they have;
    # see docs/benchmarks.md.
    arguments.option("--in-flight", 128, smoke=4, help="rollout.max_in_flight")
    # The demo's 4 versions pass in little more than a second: most steps would wait for the slowest
    # replies.
    arguments.option("--staleness", 8, help="rollout.max_staleness of the asynchronous run")
    arguments.option("--folder", Path("runs/overlap"), smoke=Path("runs/smoke/overlap"))
    arguments.option("--config", DEMO)
    arguments.option(
        "--set",
        [],
        smoke=[*SMALL],
        metavar="OPTION",
        help="of every run of part `overlap`, such as engine.max_running=64",
    )
    arguments.option("--lend-steps", 6, smoke=2, help="measured steps of each run of part `lend`")
    arguments.option("--lend-groups", 16, smoke=2, help="of 8 rollouts, in a step of part `lend`")
    arguments.option("--lend-slots", 32, smoke=8, help="of each engine of part `lend`")
    options = arguments.parse()
    os.environ.update(environment())
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
