"""`midflight replay RUN --step N`: a step again, from the checkpoint before it and the batches that
the store has, and how far it comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.errors import ConfigError, NoRun
from midflight.models.load import load_model
from midflight.observe.lines import StepLine
from midflight.run.replay.fingerprints import served_fingerprint
from midflight.run.replay.recorded_steps import RecordedBatches, line_of, lines_of
from midflight.trainer.checkpoint import load_checkpoint
from midflight.trainer.folders import CheckpointState, checkpoints, state_of
from midflight.trainer.model.determinism import compute_in_one_order
from midflight.trainer.model.probe import proven_layout
from midflight.trainer.report import StepReport
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.trainer.watch import StepWatch
from midflight.types import PackedBatch
from midflight.types.digests import batch_digest

TOLERANCE = 1e-4
"""The relative difference of loss and gradient that rounding in another order may make."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A value of a step, as it was recorded and as it is now."""

    what: str
    recorded: str
    replayed: str
    verdict: str
    """`equal`, `close` (within `TOLERANCE`), `differs`, or `not recorded`."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedStep:
    """A step that was made again."""

    line: StepLine
    batch: PackedBatch
    report: StepReport
    watch: StepWatch
    comparisons: tuple[Comparison, ...]

    @property
    def holds(self) -> bool:
        return all(one.verdict != "differs" for one in self.comparisons)


def replay_step(
    folder: Path,
    step: int,
    batches: Callable[[Path, Config], RecordedBatches],
    *,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> ReplayedStep:
    """Makes a step again. It needs a checkpoint of a step before it, and makes the steps between
    too. Raises `NoRun` if something of it is gone.
    """
    disable_progress_bar()
    stored = past_config(folder / "config.toml")
    section = stored.trainer.model_copy(update={"device": device})
    config = stored.model_copy(update={"trainer": section})
    torch.set_num_threads(config.trainer.threads)  # another number adds in another order
    if config.trainer.deterministic:
        compute_in_one_order()
    if config.distillation.teacher is not None:
        raise ConfigError(
            f"{folder} was trained with a teacher, whose log-probabilities are not stored, so that "
            "its steps cannot be made again."
        )
    line = line_of(folder, step)
    checkpoint, state = checkpoint_before(folder, step)
    lines = lines_of(folder)
    missing = [number for number in range(state.num_steps + 1, step) if number not in lines]
    if missing:
        raise NoRun(f"the journal of {folder} has no line of step {missing[0]}.")
    between = [lines[number] for number in range(state.num_steps + 1, step)]
    trainer = _trainer(folder, config)
    first = between[0] if between else line
    load_checkpoint(checkpoint, trainer, as_version=first.version - 1)
    batch_of = batches(folder, config)
    for earlier in between:
        say(f"makes step {earlier.step}, to come to step {step}")
        _stepped(trainer, earlier, batch_of(earlier))
    batch = batch_of(line)
    watch = trainer.watch()
    say(f"makes step {step}")
    report = _stepped(trainer, line, batch)
    return ReplayedStep(
        line, batch, report, watch, tuple(_compared(line, batch, report, trainer, config))
    )


def checkpoint_before(folder: Path, step: int) -> tuple[Path, CheckpointState]:
    """The newest checkpoint that has no more steps than those before this one. Raises `NoRun` if
    there is none.
    """
    found: list[tuple[Path, CheckpointState]] = []
    for path in checkpoints(folder / "checkpoints"):
        state = state_of(path)
        if state.num_steps < step:
            found.append((path, state))
    if not found:
        raise NoRun(
            f"{folder} has no checkpoint from before step {step}: it keeps the newest. Replay a later "
            "step, or raise trainer.keep_checkpoints for the next run."
        )
    return max(found, key=lambda pair: pair[1].num_steps)


def _trainer(folder: Path, config: Config) -> PolicyTrainer:
    if not (folder / "start").is_dir():
        raise NoRun(
            f"{folder} has no model to begin with ({folder / 'start'} is gone); put it back."
        )
    model = load_model(folder / "start", dtype=config.model.dtype, device=config.trainer.device)
    reference = None
    if config.objective.kl_coefficient:
        reference = load_model(
            folder / "reference", dtype=config.model.dtype, device=config.trainer.device
        )
    found, _ = proven_layout(model, max_context=config.model.max_context)
    return trainer_of(config, model, layout=found, reference=reference)


def _stepped(trainer: PolicyTrainer, line: StepLine, batch: PackedBatch) -> StepReport:
    """Makes a step under the number that it had."""
    trainer.version = line.version - 1
    return trainer.step(batch)


def _compared(
    line: StepLine,
    batch: PackedBatch,
    report: StepReport,
    trainer: PolicyTrainer,
    config: Config,
) -> Sequence[Comparison]:
    recorded = line.trainer or {}
    found = [
        _close("loss", recorded.get("loss"), report.metrics.get("loss")),
        _close("gradient norm", recorded.get("grad_norm"), report.metrics.get("grad_norm")),
        _close(
            "tokens in the loss",
            recorded.get("tokens/trained"),
            report.metrics.get("tokens/trained"),
        ),
    ]
    digests = line.digests
    found.append(
        _equal("digest of the batch", digests and digests.batch, batch_digest(batch).hex())
    )
    weights = served_fingerprint(trainer.model, config)
    kept = digests.weights_after if digests is not None else None
    same = _equal("weights after it", kept or None, weights)
    if same.verdict == "differs" and all(one.verdict != "differs" for one in found):
        # rounding in another order moves the last bits of weights, which a digest shows and a
        # norm does not
        same = Comparison(same.what, same.recorded, same.replayed, "close")
    found.append(same)
    return found


def _close(what: str, recorded: float | None, replayed: float | None) -> Comparison:
    if recorded is None or replayed is None:
        return Comparison(what, _number(recorded), _number(replayed), "not recorded")
    if recorded == replayed:
        verdict = "equal"
    elif math.isclose(recorded, replayed, rel_tol=TOLERANCE, abs_tol=1e-7):
        verdict = "close"
    else:
        verdict = "differs"
    return Comparison(what, _number(recorded), _number(replayed), verdict)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _equal(what: str, recorded: str | None, replayed: str) -> Comparison:
    if not recorded:
        return Comparison(what, "none", replayed[:16], "not recorded")
    verdict = "equal" if recorded == replayed else "differs"
    return Comparison(what, recorded[:16], replayed[:16], verdict)
