"""The room that a run takes on disk and in shared memory, estimated before anything is started.
`memory` does so for memory.
"""

from midflight.config.derived import handed_bytes, num_engines, served_dtype, trained_parameters
from midflight.config.sections import Config
from midflight.models.sizes import ModelSizes, element_bytes, num_experts_of


def held_versions(config: Config) -> int:
    """Versions in shared memory: one live, one under way, one waiting. For the fourth, with
    differences, see `DeltaPublisher`.
    """
    if config.weights.transport == "file":
        return 0
    return 4 if config.weights.delta else 3


def shared_bytes(config: Config, sizes: ModelSizes) -> int:
    """Room that versions take in shared memory: those that are published, and two folders beside
    each server, except where its workers get versions directly.
    """
    published = 0
    if config.weights.transport == "shared_memory":
        published = held_versions(config) * handed_bytes(config, sizes)
    if not _servers_load_folders(config):
        return published
    folder = sizes.weight_bytes(served_dtype(config))
    return published + 2 * num_engines(config.engine) * folder


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
    versions = 3 * handed_bytes(config, sizes) * (config.weights.transport == "file")
    return models * weights + num_checkpoints(config) * (3 * trained + critic) + versions


def first_disk_bytes(config: Config, sizes: ModelSizes, *, trains: bool) -> int:
    """Room that a run takes before its first step: the models that it begins with, a checkpoint, a
    version. `trains`: whether our trainer makes the steps.
    """
    weights = sizes.weight_bytes(config.model.dtype)
    trained = trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (2 if config.model.path is None else 1) + (config.objective.kl_coefficient > 0)
    checkpoint = 3 * trained * (2 if config.objective.advantage == "gae" else 1)
    version = handed_bytes(config, sizes) * (config.weights.transport == "file")
    return version + trains * (models * weights + checkpoint)
