"""Options, and values of options, that are gone, and what has taken their place."""

from collections.abc import Mapping
from dataclasses import dataclass

from midflight.types import Json


@dataclass(frozen=True, slots=True)
class Replacement:
    """A value that is gone, and its replacement."""

    value: str
    """The value that the stored configuration of a run is read with."""
    remedy: str
    """The end of a refusal. It says what to write in a new configuration."""


REPLACED_TRANSPORTS: Mapping[str, Replacement] = {
    "file": Replacement(
        "auto",
        'set it to "shared_memory", which maps a file in the run\'s folder by itself where '
        '/dev/shm is small, or between machines to "pull" ("auto" chooses)',
    ),
    "collective": Replacement(
        "pull", 'set it to "pull", by which engines on any number of machines ask for versions'
    ),
}
REPLACED: Mapping[str, Mapping[str, Replacement]] = {"weights.transport": REPLACED_TRANSPORTS}
"""The replaced values of each option, by its key."""


@dataclass(frozen=True, slots=True)
class RemovedOption:
    """An option that is gone."""

    default: Json
    """The value that it had if it was not set; None if it was unset then. The stored configuration
    of a run may have it with this value.
    """
    instead: str
    """The middle of a refusal. It says what to use in place of the option."""
    same_as: str = ""
    """An option that says the same. The stored configuration of a run may have the option that is
    gone with this one's value.
    """


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
    "environment.sandbox.output_bytes": RemovedOption(
        1_000_000, "a program is ended past 1 000 000 bytes of output"
    ),
    "environment.tool_concurrency": RemovedOption(
        64,
        "a worker calls 64 tools at once; hold calls back in the tool itself where its service "
        "bears fewer",
    ),
    "environment.count_all_choices": RemovedOption(
        False, "a session that is opened over HTTP asks for it with count_all_choices of its own"
    ),
    "environment.system": RemovedOption(
        "", "each source gives its tasks a system message with environment.sources.*.system"
    ),
    "trainer.max_missing_share": RemovedOption(
        0.1, "a tenth of a batch's tokens may come without a log-probability"
    ),
    "trainer.devices": RemovedOption(
        [],
        "ranks get the lowest GPUs that engine.servers leaves; name those of the engines in "
        "engine.servers.*.devices, or give the launcher an order by CUDA_VISIBLE_DEVICES",
    ),
    "engine.servers.*.arguments": RemovedOption(
        [],
        "engine.arguments are for all servers; start one that needs others yourself, and name it "
        "in engine.urls",
    ),
    "gateway.hosts": RemovedOption(
        [], "an endpoint on loopback answers to the name in gateway.public_url"
    ),
    "observe.view": RemovedOption(
        "auto", "a run has a viewer where one is installed, which starts for its first visitor"
    ),
    "evaluation.suites.*.pass_at": RemovedOption(
        [],
        "a suite tells pass@k for each power of two up to evaluation.suites.*.samples, and for that "
        "number",
    ),
    "evaluation.suites.*.passes": RemovedOption(
        1.0, "curriculum.passes is the reward from which an answer has passed"
    ),
    "curriculum.target": RemovedOption(
        None,
        'curriculum.priority = "learnability" has nine of ten draws for tasks that are learnable or '
        "not tried yet",
    ),
    "cluster.engines_max": RemovedOption(
        None, "engine.count is the number of engines on a cluster too", same_as="engine.count"
    ),
    "weights.max_paused": RemovedOption(
        1, "one engine of each 64 is committed at a time, and two of 65 to 128"
    ),
}
"""The options that are gone by their keys, as in `Option.key`."""
