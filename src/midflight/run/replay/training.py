"""`midflight train CONFIG --rollouts-from RUN`: the steps of a new run on the rollouts that another
run recorded. Nothing is generated, so that two losses can be compared on the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from midflight.archive.runs import open_run
from midflight.config.dump import as_toml
from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.errors import ConfigError, NoRun
from midflight.models.export import export_model
from midflight.models.load import load_model
from midflight.observe.journal import Journal
from midflight.observe.run_state import RunState
from midflight.run.replay.recorded_steps import StoredBatches, lines_of
from midflight.trainer.model.probe import proven_layout
from midflight.trainer.report import StepReport
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types.facts import Stepped


def train_on_rollouts(
    config: Config, source: Path, *, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Makes as many steps as `run.steps` asks for, or as the source has. Returns the folder of the
    new model. The trainer begins with `model.path`, or with the model that the source began with.
    """
    disable_progress_bar()
    open_run(source)
    recorded = past_config(source / "config.toml")
    lines = [line for line in lines_of(source).values() if line.tokens]
    if not lines:
        raise NoRun(f"{source} has no step with tokens to train on; give a run that has trained.")
    _check(config, recorded, source)
    begins_with = config.model.path or source / "start"
    torch.set_num_threads(config.trainer.threads)
    model = load_model(begins_with, dtype=config.model.dtype, device=config.trainer.device)
    layout, _ = proven_layout(model, max_context=recorded.model.max_context)
    trainer = trainer_of(config, model, layout=layout)
    folder = Path(config.run.folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.umask(0o077)  # it has what the conversations of the run taught
    (folder / "config.toml").write_text(as_toml(config))
    state = RunState(name=config.run.name, steps=config.run.steps)
    journal = Journal(folder / "metrics.jsonl", state)
    batch_of = StoredBatches(source, recorded)
    try:
        for line in lines[: config.run.steps]:
            trainer.version = line.version - 1
            started = time.monotonic()
            report = trainer.step(batch_of(line))
            step = _fact(report, line.step, started)
            state.apply(step)
            journal.apply(step)
            say(_words(trainer, report))
    finally:
        journal.close()
    export_model(model, begins_with, folder / "model")
    return folder / "model"


def _check(config: Config, recorded: Config, source: Path) -> None:
    """Refuses what other tokens would be needed for."""
    if config.lora.rank is not None:
        raise ConfigError(
            "lora.rank is set, and --rollouts-from trains all weights; remove it, or train adapters "
            "in a run of its own."
        )
    if config.distillation.teacher is not None:
        raise ConfigError(
            "distillation.teacher is set, and a teacher needs an engine; remove it to train on the "
            f"rollouts of {source}."
        )
    if config.rollout.max_staleness < recorded.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness is {config.rollout.max_staleness}, and {source} recorded tokens "
            f"of up to {recorded.rollout.max_staleness} versions of age; set it to that."
        )
    folder = Path(config.run.folder)
    if folder.resolve() == source.resolve():
        raise ConfigError(f"run.folder is the run that is read, {source}; choose another one.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is there already, and is not empty; choose another run.folder, or remove it."
        )


def _fact(report: StepReport, lease: int, started: float) -> Stepped:
    return Stepped(
        lease,
        report.version,
        started,
        time.monotonic(),
        report.num_tokens,
        dict(report.metrics),
        report.skipped is not None,
        report.alarms,
    )


def _words(trainer: PolicyTrainer, report: StepReport) -> str:
    norm = report.metrics.get("grad_norm", float("nan"))
    return (
        f"step {trainer.num_steps}: loss {report.loss:.5f}, gradient {norm:.4f}, "
        f"{report.num_tokens} tokens"
    )
