"""The lines that a command prints when it starts: its plan, and the places of its results."""

import os
from collections.abc import Iterator
from pathlib import Path

from midflight.config import derived
from midflight.config.agent import agent_of
from midflight.config.loss_text import effective_loss
from midflight.config.notes import notes
from midflight.config.sections import Config


def beginning(config: Config) -> str:
    """Returns the plan of a run, before it is known whether the machine and the user's code can
    carry it out.
    """
    return "\n".join(_beginning(config))


def training(config: Config, *, own_loss: str | None = None) -> str:
    """Returns the lines that `midflight train` prints once the machine and the user's code are
    checked.
    """
    return "\n".join([*_learning(config, own_loss), _where(config), *_notes(config)])


def rolling_out(config: Config) -> str:
    """Returns the lines that `midflight rollouts` prints after the checks. The loss and the weights
    are those of the user's trainer.
    """
    theirs = "trainer: yours, which draws batches and publishes weights at the address below"
    return "\n".join([theirs, _where(config), *_notes(config)])


def serving(config: Config, *, logs: bool = True) -> str:
    """Returns the line that `midflight serve` prints, and `midflight engine`, which writes no
    logs.
    """
    where = f"; logs: {config.run.folder / 'logs'}" if logs else ""
    return f"serving {_model(config)} with {_engines(config)}{where}"


def evaluating(config: Config) -> str:
    """Returns the line that `midflight evaluate` prints."""
    tasks = ", ".join(
        f"{source.num_heldout} of {source.origin}" for source in config.environment.sources
    )
    return (
        f"asking {_model(config)} with {_engines(config)} held-out tasks: {tasks}; logs: "
        f"{config.run.folder / 'logs'}"
    )


def loss_lines(config: Config, own_loss: str | None) -> tuple[str, ...]:
    """The loss with every default filled in."""
    return (*effective_loss(config), *(own_loss.splitlines() if own_loss else ()))


def warm_start(config: Config) -> str | None:
    """Returns the data and the end of a warm start, or None if there is no warm start."""
    section = config.warm_start
    if not section.is_made:
        return None
    on = "answers" if section.data is None else section.data
    until = f", until accuracy {section.target_accuracy:g}" if section.target_accuracy else ""
    return f"on {on}{until}, at most {section.max_steps} steps"


def remarks(config: Config) -> tuple[str, ...]:
    """Returns remarks on settings that may surprise the user."""
    found = [*notes(config)]
    cores = derived.core_note(config, os.cpu_count() or 1)
    if cores:
        found.append(cores)
    return tuple(found)


def _notes(config: Config) -> list[str]:
    return [f"note: {remark}" for remark in remarks(config)]


def _beginning(config: Config) -> Iterator[str]:
    rollout = config.rollout
    warm = warm_start(config)
    until = (
        f", or until the mean reward is {config.run.stop_at_reward:g}"
        if config.run.stop_at_reward
        else ""
    )
    yield (
        f"{config.run.name}: {config.run.steps} steps{until}, each on {rollout.groups_per_step} "
        f"groups of {rollout.group_size} rollouts"
    )
    before = f"; a supervised warm start comes first, {warm}" if warm else ""
    yield f"model: {_model(config)}{before}"
    tasks = "; ".join(source.described for source in config.environment.sources)
    yield f"tasks: {tasks}; agent {agent_of(config.environment)}"
    stale = derived.worst_staleness(rollout)
    age = (
        f"no trained token is older than {stale.worst} versions"
        if stale.worst
        else "every batch is sampled by the version that it trains"
    )
    yield (
        f"staleness: {age} ({rollout.stale_policy.value}); up to {derived.in_flight(config)} "
        f"rollouts go on at once, with {_engines(config)}"
    )


def _learning(config: Config, own_loss: str | None) -> Iterator[str]:
    first, *others = loss_lines(config, own_loss)
    yield first if first.startswith("loss") else f"loss: {first}"
    yield from (f"  {line}" for line in others)


def _where(config: Config) -> str:
    folder = config.run.folder
    return (
        f"folder: {folder}, with numbers in metrics.jsonl and what the parts print in "
        f"{folder / 'logs'}"
    )


def _engines(config: Config) -> str:
    engine = config.engine
    number = derived.num_engines(config.engine)
    each = f"{number} {engine.kind} engine{'s' if number > 1 else ''}"
    return f"{each} at {', '.join(engine.urls)}" if engine.urls else f"{each} on {engine.device}"


def _model(config: Config) -> str:
    origin = f"{Path(config.model.path)}" if config.model.path else "made here, with random weights"
    number = derived.model_sizes(config.model).num_parameters
    return f"{number:,} parameters in {config.model.dtype} ({origin})"
