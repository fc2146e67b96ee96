"""The longest row of a run by default, which memory bounds."""

from collections.abc import Iterator

from midflight.config.derived import machine_bytes, num_engines, served_dtype
from midflight.config.memory import kept_of_token
from midflight.config.model import ModelSection
from midflight.config.sections import Config
from midflight.errors import ModelNotFound
from midflight.models.sizes import element_bytes, sizes_of

CONTEXT_STEP = 64
"""A context that memory bounds is a multiple of this."""
HOST_CONTEXT_SHARE = 8
"""The part of the memory that the longest row may take on CPUs, as a divisor: once in all slots of
the engines and again in the trainer.
"""
GPU_CONTEXT_SHARE = 4
"""The same for GPUs."""


def default_context(config: Config) -> tuple[int, int] | None:
    """Returns the default of `model.max_context`, and the longest context of the model itself, or
    None if the model's folder does not give that.

    The longest row must fit a part of the memory twice: as keys and values in every slot of our own
    engines, and as activations of the trainer. It is 256 at least: a shorter one would leave no
    room for a prompt of some length.
    """
    if config.model.path is None:
        return None
    try:
        sizes = sizes_of(config.model.path)
    except ModelNotFound:
        return None  # said where the model is looked for
    if not sizes.max_context:
        return None
    engine = config.engine
    in_slots = 0
    if engine.kind == "embedded":
        slots = num_engines(engine) * engine.max_running
        in_slots = slots * sizes.kv_bytes_per_token(served_dtype(config))
    in_trainer = element_bytes(config.model.dtype) * kept_of_token(config, sizes)
    fits_slots = _context_room(engine.device) // max(in_slots, 1)
    fits_trainer = _context_room(config.trainer.device) // in_trainer
    fits = min(fits_slots, fits_trainer) // CONTEXT_STEP * CONTEXT_STEP
    least = min(sizes.max_context, ModelSection().max_context)
    return max(least, min(sizes.max_context, fits)), sizes.max_context


def _context_room(device: str) -> int:
    """The bytes that the longest row may take there. The memory of a GPU is not asked for here: the
    machine's stands for it.
    """
    share = HOST_CONTEXT_SHARE if device == "cpu" else GPU_CONTEXT_SHARE
    return machine_bytes() // share


def context_notes(config: Config) -> Iterator[str]:
    """A note if memory bounds the context."""
    found = default_context(config)
    if found is None:
        return
    bounded, most = found
    if bounded == config.model.max_context < most:
        yield (
            f"model.max_context is {bounded:,} of the {most:,} tokens that the model can: "
            "more would take too large a part of the memory for the keys and values of "
            f"{config.engine.max_running} slots, or for the trainer's activations; set it, or "
            "lower engine.max_running."
        )
