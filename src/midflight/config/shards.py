"""The configuration of one of several rollout processes: an equal part of all numbers that count
groups or rollouts, and a folder of its own.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from midflight.config.agent import agent_of
from midflight.config.derived import num_workers
from midflight.config.environment import CLAIMED
from midflight.config.sections import Config

MOST_SHARDS = 11
"""The largest number of shards whose stores can be read as one: SQLite attaches ten databases to
the first.
"""


def shard_folder(folder: Path, shard: int) -> Path:
    """The folder of a shard's store and journal. Those of the first shard are in the run's folder,
    as in a run with one process.
    """
    return folder / "shards" / str(shard) if shard else folder


def shard_of(config: Config, shard: int) -> Config:
    """The configuration of a shard; with one process it is the run's own. Shards also share the
    slots of engines (`run.rollout.capacity`).
    """
    shards = config.gateway.shards
    r = config.rollout
    if shards == 1:
        return config
    part = {
        "groups_per_step": r.groups_per_step // shards,
        "max_in_flight": r.max_in_flight and r.max_in_flight // shards,
        "buffer_groups": r.buffer_groups and r.buffer_groups // shards,
    }
    workers = workers_of_shard(config)
    folder = shard_folder(Path(config.run.folder), shard)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": folder}),
            "rollout": r.model_copy(update=part),
            "environment": config.environment.model_copy(update={"workers": workers}),
        }
    )


def workers_of_shard(config: Config) -> int:
    """The processes of agents beside each rollout process."""
    return math.ceil(num_workers(config.environment) / config.gateway.shards)


def unsharded(config: Config) -> Config:
    """The configuration with one rollout process, which everything but training has."""
    gateway = config.gateway.model_copy(update={"shards": 1})
    return config.model_copy(update={"gateway": gateway})


def shard_contradictions(config: Config) -> Iterator[str]:
    shards = config.gateway.shards
    r = config.rollout
    if shards == 1:
        return
    if shards > MOST_SHARDS:
        yield (
            f"gateway.shards is {shards}, and more than {MOST_SHARDS} stores can't be read as "
            "one; make it smaller"
        )
        return
    for name, number in (
        ("groups_per_step", r.groups_per_step),
        ("buffer_groups", r.buffer_groups),
    ):
        if number is not None and number % shards:
            yield (
                f"rollout.{name} ({number}) can't be shared out equally by gateway.shards "
                f"({shards}); make it a multiple"
            )
    if r.max_in_flight is not None and r.max_in_flight < shards * r.group_size:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) leaves no group of {r.group_size} for "
            f"each of gateway.shards ({shards}); raise it"
        )
    if any(source.posted for source in config.environment.sources):
        yield (
            f"gateway.shards is {shards}, and tasks that are posted go to one gateway; remove "
            "it, or the source with posted = true"
        )
    if agent_of(config.environment) == CLAIMED:
        yield (
            f"gateway.shards is {shards}, and rollouts that are claimed go to one gateway; "
            "remove it, or let the run start its agents"
        )
