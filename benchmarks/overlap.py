"""Synchronous against asynchronous training on the demo task, with replies that take a long-tailed
time.

    python benchmarks/overlap.py                          three rounds, about six minutes
    python benchmarks/overlap.py --rounds 1 --steps 30    about two minutes

Each round runs, one after the other and on the same cores: `max_staleness = 0`, the asynchronous
ring, generation alone, training alone. The ideal is the slower of the last two; see
`overlap_runs.py` for what "alone" leaves out. All runs see the same tasks with the same delays.
Beside the share of the ideal stands that of the ideal under the bound on age, which no admission
gets round: a step waits for every group that the next one would find too old (`_bounded`). A sample
is one rollout that was trained on (or given back, or stepped on again). The first run makes the
model that all start from: `configs/demo.toml` up to the end of its warm start, kept under --folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
sys.path.insert(0, str(HERE))

from delayed_environment import Delays  # noqa: E402
from overlap_runs import Measured, generation_alone, ring, training_alone  # noqa: E402
from smoke import SETTINGS, options_of  # noqa: E402

from midflight.config import Config, load_config  # noqa: E402
from midflight.types import Task  # noqa: E402

BOUND_STEPS = 500
"""From which the pace under the bound on age is taken: it varies by some hundredths then."""
VARIANTS = ("synchronous", "asynchronous", "generation alone", "training alone")


def main() -> None:
    options = _options()
    os.environ["MIDFLIGHT_DELAY_MEDIAN_SECONDS"] = str(options.delay)
    os.environ["MIDFLIGHT_DELAY_SIGMA"] = str(options.sigma)
    model = _model(options)
    found: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    for number in range(options.rounds):
        for name, measured in zip(VARIANTS, _round(options, model), strict=True):
            found[name].append(measured)
        print(
            f"round {number + 1}: "
            + _line(options, {name: runs[-1:] for name, runs in found.items()}),
            flush=True,
        )
    _report(options, found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=60, help="measured steps of every run but the synchronous one"
    )
    parser.add_argument(
        "--warmup", type=int, default=15, help="steps before them that do not count"
    )
    parser.add_argument(
        "--sync-steps",
        type=int,
        default=None,
        help="measured steps of the synchronous run (default: a sixth)",
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.5,
        help="median of the log-normal delay of a reply, in seconds",
    )
    parser.add_argument(
        "--sigma", type=float, default=0.75, help="standard deviation of its logarithm"
    )
    # One for each slot of the demo's engine. More would ask the two cores for more than they have;
    # see docs/benchmarks.md.
    parser.add_argument("--in-flight", type=int, default=128, help="rollout.max_in_flight")
    # The demo's 4 versions pass in little more than a second: most steps would wait for the slowest
    # replies.
    parser.add_argument(
        "--staleness", type=int, default=8, help="rollout.max_staleness of the asynchronous run"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/overlap"))
    parser.add_argument("--config", type=Path, default=HERE.parent / "configs" / "demo.toml")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="OPTION",
        help="of every run, such as engine.max_running=64",
    )
    return options_of(
        parser,
        rounds=1,
        steps=2,
        warmup=2,
        sync_steps=1,
        delay=0.0,
        in_flight=4,
        set=SETTINGS,
        folder=Path("runs/smoke/overlap"),
    )


def _round(options: argparse.Namespace, model: Path) -> tuple[Measured, ...]:
    sync_steps = options.sync_steps or max(3, options.steps // 6)
    synchronous = ring(
        _config(options, model, "synchronous", steps=1 + sync_steps, staleness=0), warmup=1
    )
    steps = options.warmup + options.steps
    warmup = options.warmup
    asynchronous = ring(_config(options, model, "asynchronous", steps=steps), warmup=warmup)
    generation, batches = generation_alone(
        _config(options, model, "generation", steps=steps), model, warmup=warmup
    )
    training = training_alone(
        _config(options, model, "training", steps=steps), model, batches, warmup=warmup
    )
    return synchronous, asynchronous, generation, training


def _config(
    options: argparse.Namespace, model: Path, name: str, *, steps: int, staleness: int | None = None
) -> Config:
    """The demo's, from a model that is warm already, with delayed replies, and without evaluations
    and checkpoints on the way.
    """
    staleness = options.staleness if staleness is None else staleness
    return load_config(
        options.config,
        [
            "environment.entry=delayed_environment:answer",
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
            f"rollout.max_staleness={staleness}",
            "rollout.buffer_groups=none",
            *options.set,
        ],
    )


def _model(options: argparse.Namespace) -> Path:
    folder = options.folder / "model"
    if not (folder / "start" / "config.json").exists():
        print(f"making the model to start from in {folder}", flush=True)
        settings = [
            word for setting in ("run.steps=1", *options.set) for word in ("--set", setting)
        ]
        command = [
            sys.executable,
            "-m",
            "midflight",
            "train",
            options.config,
            "--folder",
            folder,
            "--overwrite",
            *settings,
        ]
        subprocess.run([str(part) for part in command], check=True)
    return folder / "start"


# --- The table ------------------------------------------------------------------------------------


def _report(options: argparse.Namespace, found: dict[str, list[Measured]]) -> None:
    config = _config(
        options, options.folder / "model" / "start", "asynchronous", steps=options.steps
    )
    rollout = config.rollout
    print(
        f"\ndelay: log-normal, median {options.delay:g} s, sigma {options.sigma:g}; "
        f"{rollout.groups_per_step} groups of {rollout.group_size} a step, max_staleness "
        f"{rollout.max_staleness} (0), max_in_flight {rollout.max_in_flight}; medians of "
        f"{options.rounds} rounds"
    )
    processes = sorted({name for runs in found.values() for run in runs for name in run.cpu})
    head = "".join(f"{name:>10}" for name in processes)
    print(
        f"\n{'':18}{'steps':>7}{'samples/s':>11}{'spread':>15}{'s/step':>8}   CPU "
        f"s/step:{head}{'all':>8}"
    )
    size = rollout.groups_per_step * rollout.group_size
    for name, runs in found.items():
        rate = _rate(runs)
        rates = [run.samples_per_second for run in runs]
        cpu = {
            process: statistics.median(run.cpu.get(process, 0.0) for run in runs)
            for process in processes
        }
        shown = "".join(f"{cpu[process]:10.3f}" for process in processes)
        print(
            f"{name:18}{runs[0].num_steps:7}{rate:11.1f}{min(rates):8.1f}-{max(rates):<6.1f}{size / rate:8.3f}   {'':11}{shown}{sum(cpu.values()):8.3f}"
        )
    for name in ("synchronous", "asynchronous", "generation alone"):
        last = found[name][-1]
        waits = ", ".join(
            f"{who} {seconds:.3f}"
            for who, seconds in sorted(last.waits.items(), key=lambda w: -w[1])
        )
        print(
            f"{name}, last round, s/step: {waits or 'nobody waits'}; handover: stage "
            f"{last.handover[0]:.3f}, commit {last.handover[1]:.3f}"
        )
    print("\n" + _line(options, found))


def _line(options: argparse.Namespace, found: dict[str, list[Measured]]) -> str:
    synchronous, asynchronous, generation, training = (_rate(found[name]) for name in VARIANTS)
    ideal = min(generation, training)
    bounded = _bounded(
        options,
        ideal,
        training,
        handover=statistics.median(sum(run.handover) for run in found["asynchronous"]),
    )
    return (
        f"synchronous {synchronous:.1f}, asynchronous {asynchronous:.1f} samples/s: "
        f"{asynchronous / synchronous:.2f} times as fast; ideal min({generation:.1f}, "
        f"{training:.1f}): {asynchronous / ideal:.1%} reached; under the bound on age "
        f"{bounded:.1f}: {asynchronous / bounded:.1%} reached"
    )


def _bounded(
    options: argparse.Namespace, ideal: float, training: float, *, handover: float
) -> float:
    """Samples a second at the pace of the ideal, where the groups of a step begin the moment its
    version is served, each rollout takes its delay and nothing else, and the step S versions later
    begins when the last of them has ended: later none of them may be trained.

    To begin them later, or more of them under one version, only makes the longest of them end
    later.
    """
    rollout = _config(
        options, options.folder / "model" / "start", "asynchronous", steps=options.steps
    ).rollout
    size = rollout.groups_per_step * rollout.group_size
    delays = Delays.from_surroundings()
    ends = [0.0]
    begun = 0.0
    ended = 0.0
    for step in range(BOUND_STEPS):
        oldest = step - rollout.max_staleness
        begun = max(begun + size / ideal, ended, ends[oldest] if oldest >= 0 else 0.0)
        ended = begun + size / training
        longest = max(delays.of(Task(f"{step}-{number}", "bound", {}), 0) for number in range(size))
        ends.append(ended + handover + longest)
    return size * BOUND_STEPS / begun


def _rate(runs: Sequence[Measured]) -> float:
    return statistics.median(run.samples_per_second for run in runs)


if __name__ == "__main__":
    main()
