"""The numbers of a run that fit a model and this machine, each with the reason. It is synchronous
and pure: the measurements are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from midflight.config import Config, load_config
from midflight.config.context import CONTEXT_STEP
from midflight.config.memory import memory_estimate, total_bytes
from midflight.config.model_defaults import ADAPTER_FACTOR, copying_rate, learning_rate, max_tokens
from midflight.errors import ConfigError
from midflight.models.sizes import ModelSizes
from midflight.observe.readable import duration, percent, size
from midflight.run.launcher.measurements import ModelMeasurements

MEMORY_SHARE = 0.7
"""The share of the machine's memory that the dry run's estimate may take. The rest is for
everything else that runs here.
"""
STEP_SECONDS = 60.0
"""A step that takes longer, by the measurements, gets fewer groups: a newcomer should see it
learn.
"""
GROUP_SIZE = 8
"""Answers to a task."""
RARE = 0.1
"""Below this share of right answers a group of eight mostly has none."""
RARE_GROUP_SIZE = 16
"""The number of answers to a task if right ones are rare."""
GROUPS = (16, 8, 4)
"""Groups of a step, the best number first."""
ANSWER_ROOM = 1.25
"""`environment.max_tokens` is this multiple of the longest answer that was seen."""
ANSWER_STEP = 8
"""`environment.max_tokens` is a multiple of this."""
LEAST_ANSWER = 16
"""`environment.max_tokens` is at least this."""
SLOTS = (64, 32, 16, 8)
"""`engine.max_running`, if memory decides, the best number first."""
MICRO_BATCHES = (2048, 1024, 512)
"""`trainer.micro_batch_tokens`, the best number first. More tokens at once make a CPU no faster."""
GROWS = 1.5
"""If four times the requests make this multiple of the tokens, still more requests would make
more.
"""
ENOUGH = 0.9
"""The share of the highest rate that is enough: fewer requests at once are answered sooner."""
RANK = 16
"""The rank of adapters, if memory requires them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One option with its value and the reason, as it is written into the file."""

    option: str
    value: Any
    why: str = ""


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """The machine that the configuration is written for."""

    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Fitting:
    """The model, the machine and the tasks that the numbers are chosen for."""

    model: Path
    """The model's path, as the configuration names it."""
    sizes: ModelSizes
    measured: ModelMeasurements
    machine: OwnMachine
    tasks: tuple[Choice, ...] = ()
    """The options of sources and rewards."""
    rank: int | None = None
    """The rank of adapters, if the user asked for them."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The numbers that were chosen."""

    choices: tuple[Choice, ...]
    config: Config
    """The configuration that `choices` make."""
    num_bytes: int
    """The most memory that the run takes, by the dry run's estimate."""
    step_seconds: float
    """The time of a step, estimated from the measurements."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The numbers that memory decides between."""

    groups: int
    slots: int
    micro: int
    rank: int | None


def fit(given: Fitting) -> Fit:
    """Returns the first sizes whose memory fits. It tries smaller micro-batches, then fewer slots,
    then adapters in place of whole weights. Raises `ConfigError` with the missing memory if none
    fits.
    """
    shapes = [*_sizes(given)]
    for shape in shapes:
        choices = tuple(_choices(given, shape))
        config = _config_of(choices)
        taken = total_bytes(memory_estimate(config, given.sizes))
        if taken <= MEMORY_SHARE * given.machine.memory_bytes:
            return Fit(choices, config, taken, _step_seconds(given, shape))
    smallest = _config_of(tuple(_choices(given, shapes[-1])))
    least = total_bytes(memory_estimate(smallest, given.sizes))
    raise ConfigError(
        f"the model in {str(given.model)!r} has {given.sizes.num_parameters:,} parameters: to "
        f"train even adapters of it would take {size(least)}, and this machine has "
        f"{size(given.machine.memory_bytes)}, of which {percent(MEMORY_SHARE)} are for a run; "
        "choose a smaller model, or a machine with more memory."
    )


def _sizes(given: Fitting) -> Iterator[_Sizes]:
    """All sizes that are tried, the best ones first."""
    slots = _slots(given.measured)
    fewer = [slots, *(number for number in SLOTS if number < slots)]
    ranks = [None, RANK] if given.rank is None else [given.rank]
    for rank in ranks:
        for number in fewer:
            for micro in MICRO_BATCHES:
                shape = _Sizes(GROUPS[-1], number, micro, rank)
                yield replace(shape, groups=_groups(given, shape))


# --- How large a step is --------------------------------------------------------------------------


