"""Options that there were once. A configuration with one of them is refused by its name, with what
to use in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from midflight.config.options import KeyPath, generic_key
from midflight.types import Json


@dataclass(frozen=True, slots=True)
class RemovedOption:
    """`default` is the value that it had unless it was set. An option whose default was to be unset
    has None.
    """

    default: Json
    instead: str
    """What to use in its place, as the end of a sentence."""


REMOVED: Mapping[str, RemovedOption] = {
    "engine.pause_lease_seconds": RemovedOption(
        30.0,
        "a paused engine waits 30 s for its pauser, or weights.commit_seconds where that is longer",
    ),
    "gateway.max_requests": RemovedOption(
        4096, "gateway.max_sessions bounds the requests under way too"
    ),
    "gateway.orphan_seconds": RemovedOption(
        30.0, "a generation without its client goes on for a fourth of gateway.request_seconds"
    ),
    "environment.mcp.*.name": RemovedOption(
        "", "messages name a server by its address, or by the last word of its command"
    ),
    "curriculum.floor": RemovedOption(0.05, "it is always 0.05"),
    "curriculum.hard_below": RemovedOption(0.1, "it is always 0.1"),
    "curriculum.easy_above": RemovedOption(0.9, "it is always 0.9"),
    "curriculum.window": RemovedOption(16, "it is always 16"),
    "rollout.buffer_bytes": RemovedOption(
        None,
        "finished rollouts may take a quarter of the machine's memory; rollout.buffer_groups "
        "bounds their number",
    ),
    "rollout.requeues": RemovedOption(1, "a task is requeued once"),
    "evaluation.max_in_flight": RemovedOption(
        None, "an evaluation runs as many rollouts at once as the engines hold"
    ),
    "evaluation.keep": RemovedOption(
        32, "an evaluation keeps the conversations of 32 rollouts of each source"
    ),
    "objective.delta_low": RemovedOption(
        None, "objective.delta bounds both sides; write a loss of your own for another bound"
    ),
    "distillation.score_seconds": RemovedOption(
        600.0, "the teacher has five times run.stall_seconds for the scores of a batch"
    ),
    "weights.full_every": RemovedOption(16, "every 16th version is sent whole"),
}
"""The options by their keys, as in `Option.key`."""


def removed_at(path: KeyPath) -> RemovedOption | None:
    """The option that was at a path once, if there was one."""
    return REMOVED.get(generic_key(path))


def is_of_run(path: Path) -> bool:
    """True if a run wrote this file into its folder. Such a file has every option that there was
    then, most of them with their defaults.
    """
    return path.name == "config.toml" and (path.parent / "metrics.jsonl").is_file()
