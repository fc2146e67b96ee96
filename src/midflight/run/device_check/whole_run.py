"""A trial of all parts together: `midflight train` on the device, with engine and trainer in
processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from midflight.observe.history import read_journal
from midflight.observe.lines import StepLine
from midflight.run.device_check.bench import (
    REAL,
    SMALL,
    Bench,
    BenchSize,
    Found,
    Wrong,
    not_tried,
    tried,
)
from midflight.run.device_check.report import DeviceTrial
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.orphan_guard import guarded

STEPS = 6
WARM_UP = 2
"""Steps at the beginning that the speeds leave out."""
NUM_TASKS = 64
GROUPS = 4
GROUP = 4
MISMATCHES = ("mismatch/same_keys/mean", "mismatch/mean")
"""The mean difference between engine and trainer in nats: of tokens whose keys are of one version,
or of all tokens where there are none of these.
"""
RUN_SECONDS = 270.0
"""The time that a run may take, with its start."""
LAST_CHARACTERS = 800
"""Characters of a run's output that a trial shows."""
_ON_CPU = 'set engine.device = "cpu", or trainer.device = "cpu"'


def whole_run(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trials of a small run, and of one in turns. They say no speeds, because other
    parts run beside them.
    """
    if bench.device.type not in ("cpu", "cuda"):
        yield not_tried(
            "midflight train", f"a run computes on cpu or cuda, not {bench.device.type}"
        )
        return
    yield tried(
        f"midflight train, {STEPS} steps ({SMALL.name})",
        lambda: _trained(bench, "run-small", []),
        remedy=_ON_CPU,
    )
    # the engine sleeps in each step
    yield tried(
        f"midflight train in turns, {STEPS} steps ({SMALL.name})",
        lambda: _trained(bench, "run-turns", ['engine.share="time"']),
        remedy="leave engine.share out",
    )


def real_run(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trial of a run in real size, with its speeds."""
    if bench.why_not_real:
        yield not_tried("midflight train in real size", bench.why_not_real)
        return
    yield tried(
        f"midflight train, {STEPS} steps ({REAL.name})",
        lambda: _trained_in_real_size(bench),
        remedy=_ON_CPU,
    )


def _trained(bench: Bench, name: str, settings: Sequence[str]) -> Found:
    found = run_training(bench, SMALL, name, settings)
    return Found(f"engine and trainer {found.mismatch:.2g} nats apart")


def _trained_in_real_size(bench: Bench) -> Found:
    settings = ["engine.dtype=bfloat16", "trainer.compute_dtype=bfloat16"]
    found = run_training(bench, REAL, "run-real", settings)
    where = " on one GPU" if bench.num_devices == 1 else " on two GPUs"
    return Found(
        f"{found.rollouts_a_second:.1f} rollouts/s{where}, a version staged in "
        f"{found.stage_seconds:.3f} s with a pause of {found.pause_seconds:.4f} s, engine and "
        f"trainer {found.mismatch:.2g} nats apart"
    )


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The medians of a run's steps after its warm-up, but for the mean mismatch of all."""

    rollouts_a_second: float
    stage_seconds: float
    pause_seconds: float
    mismatch: float


def run_training(bench: Bench, size: BenchSize, name: str, settings: Sequence[str]) -> RunFigures:
    """A run of `STEPS` steps on the device. Waits for its end. Raises `Wrong` if it fails, with the
    end of what it has said.
    """
    folder = bench.scratch / name
    command = [sys.executable, "-m", "midflight", "train", str(_config(bench, size, name))]
    for setting in settings:
        command += ["--set", setting]
    environ = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    try:
        done = subprocess.run(
            guarded(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Wrong(f"it did not end within {RUN_SECONDS:.0f} s; look at {folder}/logs") from late
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-LAST_CHARACTERS:]
        raise Wrong(f"it ended with status {done.returncode}: {said}")
    steps = read_journal(folder / "metrics.jsonl").steps
    if len(steps) != STEPS:
        raise Wrong(f"it made {len(steps)} steps")
    return _figures(steps)


def _figures(steps: Sequence[StepLine]) -> RunFigures:
    counted = steps[WARM_UP:]
    seconds = counted[-1].seconds - steps[WARM_UP - 1].seconds
    apart: list[float] = []
    for step in steps:
        readings = step.trainer or {}
        found = next((readings[name] for name in MISMATCHES if name in readings), None)
        if found is not None:
            apart.append(found)
    if not apart:
        raise Wrong("no step says how far engine and trainer are apart")
    return RunFigures(
        rollouts_a_second=sum(step.rollouts for step in counted) / seconds,
        stage_seconds=median(step.stage_seconds or 0.0 for step in counted),
        pause_seconds=median(step.pause_seconds or 0.0 for step in counted),
        mismatch=mean(apart),
    )


def _config(bench: Bench, size: BenchSize, name: str) -> Path:
    """The configuration of a run on made-up sums, which the model need not solve."""
    tasks = bench.scratch / f"{name}.jsonl"
    rows = [json.dumps({"question": f"{n} + 1 =", "answer": n + 1}) for n in range(NUM_TASKS)]
    tasks.write_text("\n".join(rows) + "\n")
    shares = bench.is_cuda and bench.num_devices == 1
    path = bench.scratch / f"{name}.toml"
    path.write_text(
        CONFIG.format(
            name=f"{name}-{bench.segment()}",
            folder=json.dumps(str(bench.scratch / name)),
            steps=STEPS,
            model=json.dumps(str(bench.folder(size))),
            context=SMALL.context,
            tasks=json.dumps(str(tasks)),
            answer=SMALL.answer,
            groups=GROUPS,
            group=GROUP,
            device=bench.device.type,
            shares=str(shares).lower(),
        )
    )
    return path


CONFIG = """\
[run]
name = "{name}"
folder = {folder}
steps = {steps}
[model]
path = {model}
dtype = "float32"
max_context = {context}
[environment]
entry = "midflight.environments.single_turn:answer"
workers = 0
max_tokens = {answer}
[[environment.sources]]
path = {tasks}
prompt = "{{question}}"
answer = "answer"
[rollout]
groups_per_step = {groups}
group_size = {group}
[engine]
device = "{device}"
share_devices = {shares}
max_running = 16
[trainer]
device = "{device}"
"""
