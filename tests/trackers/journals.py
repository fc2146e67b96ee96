"""Journals of runs that never were, line by line."""

from __future__ import annotations

from pathlib import Path

import msgspec

from midflight.config.dump import as_toml
from midflight.config.load import load_config
from midflight.observe.learning import Histogram
from midflight.observe.lines import CompletionsLine, EvaluationLine, Line, ResumeLine, StepLine
from midflight.observe.status import Totals
from midflight.types import facts


def step(number: int, reward: float = 0.5) -> StepLine:
    """Step n made version n."""
    return StepLine(
        step=number,
        version=number,
        seconds=float(number),
        step_seconds=0.25,
        tokens=40,
        rollouts=8,
        reward=reward,
        histograms={"reward": Histogram((0.0, 0.5, 1.0), (6, 2))},
        staleness={0: 30, 2: 10},
        generation_rate=8.0,
        training_rate=6.0,
        trainer={"grad_norm": 0.7},
        totals=Totals(),
    )


def evaluation(number: int, reward: float, source: str = "spell") -> EvaluationLine:
    return EvaluationLine(version=number, step=number, seconds=float(number), source=source, num_tasks=8, mean_reward=reward)


def samples(number: int) -> CompletionsLine:
    shown = facts.Shown("spell", "7", 1.0, "spell | abc", "<b>cba</b>\nDone")
    return CompletionsLine(version=number, step=number, seconds=float(number), rollouts=(shown,))


def resumed(number: int, seconds: float) -> ResumeLine:
    return ResumeLine(version=number, step=number, seconds=seconds, totals=Totals())


def write(folder: Path, *lines: Line) -> None:
    """As a run writes it anew, in one piece."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "metrics.new"
    new.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    new.replace(folder / "metrics.jsonl")


def append(folder: Path, *lines: Line) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def configure(folder: Path, *trackers: str, name: str = "tried") -> None:
    """The folder of a run that has such trackers."""
    folder.mkdir(parents=True, exist_ok=True)
    quoted = ", ".join(f'"{tracker}"' for tracker in trackers)
    (folder / "config.toml").write_text(as_toml(load_config(None, [f"run.name={name}", f"observe.trackers=[{quoted}]"])))
