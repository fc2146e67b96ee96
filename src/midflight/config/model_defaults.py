"""Defaults of options that follow from the model, if it comes from a folder (`model.path`).

The defaults that the sections state are for small models which are made with random weights. A
model that was trained before gives longer answers, is spoilt by steps as large as those, and takes
memory of another order.

| option | follows from |
|---|---|
| `model.max_context` | the model's own limit, and memory (`context.default_context`) |
| `environment.max_tokens` | the context |
| `trainer.learning_rate` | the number of parameters, and whether adapters are trained |
| `warm_start.learning_rate`, `critic.learning_rate` | `trainer.learning_rate` as it would be by itself |
| `trainer.micro_batch_tokens` | memory |
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from midflight.config.context import default_context
from midflight.config.derived import machine_bytes, model_sizes
from midflight.config.environment import EnvironmentSection
from midflight.config.loss import CriticSection
from midflight.config.memory import activation_bytes
from midflight.config.section import Section
from midflight.config.sections import Config
from midflight.config.trainer import TrainerSection, WarmStartSection
from midflight.errors import ModelNotFound
from midflight.models.adapters import adapter_of
from midflight.models.sizes import ModelSizes, sizes_of

ANSWER_SHARE = 4
"""An answer may have one part in four of the context: the rest is for prompts, and for further
turns.
"""
MOST_ANSWER = 256
"""Tokens of an answer by default, as in TRL (`max_completion_length`). Long reasoning asks for
more.
"""
KNOWN_PARAMETERS = 135e6
"""Parameters of SmolLM2-135M-Instruct."""
KNOWN_RATE = 2e-5
"""The step size with which that model learns sums in thirty steps. With 3e-4 it forgets its skills
in three.
"""
RATE_FALLS = 0.75
"""Power by which the step falls with the number of parameters. It gives the usual sizes at both
ends: 3e-4 for the 3 million of a model made here, and 1e-6 for 7 billion, as in TRL's and verl's
GRPO.
"""
LEAST_RATE = 1e-6
ADAPTER_FACTOR = 10
"""Adapters take steps ten times as large as whole weights (Schulman et al., LoRA Without Regret,
2025).
"""
COPYING_FACTOR = 10
"""Steps that learn from given answers, or values, are larger by this factor, because their gradient
is far less noisy: 2e-4 at 135 million, 1e-5 at 7 billion.
"""
MICRO_STEP = 256
"""The tokens of a micro-batch that memory bounds are a multiple of this."""
LEAST_MICRO = 512
"""A micro-batch has at least this many tokens, because smaller ones leave processors idle."""
GPU_MICRO = 4096
"""The tokens of a micro-batch on a GPU, which more tokens keep busy."""
ACTIVATIONS_SHARE = 8
"""The activations of a micro-batch may take one part in eight of the memory."""


@dataclass(frozen=True, slots=True)
class DerivedDefault:
    """An option that follows from the model, with the reason."""

    option: str
    value: float
    why: str

    @property
    def words(self) -> str:
        """The value as people write it."""
        return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:g}"


def learning_rate(num_parameters: int, *, adapters: bool = False) -> float:
    """Peak step size of AdamW in reinforcement learning, one digit:

    KNOWN_RATE * (KNOWN_PARAMETERS / num_parameters) ** RATE_FALLS, at least LEAST_RATE and at most
    the rate of a made model; for adapters ten times that.
    """
    rate = KNOWN_RATE * (KNOWN_PARAMETERS / max(1, num_parameters)) ** RATE_FALLS
    whole = _one_digit(min(TrainerSection().learning_rate, max(LEAST_RATE, rate)))
    return _one_digit(ADAPTER_FACTOR * whole) if adapters else whole


def usual_rate(config: Config) -> float:
    """The rate that `learning_rate` gives for the model of a run, made or loaded."""
    try:
        sizes = model_sizes(config.model)
    except ModelNotFound:  # said where the model is looked for
        return TrainerSection().learning_rate
    return learning_rate(sizes.num_parameters, adapters=_trains_adapters(config))


def copying_rate(num_parameters: int, most: float) -> float:
    """Peak step size for learning from given answers or values. `most` is the one of a made
    model.
    """
    return _one_digit(min(most, COPYING_FACTOR * learning_rate(num_parameters)))


def max_tokens(max_context: int) -> int:
    """Tokens of an answer: a part of the context, at most MOST_ANSWER, and not less than for a made
    model if the context has room for that.
    """
    part = max(1, min(MOST_ANSWER, max_context // ANSWER_SHARE))
    least = EnvironmentSection().max_tokens
    return max(part, least) if max_context > least else part


def micro_batch_tokens(config: Config, sizes: ModelSizes) -> int:
    """Returns as many tokens as the trainer's ranks have memory for, of those that make a CPU
    faster. The memory of a GPU is not known here.
    """
    if config.trainer.device != "cpu":
        return GPU_MICRO
    most = TrainerSection().micro_batch_tokens
    room = machine_bytes() // ACTIVATIONS_SHARE
    for tokens in range(most, LEAST_MICRO, -MICRO_STEP):
        if config.trainer.ranks * activation_bytes(config, sizes, tokens) <= room:
            return tokens
    return LEAST_MICRO


def with_derived(config: Config) -> Config:
    """Fills in the unset options that follow from the model. Nothing changes without `model.path`,
    or if no such model is found.
    """
    if config.model.path is None:
        return config
    found = default_context(config)
    if found is not None:
        context, _ = found
        config = _filled(config, "model.max_context", context)
    for derived in model_derived(config):
        config = _filled(config, derived.option, derived.value)
    return config


def model_derived(config: Config) -> Iterator[DerivedDefault]:
    """The values that options would have if they were unset, of those that mean something in this
    run. The context is taken as it is. There are none without a model.
    """
    if config.model.path is None:
        return
    try:
        sizes = sizes_of(config.model.path)
    except ModelNotFound:  # said where the model is looked for
        return
    adapters = _trains_adapters(config)
    number = sizes.num_parameters
    trained = "adapters of it" if adapters else "all of them trained"
    yield DerivedDefault(
        "environment.max_tokens",
        max_tokens(config.model.max_context),
        f"a part of a context of {config.model.max_context:,}",
    )
    rate = learning_rate(number, adapters=adapters)
    yield DerivedDefault(
        "trainer.learning_rate",
        rate,
        f"for {number:,} parameters that were trained before, {trained}",
    )
    if config.warm_start.is_made:
        copied = copying_rate(number, WarmStartSection().learning_rate)
        yield DerivedDefault("warm_start.learning_rate", copied, "for learning from given answers")
    if config.objective.advantage == "gae":
        yield DerivedDefault(
            "critic.learning_rate",
            copying_rate(number, CriticSection().learning_rate),
            "for learning values",
        )
    yield DerivedDefault(
        "trainer.micro_batch_tokens",
        micro_batch_tokens(config, sizes),
        "what activations may take of memory",
    )


def shown_derived(config: Config) -> Iterator[DerivedDefault]:
    """The derived values that are in force, for the dry run. An option that the user sets to its
    derived value is among them.
    """
    for derived in model_derived(config):
        section, _, name = derived.option.partition(".")
        if getattr(getattr(config, section), name) == derived.value:
            yield derived


def _trains_adapters(config: Config) -> bool:
    """True if the run makes adapters, or the model's folder brings some."""
    if config.lora.rank is not None:
        return True
    path = config.model.path
    return path is not None and adapter_of(path) is not None


def _filled(config: Config, option: str, value: float) -> Config:
    """Gives the option this value, unless the user has set it."""
    name, _, key = option.partition(".")
    section = cast(Section, getattr(config, name))
    if key in section.model_fields_set:
        return config
    update: dict[str, Any] = {name: section.model_copy(update={key: value})}
    return config.model_copy(update=update)


def _one_digit(rate: float) -> float:
    """The rate rounded to its first digit."""
    exponent = math.floor(math.log10(rate))
    return float(f"{round(rate / 10**exponent)}e{exponent}")
