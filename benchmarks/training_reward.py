"""Part `reward` of `training.py`: how long `midflight train` and trl take to the same mean reward,
from the same model.

Four races: `short` is the demo's task and model, with six tokens an answer; `larger` the same with
3.2 M parameters; `vocabulary` with 32 000 rows of embeddings besides (trl takes a quarter of an
hour); `long` begins with sentences and is to write one letter, up to 150 tokens of it. Tasks,
groups, batch, learning rate, clips, sampling and seeds (one for each round) are the same for both
sides. Ours is asynchronous, with one version of lead, and uses two cores by its processes; trl's
loop generates with `transformers`, then trains, with the threads of `--trl-threads`. The clock
begins when model and libraries are loaded (the first rollouts start) and stops when the mean reward
over 20 steps reaches the target. Memory is the sum over processes, each at its peak, where pages
that several of them map (libraries, mostly) count once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_both import apart, held_mib

from midflight.config import load_config
from midflight.config.sections import Config
from midflight.run.parts import Message, ModelReady, Progress, Purpose, Ready
from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer

HERE = Path(__file__).parent
WINDOW = 20
"""Steps, as in `run.stop_at_reward`."""


@dataclass(frozen=True)
class Race:
    """A task, the supervised warm start that makes the model of both sides, and the mean reward to
    reach from there.
    """

    config: Path
    warm_start: tuple[str, ...]
    hidden_size: int = 128
    """Of four layers, the feed-forward parts three times as wide."""
    vocab_size: int = VOCAB_SIZE
    """Beyond the tokenizer's 262 tokens lie rows that are never right, as in models with a padded
    vocabulary.
    """
    target: float = 0.6
    steps: int = 400
    """At most."""
    more: tuple[str, ...] = ()
    """Other settings."""


_SPELLING = ("target_accuracy=0.42", "evaluate_every=5")
RACES = {
    "short": Race(HERE / "training_reward.toml", _SPELLING),
    "larger": Race(HERE / "training_reward.toml", _SPELLING, hidden_size=256),
    "vocabulary": Race(
        HERE / "training_reward.toml", _SPELLING, hidden_size=256, vocab_size=32_000
    ),
    "smoke": Race(
        HERE / "training_reward.toml",
        ("target_accuracy=0.99", "max_steps=2", "evaluate_every=50"),
        hidden_size=32,
        steps=2,
        more=(
            "environment.sources.0.heldout=4",
            "rollout.groups_per_step=2",
            "rollout.group_size=2",
        ),
    ),
    # It learns what sentences look like; the reward asks for something else.
    "long": Race(
        HERE / "training_reward_long.toml",
        ("target_accuracy=0.99", "max_steps=40", "evaluate_every=50"),
    ),
}


def compare(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Both sides in turn, `options.reward_rounds` times. Each row holds what every side found in
    that round.
    """
    race = RACES[name]
    folder = options.folder / name
    model = _model(folder, race)
    plan = folder / "plan"
    every = {
        "midflight": [sys.executable, HERE / "training_reward.py", plan, folder / "midflight.json"],
        "trl": [options.trl_python, HERE / "training_trl.py", "reward", plan, folder / "trl.json"],
    }
    commands = {side: every[side] for side in options.sides}
    rounds: list[dict[str, Any]] = []
    for seed in range(options.reward_rounds):
        _write_plan(name, _config(race, folder / "ours", model, seed=seed), plan, model)
        rounds.append({})
        for side, command in commands.items():
            # Ours sets the threads of its processes by its configuration: one each.
            surroundings = os.environ | {
                "OMP_NUM_THREADS": str(options.trl_threads if side == "trl" else 1)
            }
            done = subprocess.run(
                [str(part) for part in command], capture_output=True, text=True, env=surroundings
            )
            if done.returncode:
                raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-3000:]}")
            rounds[-1][side] = json.loads((folder / f"{side}.json").read_text())
    return rounds


