"""What follows from the numbers: the six knobs of asynchrony, where B = groups_per_step, n =
group_size, S = max_staleness; and what a run will take, its processes with their cores and its
disk, estimated before anything is started. `config.memory` does so for memory."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midflight.config.agent import CLAIMED, SINGLE_TURN, agent_of
from midflight.config.sections import (
    Config,
    EngineSection,
    EnvironmentSection,
    LoraSection,
    ModelSection,
    RolloutSection,
)
from midflight.errors import ModelNotFound
from midflight.models.sizes import ModelSizes, element_bytes, num_experts_of, sizes_of
from midflight.types import StalePolicy, Version


def batch_rollouts(rollout: RolloutSection) -> int:
    """B * n: rollouts one step trains on."""
    return rollout.groups_per_step * rollout.group_size


def most_in_flight(rollout: RolloutSection) -> int:
    """Rollouts that may run at once, whatever engines hold: `max_in_flight`, else (S + 1) * B * n,
    which is all that admission can let in.
    """
    return rollout.max_in_flight or (rollout.max_staleness + 1) * batch_rollouts(rollout)


def in_flight(config: Config, slots: int | None = None) -> int:
    """Rollouts running at once: `max_in_flight`, else one for each of the engines' `slots`, and n -
    1: a group starts when one is free.
    """
    rollout = config.rollout
    slots = engine_slots(config) if slots is None else slots
    return rollout.max_in_flight or min(
        most_in_flight(rollout), max(1, slots) + rollout.group_size - 1
    )


def buffer_groups(rollout: RolloutSection) -> int:
    """Finished groups that may wait: `buffer_groups`, else (S + 1) * B, where the buffer never is
    the limit.
    """
    return rollout.buffer_groups or (rollout.max_staleness + 1) * rollout.groups_per_step


def buffer_bytes(rollout: RolloutSection) -> int:
    """Memory that finished rollouts may take: `buffer_bytes`, else a quarter of what this machine,
    or its container, has.
    """
    return rollout.buffer_bytes or machine_bytes() // 4


def machine_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = Path("/sys/fs/cgroup/memory.max")
    allowed = container.read_text().strip() if container.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def trains_truncated(config: Config, *, trainer_is_ours: bool) -> bool:
    """Whether turns sampled with top-p, top-k or min-p are trained where engines record what was
    kept. Beside a teacher they are not: he scores tokens over the whole vocabulary."""
    asked = config.correction.sampling_masks
    return (trainer_is_ours if asked is None else asked) and config.distillation.teacher is None


def batch_bytes(config: Config) -> int:
    """Of the rows of one batch whose rollouts all fill the context."""
    return batch_rollouts(config.rollout) * config.model.max_context * ROW_BYTES_PER_TOKEN


def min_group_size(rollout: RolloutSection) -> int:
    """Scored rollouts a group needs: `min_group_size`, else ceil(n / 2)."""
    return rollout.min_group_size or math.ceil(rollout.group_size / 2)


def admission_limit(rollout: RolloutSection, served: Version) -> int:
    """Groups that may have been submitted and not released while engines serve `served`: (v_served
    + S + 1) * B.

    `released` counts from the start of the run, as `served` does.
    """
    return (served + rollout.max_staleness + 1) * rollout.groups_per_step


def num_engines(engine: EngineSection) -> int:
    """Engines of the run: the servers attached, else the processes started, of which the last may
    be lent.
    """
    return (len(engine.urls or engine.servers) or engine.count) + engine.lend


MAX_WORKERS = 8
"""By default: more would rarely be busy, and each takes memory."""


def num_workers(environment: EnvironmentSection) -> int:
    """Processes that run agents; with 0 they run in the rollout process. By default half as many as
    cores, two at least.
    """
    agent = agent_of(environment)
    if environment.workers is not None:
        return 0 if agent == CLAIMED else environment.workers
    return (
        0
        if agent in (SINGLE_TURN, CLAIMED) and not environment.rewards
        else min(MAX_WORKERS, max(2, (os.cpu_count() or 1) // 2))
    )


def engine_slots(config: Config) -> int:
    """Requests decoded together by all engines of the policy."""
    return (
        num_engines(config.engine) - config.environment.untracked.engines
    ) * config.engine.max_running


def served_dtype(config: Config) -> str:
    """Precision of the weights in engines, and on their way there."""
    return config.model.dtype if config.engine.dtype == "auto" else config.engine.dtype


def lora_alpha(lora: LoraSection) -> float:
    """The output of adapters is scaled by this over the rank: `alpha`, else 2 * rank."""
    return lora.alpha or 2 * (lora.rank or 0)


def engine_python(engine: EngineSection) -> Path:
    """Interpreter of the server's environment: `python`, else where `make engines` puts it. Not
    resolved: a link leads to another.
    """
    return engine.python or Path(f".venv-{engine.kind}/bin/python")


@dataclass(frozen=True, slots=True)
class Staleness:
    """The largest age a trained token can have, in versions, and what the policy pays for the bound
    (I2).
    """

    worst: int
    price: str


_PRICES = {
    StalePolicy.WAIT: (
        "steps wait for stragglers, at most until the deadline of a rollout; nothing is dropped"
    ),
    StalePolicy.DROP: "older trajectories leave the gradient; their rewards stay in the baseline",
    StalePolicy.MASK: "older tokens get weight 0 and stay as context",
    StalePolicy.REQUEUE: "older groups are closed and their task is tried again, then dropped",
}


def worst_staleness(rollout: RolloutSection) -> Staleness:
    """The bound is S under every policy; the policies differ in the price. At S = 0 there is
    nothing to pay for.
    """
    price = (
        "none: each batch is sampled under the version it trains"
        if rollout.max_staleness == 0
        else _PRICES[rollout.stale_policy]
    )
    return Staleness(rollout.max_staleness, price)


@dataclass(frozen=True, slots=True)
class Knob:
    """One of the six, with the number in force, what it bounds, and whether it is the first bound
    the run meets.
    """

    name: str
    value: str
    effect: str
    binds: bool = False


def knobs(config: Config) -> tuple[Knob, ...]:
    """The six knobs of asynchrony. Those that bound the rollouts at work are compared; the tightest
    binds, ties both.
    """
    r = config.rollout
    slots = engine_slots(config)
    running = in_flight(config)
    admitted = (r.max_staleness + 1) * batch_rollouts(r)
    waiting = buffer_groups(r)
    tightest = min(running, admitted)
    every = config.evaluation.eval_every
    batches = waiting / r.groups_per_step
    return (
        Knob(
            "rollout.max_in_flight",
            str(running),
            f"rollouts at once; {min(running, slots)} decode together",
            running == tightest,
        ),
        Knob(
            "rollout.max_staleness",
            str(r.max_staleness),
            (
                f"at most {admitted // r.group_size} groups ({admitted} rollouts) submitted and "
                "not yet trained"
            ),
            admitted == tightest,
        ),
        Knob("rollout.stale_policy", r.stale_policy.value, worst_staleness(r).price),
        Knob(
            "rollout.pause_mode", str(r.pause_mode), "how engines pause for the commit of a version"
        ),
        # A buffer of (S + 1) * B groups holds all that admission lets in; only a smaller one can
        # stop generation.
        Knob(
            "rollout.buffer_groups",
            str(waiting),
            f"finished groups that may wait: {batches:g} batches",
            waiting * r.group_size < admitted,
        ),
        Knob(
            "evaluation.eval_every",
            str(every),
            f"an evaluation every {every} steps" if every else "evaluations before and after only",
        ),
    )


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """One kind of process. `threads` are those that compute in each of them."""

    process: str
    count: int
    threads: int
    device: str
    task: str


def placement(config: Config) -> tuple[ProcessCount, ...]:
    return (
        ProcessCount("launcher", 1, 0, "cpu", "starts and supervises the others, terminal"),
        ProcessCount(
            "rollout",
            config.gateway.shards,
            1,
            "cpu",
            "gateway, buffer, store" + ("" if num_workers(config.environment) else ", agents"),
        ),
        *_worker_place(config.environment),
        _engine_place(config.engine),
        *_teacher_place(config),
        ProcessCount(
            "trainer",
            config.trainer.ranks,
            config.trainer.threads,
            config.trainer.device,
            "takes steps, publishes weights",
        ),
    )


def _engine_place(engine: EngineSection) -> ProcessCount:
    generates = f"generates, {engine.max_running} requests together" + (
        ", the last while the trainer waits" if engine.lend else ""
    )
    if engine.kind == "embedded":
        return ProcessCount("engine", num_engines(engine), engine.threads, engine.device, generates)
    if engine.urls:
        return ProcessCount(
            "engine",
            num_engines(engine),
            0,
            "theirs",
            f"speaks to a running {engine.kind} server, which {generates}",
        )
    return ProcessCount(
        "engine",
        num_engines(engine),
        engine.threads,
        engine.device,
        f"a {engine.kind} server, which {generates}",
    )


def _worker_place(environment: EnvironmentSection) -> tuple[ProcessCount, ...]:
    number = num_workers(environment)
    return (
        (ProcessCount("worker", number, 1, "cpu", f"agents of {agent_of(environment)}"),)
        if number
        else ()
    )


def _teacher_place(config: Config) -> tuple[ProcessCount, ...]:
    if config.distillation.teacher is None:
        return ()
    return (
        ProcessCount(
            "teacher",
            1,
            config.engine.threads,
            config.engine.device,
            "scores what the engines generate",
        ),
    )


def computing_threads(config: Config) -> int:
    """Threads of engines, teacher and trainer that compete for CPU cores; those on a GPU count one
    each, servers started by others none.
    """
    computing = [p for p in placement(config) if p.process in ("engine", "teacher", "trainer")]
    return sum(p.count * (p.threads if p.device == "cpu" else min(p.threads, 1)) for p in computing)


def core_note(config: Config, cores: int) -> str | None:
    """A warning where engines and trainer want more cores than there are."""
    wanted = computing_threads(config)
    if wanted <= cores:
        return None
    return (
        f"engines and trainer compute with {wanted} threads on {cores} cores: they slow each "
        "other; lower engine.threads or trainer.threads"
    )


MADE_ARCHITECTURE = "qwen3"
MADE_VOCABULARY = 262
"""Tokens of the tokenizer of made models: 256 bytes and 6 special ones."""
ROW_BYTES_PER_TOKEN = 4 + 1 + 1 + 4 + 4 + 4
"""Bytes of a trajectory's row: ids, two masks, log-probabilities, two versions."""
CONTEXT_STEP = 64
"""A context that memory bounds is a multiple of this."""
HOST_CONTEXT_SHARE = 8
"""On CPUs the longest row may take one part in so many of the memory, in all slots of the engines
and again in the trainer.
"""
GPU_CONTEXT_SHARE = 4
"""On GPUs likewise."""


