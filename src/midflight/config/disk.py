"""The room that a run takes on disk and in shared memory, estimated before anything is started.
`memory` does so for memory.
"""

from midflight.config.derived import handed_bytes, num_engines, served_dtype, trained_parameters
from midflight.config.sections import Config
from midflight.models.sizes import ModelSizes, element_bytes, num_experts_of


def held_versions(config: Config) -> int:
    """The number of versions that are published at once: one live, one under way, one waiting. For
    the fourth, with differences, see `DeltaPublisher`.
    """
    return 4 if config.weights.delta else 3


def published_bytes(config: Config, sizes: ModelSizes) -> int:
    """The room that published versions take in shared memory."""
    if config.weights.transport != "shared_memory":
        return 0
    return held_versions(config) * handed_bytes(config, sizes)


def staged_bytes(config: Config, sizes: ModelSizes) -> int:
    """The room that servers take in shared memory: two folders each, except where their workers get
    versions directly.
    """
    if not _servers_load_folders(config):
        return 0
    return 2 * num_engines(config.engine) * sizes.weight_bytes(served_dtype(config))


def spilled_bytes(config: Config, sizes: ModelSizes, *, shared_free: int) -> int:
    """The room that published versions take in the run's folder: none if they have room in shared
    memory, of which `shared_free` bytes are free, beside what servers stage there.
    """
    published = published_bytes(config, sizes)
    if staged_bytes(config, sizes) + published <= shared_free:
        return 0
    return published


def _servers_load_folders(config: Config) -> bool:
    if config.engine.kind == "embedded":
        return False
    if config.weights.transport != "direct" or config.lora.merged:
        return True
    path = config.model.path
    return path is not None and num_experts_of(path) > 0


def num_checkpoints(config: Config) -> int:
    """The most checkpoints in the run's folder at once, including one that is being written."""
    every = config.trainer.checkpoint_every
    made = 2  # after the warm start, and at the end
    if every:
        made += config.run.steps // every
    return min(config.trainer.keep_checkpoints + 1, made)


def disk_bytes(config: Config, sizes: ModelSizes) -> int:
    """Returns the room that a run takes in its folder in any case: models, and checkpoints with
    weights and two moments of the trained parameters, one of them while it is written. The store
    comes on top.
    """
    weights = sizes.weight_bytes(config.model.dtype)
    trained = trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (3 if config.model.path is None else 2) + (config.objective.kl_coefficient > 0)
    critic = 3 * trained * (config.objective.advantage == "gae")
    return models * weights + num_checkpoints(config) * (3 * trained + critic)


def first_disk_bytes(config: Config, sizes: ModelSizes, *, trains: bool, shared_free: int) -> int:
    """Room that a run takes in its folder before its first step: the models that it begins with, a
    checkpoint, and versions for which shared memory has no room. `trains`: whether our trainer
    makes the steps.
    """
    weights = sizes.weight_bytes(config.model.dtype)
    trained = trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (2 if config.model.path is None else 1) + (config.objective.kl_coefficient > 0)
    checkpoint = 3 * trained * (2 if config.objective.advantage == "gae" else 1)
    versions = spilled_bytes(config, sizes, shared_free=shared_free)
    return trains * (models * weights + checkpoint + versions)
