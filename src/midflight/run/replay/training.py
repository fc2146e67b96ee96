"""`midflight train CONFIG --rollouts-from RUN`: the steps of a new run on the rollouts that another
run recorded. Nothing is generated, so that two losses can be compared on the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from midflight.archive.runs import open_run
from midflight.config.dump import as_toml
from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.errors import ConfigError, NoRun
from midflight.models.export import export_model
from midflight.models.load import load_frame, load_model
from midflight.models.names import named_tensors
from midflight.observe.journal import Journal
from midflight.observe.lines import StepLine
from midflight.observe.run_state import RunState
from midflight.run.replay.ranks import train_in_ranks
from midflight.run.replay.recorded_steps import StoredBatches, lines_of
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.model.probe import proven_layout, shared_layout
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import Ranks, own_device
from midflight.trainer.report import StepReport
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types.facts import Stepped


def train_on_rollouts(
    config: Config, source: Path, *, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Makes as many steps as `run.steps` asks for, or as the source has. Returns the folder of the
    new model. The trainer begins with `model.path`, or with the model that the source began with.
    """
    open_run(source)
    if not _steps_to_make(config, source):
        raise NoRun(f"{source} has no step with tokens to train on; give a run that has trained.")
    _check(config, past_config(source / "config.toml"), source)
    if config.trainer.ranks == 1:
        train_rank(config, source, say=say)
    else:
        train_in_ranks(config, source)
    return Path(config.run.folder) / "model"


def _steps_to_make(config: Config, source: Path) -> list[StepLine]:
    lines = [line for line in lines_of(source).values() if line.tokens]
    return lines[: config.run.steps]


def train_rank(config: Config, source: Path, *, say: Callable[[str], None]) -> None:
    """Makes the steps, and exports the model. All ranks read the batches, and the first one writes."""
    disable_progress_bar()
    recorded = past_config(source / "config.toml")
    torch.set_num_threads(config.trainer.threads)
    begins_with = Path(config.model.path or source / "start")
    trainer = _trainer(config, begins_with, max_context=recorded.model.max_context)
    batch_of = StoredBatches(source, recorded)
    folder = Path(config.run.folder)
    state = RunState(name=config.run.name, steps=config.run.steps)
    journal: Journal | None = None
    if trainer.ranks.is_first:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.umask(0o077)  # it has what the conversations of the run taught
        (folder / "config.toml").write_text(as_toml(config))
        journal = Journal(folder / "metrics.jsonl", state)
    try:
        for line in _steps_to_make(config, source):
            trainer.version = line.version - 1
            started = time.monotonic()
            report = trainer.step(batch_of(line))
            if journal is not None:
                step = _fact(report, line.step, started)
                state.apply(step)
                journal.apply(step)
                say(_words(trainer, report))
    finally:
        if journal is not None:
            journal.close()
    _export(config, trainer, begins_with, folder / "model")


def _trainer(config: Config, begins_with: Path, *, max_context: int) -> PolicyTrainer:
    """The trainer of this rank. With several the first one alone loads the weights."""
    ranks = Ranks.joined()
    device = own_device(config.trainer.device)
    layout: Layout | None = None
    if ranks.is_first:
        at = str(device) if ranks.size == 1 else "cpu"
        model = load_model(begins_with, dtype=config.model.dtype, device=at)
        layout, _ = proven_layout(model, max_context=max_context)
    else:
        model = load_frame(begins_with, dtype=config.model.dtype)
    return trainer_of(config, model, layout=shared_layout(layout), ranks=ranks, device=device)


def _export(config: Config, trainer: PolicyTrainer, begins_with: Path, into: Path) -> None:
    """Exports the model. Ranks that share it put it together in a copy that the first one has."""
    model = trainer.model
    if trainer.ranks.size > 1:
        whole: dict[str, Tensor] = {}
        if trainer.ranks.is_first:
            model = load_model(begins_with, dtype=config.model.dtype, device="cpu")
            whole = named_tensors(model)
        collect(named_tensors(trainer.model), whole, trainer.ranks)
    if trainer.ranks.is_first:
        export_model(model, begins_with, into)


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
    ranks = f" on {trainer.ranks.size} ranks" if trainer.ranks.size > 1 else ""
    return (
        f"step {trainer.num_steps}: loss {report.loss:.5f}, gradient {norm:.4f}, "
        f"{report.num_tokens} tokens{ranks}"
    )