def table(name: str, rounds: list[dict[str, Any]]) -> str:
    lines = [
        (
            f"| {name}: to a mean reward of {RACES[name].target} | seconds (spread) | steps | "
            "s/step | CPU s/step | memory |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for side in rounds[0]:
        found = [row[side] for row in rounds]
        seconds = [run["seconds"] for run in found]
        steps = statistics.median(run["steps"] for run in found)
        pace, cpu = (
            statistics.median(run[key] / run["steps"] for run in found)
            for key in ("seconds", "cpu")
        )
        lines.append(
            f"| {side} | {statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f}) "
            f"| {steps:g} | {pace:.2f} | {cpu:.2f} | {max(run['peak_mib'] for run in found):,.0f} "
            "MiB |"
        )
    ratios = [
        row["trl"]["seconds"] / row["midflight"]["seconds"] for row in rounds if len(row) == 2
    ]
    reached = all(run["reached"] for row in rounds for run in row.values())
    words = [f"{statistics.median(ratios):.1f} times as fast"] if ratios else []
    return "\n" + "\n".join(
        [*lines, "", "; ".join(words if reached else [*words, "NOT ALL RUNS REACHED IT"])]
    )


# --- What both start from -------------------------------------------------------------------------


def _config(race: Race, folder: Path, model: Path, *, seed: int) -> Config:
    options = [
        f"run.folder={folder}",
        f"run.seed={seed}",
        f"run.stop_at_reward={race.target}",
        f"run.steps={race.steps}",
        f"model.path={model}",
        *race.more,
    ]
    return load_config(race.config, options)


def _model(folder: Path, race: Race) -> Path:
    """Made once: random weights, then the warm start."""
    start = folder / "first" / "start"
    if not (start / "config.json").exists():
        apart(_make, race, folder / "random")
        warm = [
            *(f"warm_start.{option}" for option in race.warm_start),
            f"model.path={folder / 'random'}",
            "run.steps=1",
            *race.more,
        ]
        command = [
            sys.executable,
            "-m",
            "midflight",
            "train",
            race.config,
            "--folder",
            folder / "first",
            "--overwrite",
        ]
        subprocess.run(
            [
                str(part)
                for part in [*command, *(word for option in warm for word in ("--set", option))]
            ],
            check=True,
        )
    return start


def _make(race: Race, folder: Path) -> None:
    from midflight.models.creation import make_model
    from midflight.models.load import save_model

    write_byte_tokenizer(folder)
    made = make_model(
        vocab_size=race.vocab_size,
        hidden_size=race.hidden_size,
        intermediate_size=3 * race.hidden_size,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_context=384,
        seed=0,
        dtype="float32",
    )
    save_model(made, folder)


def _write_plan(race: str, config: Config, plan: Path, model: Path) -> None:
    """For the side that has no Midflight: tasks and numbers."""
    from midflight.environments.sources import load_sources

    tasks = load_sources(config.environment.sources, seed=config.run.seed)[0].training
    plan.mkdir(parents=True, exist_ok=True)
    (plan / "config.json").write_text(config.model_dump_json())
    (plan / "tasks.json").write_text(
        json.dumps([[task.data["question"], task.data["answer"]] for task in tasks])
    )
    numbers = {
        "model": str(model),
        "groups": config.rollout.groups_per_step,
        "group_size": config.rollout.group_size,
        "max_tokens": config.environment.max_tokens,
        "learning_rate": config.trainer.learning_rate,
        "warmup_steps": config.trainer.warmup_steps,
        "race": race,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "target": config.run.stop_at_reward,
        "window": WINDOW,
    }
    (plan / "numbers.json").write_text(json.dumps(numbers))


# --- Our side, in a process of its own ------------------------------------------------------------


class Watch:
    """Hears the ring: when it began to serve, the reward of each step, and the peaks of its
    processes.
    """

    def __init__(self, config: Config) -> None:
        from midflight.run.launcher.ring import Ring

        self.ring = Ring(config, on_message=self.hear, control_token=secrets.token_urlsafe())
        self.serving = 0.0
        self.ended = 0.0
        self._peaks: dict[str, float] = {}
        self._cpu: dict[str, float] = {}
        self._cpu_before = 0.0

    def hear(self, message: Message) -> None:
        if isinstance(message, Ready) and message.url is not None and not self.serving:
            self._look()
            self._cpu_before = sum(self._cpu.values())
            self.serving = time.monotonic()
        if isinstance(message, Progress | ModelReady):
            self._look()
            self.ended = time.monotonic()

    def _look(self) -> None:
        from overlap_runs import cpu_seconds

        for child in self.ring.children.newest.values():
            if child.running and child.pid is not None:
                with suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                    self._peaks[child.name] = max(
                        held_mib(child.pid), self._peaks.get(child.name, 0.0)
                    )
                    self._cpu[child.name] = cpu_seconds(child.pid)

    def found(self, rewards: list[float], *, steps: int) -> dict[str, Any]:
        """`steps` is how many there would have been without reaching the target."""
        return {
            "seconds": self.ended - self.serving,
            "steps": len(rewards),
            "cpu": sum(self._cpu.values()) - self._cpu_before,
            "peak_mib": sum(self._peaks.values()) + held_mib(),
            "peaks": self._peaks | {"launcher": held_mib()},
            "reached": len(rewards) < steps,
            "rewards": rewards,
        }


def main(plan: Path, out: Path) -> None:
    from overlap_runs import fresh

    from midflight.observe.history import read_journal

    config = Config.model_validate_json((plan / "config.json").read_text())
    fresh(config)
    watch = Watch(config)
    asyncio.run(watch.ring.run(Purpose.TRAIN))
    steps = read_journal(config.run.folder / "metrics.jsonl").steps
    out.write_text(
        json.dumps(
            watch.found(
                [(step.trainer or {}).get("reward/mean") or 0.0 for step in steps],
                steps=config.run.steps,
            )
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