def _slots(measured: ModelMeasurements) -> int:
    """Requests that an engine decodes together: as few as come near the highest rate that was
    measured, or more if it still grew.
    """
    rates = dict(measured.engine_rates)
    most = max(rates)
    enough = ENOUGH * max(rates.values())
    fewer = [width for width in sorted(rates) if width > 1 and rates[width] >= enough]
    before = max(width for width in rates if width < most)
    if fewer[:1] == [most] and rates[most] >= GROWS * rates[before]:
        return 2 * most
    return fewer[0] if fewer else most


def _group_size(measured: ModelMeasurements) -> int:
    return RARE_GROUP_SIZE if measured.num_right < RARE * measured.num_answers else GROUP_SIZE


def _groups(given: Fitting, shape: _Sizes) -> int:
    for number in GROUPS:
        if _step_seconds(given, replace(shape, groups=number)) <= STEP_SECONDS:
            return number
    return GROUPS[-1]


def _work(given: Fitting, shape: _Sizes) -> tuple[float, float]:
    """Seconds of a step's generation and of its training, each with as many threads as were
    measured.
    """
    measured = given.measured
    rollouts = shape.groups * _group_size(measured)
    width = max((width for width, _ in measured.engine_rates if width <= shape.slots), default=1)
    generating = rollouts * measured.mean_answer / dict(measured.engine_rates)[width]
    # The rows of a group share their prompt, which is computed once.
    trained = rollouts * measured.mean_answer + shape.groups * measured.prompt_length
    return generating, trained / measured.trainer_rate


def _threads(given: Fitting, shape: _Sizes) -> tuple[int, int]:
    """Returns the threads of the engine and of the trainer. They share all cores by their work."""
    generating, training = _work(given, shape)
    cores = given.machine.cores
    engine = min(max(1, round(cores * generating / (generating + training))), max(1, cores - 1))
    return engine, max(1, cores - engine)


def _step_seconds(given: Fitting, shape: _Sizes) -> float:
    """The time of a step. Both sides work at once, so that the slower one counts. Twice the threads
    are taken to be twice as fast.
    """
    generating, training = _work(given, shape)
    engine, trainer = _threads(given, shape)
    threads = given.measured.threads
    return max(generating * threads / engine, training * threads / trainer)


# --- How long an answer is ------------------------------------------------------------------------


def _answer_tokens(measured: ModelMeasurements, most: int) -> int:
    """Returns a number of tokens that is enough for nearly all answers, within the room that the
    prompt leaves in the model's context.
    """
    room = measured.answer_room
    if room is None:
        wanted = max(measured.most_tokens, max_tokens(most))
    else:
        wanted = max(LEAST_ANSWER, ANSWER_STEP * math.ceil(ANSWER_ROOM * room / ANSWER_STEP))
    return max(1, min(wanted, most - measured.longest_prompt - 1))


def _context(measured: ModelMeasurements, answer: int, most: int) -> int:
    """Returns the tokens of the context: twice the measured length, so that a second turn and
    longer prompts have room.
    """
    wanted = 2 * (measured.longest_prompt + answer)
    return min(most, CONTEXT_STEP * math.ceil(wanted / CONTEXT_STEP))


# --- The options ----------------------------------------------------------------------------------


def _choices(given: Fitting, shape: _Sizes) -> Iterator[Choice]:
    measured = given.measured
    most = given.sizes.max_context or 4096
    answer = _answer_tokens(measured, most)
    context = _context(measured, answer, most)
    yield Choice("run.name", "mine")
    yield Choice("run.folder", "runs/mine")
    yield Choice(
        "run.steps",
        100,
        f"By what was measured a step takes about {duration(_step_seconds(given, shape))}, all of "
        f"them {duration(100 * _step_seconds(given, shape))}. Ctrl-C ends a run in order, and "
        "--resume goes on with it.",
    )
    yield Choice(
        "model.path",
        str(given.model),
        f"{given.sizes.num_parameters:,} parameters, trained before.",
    )
    yield Choice(
        "model.max_context",
        context,
        "Prompt plus answer, in tokens. The longest prompt that was looked at has "
        f"{measured.longest_prompt}; twice that and an answer, so that a second turn has room. "
        f"Every slot of an engine takes memory for it. The model can {most:,}.",
    )
    yield from given.tasks
    yield Choice("environment.max_tokens", answer, _why_answer(measured))
    yield from _step_choices(given, shape)
    yield from _engine_choices(given, shape)
    yield from _trainer_choices(given, shape)
    yield from _start_choices(given)