def model_sizes(model: ModelSection) -> ModelSizes:
    """The sizes of the model at `path` (`ModelNotFound` if there is none), else of the model that
    will be made.
    """
    if model.path is not None:
        return sizes_of(model.path)
    return ModelSizes(
        vocab_size=MADE_VOCABULARY,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        max_context=model.max_context,
        family=MADE_ARCHITECTURE,
    )


def default_context(config: Config) -> tuple[int, int] | None:
    """`model.max_context` where it is not given, and what the model itself can; None where its
    folder does not say.

    The longest row must fit a part of the memory twice: as keys and values in every slot of our own
    engines, and as activations of the trainer. Less than a prompt of some length would be of no
    use: 256 at least.
    """
    try:
        sizes = sizes_of(config.model.path) if config.model.path is not None else None
    except ModelNotFound:
        return None  # said where the model is looked for
    if sizes is None or not sizes.max_context:
        return None
    engine = config.engine
    slots = (
        num_engines(engine) * engine.max_running * sizes.kv_bytes_per_token(served_dtype(config))
        if engine.kind == "embedded"
        else 0
    )
    row = (
        element_bytes(config.model.dtype)
        * sizes.num_layers
        * sizes.activations_per_layer(by_hand=trains_by_hand(config, sizes))
    )
    fits = min(
        _context_room(engine.device) // max(slots, 1), _context_room(config.trainer.device) // row
    )
    least = min(sizes.max_context, ModelSection().max_context)
    return max(
        least, min(sizes.max_context, fits // CONTEXT_STEP * CONTEXT_STEP)
    ), sizes.max_context


def _context_room(device: str) -> int:
    """The bytes that the longest row may take there. Nobody asks a GPU for its memory here: the
    machine's stands for it.
    """
    return machine_bytes() // (HOST_CONTEXT_SHARE if device == "cpu" else GPU_CONTEXT_SHARE)


def trains_by_hand(config: Config, sizes: ModelSizes) -> bool:
    """Whether the trainer computes the model without its modules (`trainer.model.plain`), which
    keeps half as much for the backward pass.
    """
    t = config.trainer
    changed = (
        t.activation_checkpointing
        or t.compile
        or t.compute_dtype != "auto"
        or config.lora.rank is not None
    )
    return sizes.is_plain and config.model.dtype == "float32" and t.ranks == 1 and not changed


def context_notes(config: Config) -> Iterator[str]:
    """That memory bounds the context."""
    if (found := default_context(config)) is not None and found[
        0
    ] == config.model.max_context < found[1]:
        yield (
            f"model.max_context is {found[0]:,} of the {found[1]:,} tokens that the model can: "
            "more would take too large a part of the memory for the keys and values of "
            f"{config.engine.max_running} slots, or for the trainer's activations; set it, or "
            "lower engine.max_running."
        )


def engines_option(config: Config) -> str:
    """The option that says how many engines there are."""
    engine = config.engine
    cluster = config.cluster
    if engine.urls or engine.servers:
        return "engine.urls" if engine.urls else "engine.servers"
    return (
        "cluster.engines_max"
        if cluster.kind != "local" and cluster.engines_max is not None
        else "engine.count"
    )


def held_versions(config: Config) -> int:
    """Versions in shared memory: live, under way, waiting; with differences see
    `DeltaPublisher`.
    """
    return 0 if config.weights.transport == "file" else 4 if config.weights.delta else 3


def shared_bytes(config: Config, sizes: ModelSizes) -> int:
    """Room that versions take in shared memory: what is published, and two folders beside a server,
    but where its workers get them straight.
    """
    converted = config.lora.merged or (
        config.model.path is not None and num_experts_of(config.model.path) > 0
    )
    folders = config.engine.kind != "embedded" and (
        config.weights.transport != "direct" or converted
    )
    held = held_versions(config) if config.weights.transport == "shared_memory" else 0
    return held * handed_bytes(config, sizes) + 2 * folders * num_engines(
        config.engine
    ) * sizes.weight_bytes(served_dtype(config))


def num_checkpoints(config: Config) -> int:
    """The most checkpoints that lie in the run's folder at once, one that is being written
    included.
    """
    every = config.trainer.checkpoint_every
    made = 2  # after the warm start, and at the end
    if every:
        made += config.run.steps // every
    return min(config.trainer.keep_checkpoints + 1, made)


def disk_bytes(config: Config, sizes: ModelSizes) -> int:
    """Room that a run takes in its folder for sure: models, and checkpoints with two moments of
    what is trained, one more while it is written. The store comes on top."""
    weights = sizes.weight_bytes(config.model.dtype)
    trained = trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (3 if config.model.path is None else 2) + (config.objective.kl_coefficient > 0)
    critic = 3 * trained * (config.objective.advantage == "gae")
    versions = 3 * handed_bytes(config, sizes) * (config.weights.transport == "file")
    return models * weights + num_checkpoints(config) * (3 * trained + critic) + versions


def first_disk_bytes(config: Config, sizes: ModelSizes, *, trains: bool) -> int:
    """Room that a run takes before its first step: the models that it begins with, a checkpoint, a
    version. `trains`: whether our trainer does.
    """
    weights = sizes.weight_bytes(config.model.dtype)
    trained = trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (2 if config.model.path is None else 1) + (config.objective.kl_coefficient > 0)
    checkpoint = 3 * trained * (2 if config.objective.advantage == "gae" else 1)
    version = handed_bytes(config, sizes) * (config.weights.transport == "file")
    return version + trains * (models * weights + checkpoint)


def trained_parameters(config: Config, sizes: ModelSizes) -> int:
    return (
        sizes.num_parameters
        if config.lora.rank is None
        else sizes.num_adapter_parameters(config.lora.rank)
    )


def handed_bytes(config: Config, sizes: ModelSizes) -> int:
    """Of one version on its way."""
    return trained_parameters(config, sizes) * element_bytes(served_dtype(config))