def _why_answer(measured: ModelMeasurements) -> str:
    total = measured.num_answers
    if measured.answer_room is None:
        return (
            f"Tokens of an answer. Of {total} that were tried {measured.num_cut} had not ended "
            f"after {measured.most_tokens}: watch the alarm answers_cut, and raise this or ask for "
            "shorter answers in the prompt."
        )
    cut = ""
    if measured.num_cut:
        cut = f", {measured.num_cut} had not ended after {measured.most_tokens}"
    return (
        f"Tokens of an answer. Of {total} that were tried the longest that ended had "
        f"{max(measured.ended)}{cut}; a quarter more than that. Where many are cut short, the run "
        "says so (answers_cut)."
    )


def _step_choices(given: Fitting, shape: _Sizes) -> Iterator[Choice]:
    measured = given.measured
    number = _group_size(measured)
    share = measured.num_right / measured.num_answers
    differ = 1 - share**number - (1 - share) ** number
    yield Choice(
        "rollout.groups_per_step",
        shape.groups,
        "Tasks of one step, each answered group_size times. More are steadier, and take longer: "
        f"of {GROUPS[0]}, {GROUPS[1]} and {GROUPS[2]} the most that keep a step within "
        f"{STEP_SECONDS:.0f} s here, or the least.",
    )
    seen = f"{measured.num_right} of {measured.num_answers} answers were right ({measured.reward})"
    yield Choice(
        "rollout.group_size",
        number,
        f"Answers to a task that are compared with each other. {seen}: if all tasks were alike, "
        f"{percent(differ)} of the groups would have answers that differ. The others teach "
        "nothing; where most are alike, the run says so (groups_alike).",
    )


def _engine_choices(given: Fitting, shape: _Sizes) -> Iterator[Choice]:
    rates = ", ".join(
        f"{rate:.0f} tokens/s for {width}" for width, rate in given.measured.engine_rates
    )
    engine, _ = _threads(given, shape)
    yield Choice(
        "engine.max_running", shape.slots, f"Requests decoded together. Measured: {rates} at once."
    )
    yield Choice(
        "engine.threads",
        engine,
        f"Of {given.machine.cores} cores. Engine and trainer share them by what each has to do "
        "in a step.",
    )


def _trainer_choices(given: Fitting, shape: _Sizes) -> Iterator[Choice]:
    number = given.sizes.num_parameters
    whole = learning_rate(number)
    _, trainer = _threads(given, shape)
    yield Choice("trainer.threads", trainer)
    if shape.rank is None:
        why = (
            f"For {number:,} parameters, all trained: 2e-5 is known to work at 135 million, and "
            "the usual 1e-6 at 7 billion (TRL, verl)."
        )
    else:
        why = (
            f"For adapters: {ADAPTER_FACTOR} times the {whole:g} of whole weights with {number:,} "
            "parameters (Schulman et al., LoRA Without Regret, 2025)."
        )
    yield Choice(
        "trainer.learning_rate",
        learning_rate(number, adapters=shape.rank is not None),
        f"{why} Larger learns faster, until the model forgets what it could: the run says so in "
        "its first steps (step_size).",
    )
    yield Choice(
        "trainer.micro_batch_tokens",
        shape.micro,
        "Tokens of one forward and backward; micro-batches add up to a step. With it the dry "
        f"run's estimate is at most {percent(MEMORY_SHARE)} of {size(given.machine.memory_bytes)}. "
        f"Measured: {given.measured.trainer_rate:.0f} tokens/s.",
    )
    if shape.rank is not None:
        asked = "as asked"
        if given.rank is None:
            asked = (
                "whole weights with their gradients and moments would not fit this machine's memory"
            )
        yield Choice("lora.rank", shape.rank, f"Adapters in place of all weights: {asked}.")


def _start_choices(given: Fitting) -> Iterator[Choice]:
    measured = given.measured
    if measured.ends:
        return
    why = "its chat template does not close an answer with a token that ends one"
    if measured.closes:
        why = f"{measured.num_cut} of {measured.num_answers} answers did not end"
    yield Choice(
        "warm_start.target_accuracy",
        0.3,
        f"The model first learns what an answer looks like, because {why}.",
    )
    yield Choice("warm_start.evaluate_every", 5)
    yield Choice(
        "warm_start.learning_rate",
        copying_rate(given.sizes.num_parameters, 2e-3),
        "Ten times that of reinforcement learning: given answers say more than rewards.",
    )


def _config_of(choices: tuple[Choice, ...]) -> Config:
    table: dict[str, dict[str, Any]] = {}
    for choice in choices:
        section, _, key = choice.option.partition(".")
        table.setdefault(section, {})[key] = choice.value
    return load_config(None, table=table)
