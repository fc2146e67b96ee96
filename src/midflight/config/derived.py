"""What follows from the numbers: the six knobs of asynchrony, where B = groups_per_step, n = group_size, S = max_staleness; and what a
run will take, its processes with their cores and its memory, estimated before anything is started."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midflight.config.agent import CLAIMED, SINGLE_TURN, agent_of
from midflight.config.sections import Config, EngineSection, EnvironmentSection, LoraSection, ModelSection, RolloutSection
from midflight.errors import ModelNotFound
from midflight.models.sizes import ModelSizes, element_bytes, num_experts_of, sizes_of
from midflight.types import StalePolicy, Version


def batch_rollouts(rollout: RolloutSection) -> int:
    """B * n: rollouts one step trains on."""
    return rollout.groups_per_step * rollout.group_size


def most_in_flight(rollout: RolloutSection) -> int:
    """Rollouts that may run at once, whatever engines hold: `max_in_flight`, else (S + 1) * B * n, which is all that admission can let in."""
    return rollout.max_in_flight or (rollout.max_staleness + 1) * batch_rollouts(rollout)


def in_flight(config: Config, slots: int | None = None) -> int:
    """Rollouts running at once: `max_in_flight`, else one for each of the engines' `slots`, and n - 1: a group starts when one is free."""
    rollout, slots = config.rollout, engine_slots(config) if slots is None else slots
    return rollout.max_in_flight or min(most_in_flight(rollout), max(1, slots) + rollout.group_size - 1)


def buffer_groups(rollout: RolloutSection) -> int:
    """Finished groups that may wait: `buffer_groups`, else (S + 1) * B, where the buffer never is the limit."""
    return rollout.buffer_groups or (rollout.max_staleness + 1) * rollout.groups_per_step


def buffer_bytes(rollout: RolloutSection) -> int:
    """Memory that finished rollouts may take: `buffer_bytes`, else a quarter of what this machine, or its container, has."""
    return rollout.buffer_bytes or machine_bytes() // 4


def machine_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = Path("/sys/fs/cgroup/memory.max")
    allowed = container.read_text().strip() if container.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def trains_truncated(config: Config, *, trainer_is_ours: bool) -> bool:
    """Whether turns sampled with top-p, top-k or min-p are trained where engines record what was kept. Beside a teacher they are not: he
    scores tokens over the whole vocabulary."""
    asked = config.correction.sampling_masks
    return (trainer_is_ours if asked is None else asked) and config.distillation.teacher is None


def batch_bytes(config: Config) -> int:
    """Of the rows of one batch whose rollouts all fill the context."""
    return batch_rollouts(config.rollout) * config.model.max_context * ROW_BYTES_PER_TOKEN


def min_group_size(rollout: RolloutSection) -> int:
    """Scored rollouts a group needs: `min_group_size`, else ceil(n / 2)."""
    return rollout.min_group_size or math.ceil(rollout.group_size / 2)


def admission_limit(rollout: RolloutSection, served: Version) -> int:
    """Groups that may have been submitted and not released while engines serve `served`: (v_served + S + 1) * B.

    `released` counts from the start of the run, as `served` does.
    """
    return (served + rollout.max_staleness + 1) * rollout.groups_per_step


def num_engines(engine: EngineSection) -> int:
    """Engines of the run: the servers attached, else the processes started, of which the last may be lent."""
    return (len(engine.urls or engine.servers) or engine.count) + engine.lend


MAX_WORKERS = 8
"""By default: more would rarely be busy, and each takes memory."""


def num_workers(environment: EnvironmentSection) -> int:
    """Processes that run agents; with 0 they run in the rollout process. By default half as many as cores, two at least."""
    agent = agent_of(environment)
    if environment.workers is not None:
        return 0 if agent == CLAIMED else environment.workers
    return 0 if agent in (SINGLE_TURN, CLAIMED) and not environment.rewards else min(MAX_WORKERS, max(2, (os.cpu_count() or 1) // 2))


def engine_slots(config: Config) -> int:
    """Requests decoded together by all engines of the policy."""
    return (num_engines(config.engine) - config.environment.untracked.engines) * config.engine.max_running


def served_dtype(config: Config) -> str:
    """Precision of the weights in engines, and on their way there."""
    return config.model.dtype if config.engine.dtype == "auto" else config.engine.dtype


def lora_alpha(lora: LoraSection) -> float:
    """The output of adapters is scaled by this over the rank: `alpha`, else 2 * rank."""
    return lora.alpha or 2 * (lora.rank or 0)


def engine_python(engine: EngineSection) -> Path:
    """Interpreter of the server's environment: `python`, else where `make engines` puts it. Not resolved: a link leads to another."""
    return engine.python or Path(f".venv-{engine.kind}/bin/python")


@dataclass(frozen=True, slots=True)
class Staleness:
    """The largest age a trained token can have, in versions, and what the policy pays for the bound (I2)."""

    worst: int
    price: str


_PRICES = {
    StalePolicy.WAIT: "steps wait for stragglers, at most until the deadline of a rollout; nothing is dropped",
    StalePolicy.DROP: "older trajectories leave the gradient; their rewards stay in the baseline",
    StalePolicy.MASK: "older tokens get weight 0 and stay as context",
    StalePolicy.REQUEUE: "older groups are closed and their task is tried again, then dropped",
}


def worst_staleness(rollout: RolloutSection) -> Staleness:
    """The bound is S under every policy; the policies differ in the price. At S = 0 there is nothing to pay for."""
    price = "none: each batch is sampled under the version it trains" if rollout.max_staleness == 0 else _PRICES[rollout.stale_policy]
    return Staleness(rollout.max_staleness, price)


@dataclass(frozen=True, slots=True)
class Knob:
    """One of the six, with the number in force, what it bounds, and whether it is the first bound the run meets."""

    name: str
    value: str
    effect: str
    binds: bool = False


def knobs(config: Config) -> tuple[Knob, ...]:
    """The six knobs of asynchrony. Those that bound the rollouts at work are compared; the tightest binds, ties both."""
    r, slots = config.rollout, engine_slots(config)
    running, admitted, waiting = in_flight(config), (r.max_staleness + 1) * batch_rollouts(r), buffer_groups(r)
    tightest = min(running, admitted)
    every, batches = config.evaluation.eval_every, waiting / r.groups_per_step
    return (
        Knob("rollout.max_in_flight", str(running), f"rollouts at once; {min(running, slots)} decode together", running == tightest),
        Knob(
            "rollout.max_staleness",
            str(r.max_staleness),
            f"at most {admitted // r.group_size} groups ({admitted} rollouts) submitted and not yet trained",
            admitted == tightest,
        ),
        Knob("rollout.stale_policy", r.stale_policy.value, worst_staleness(r).price),
        Knob("rollout.pause_mode", str(r.pause_mode), "how engines pause for the commit of a version"),
        # A buffer of (S + 1) * B groups holds all that admission lets in; only a smaller one can stop generation.
        Knob(
            "rollout.buffer_groups", str(waiting), f"finished groups that may wait: {batches:g} batches", waiting * r.group_size < admitted
        ),
        Knob("evaluation.eval_every", str(every), f"an evaluation every {every} steps" if every else "evaluations before and after only"),
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
        ProcessCount("rollout", 1, 1, "cpu", "gateway, buffer, store" + ("" if num_workers(config.environment) else ", agents")),
        *_worker_place(config.environment),
        _engine_place(config.engine),
        *_teacher_place(config),
        ProcessCount("trainer", config.trainer.ranks, config.trainer.threads, config.trainer.device, "takes steps, publishes weights"),
    )


def _engine_place(engine: EngineSection) -> ProcessCount:
    generates = f"generates, {engine.max_running} requests together" + (", the last while the trainer waits" if engine.lend else "")
    if engine.kind == "embedded":
        return ProcessCount("engine", num_engines(engine), engine.threads, engine.device, generates)
    if engine.urls:
        return ProcessCount("engine", num_engines(engine), 0, "theirs", f"speaks to a running {engine.kind} server, which {generates}")
    return ProcessCount("engine", num_engines(engine), engine.threads, engine.device, f"a {engine.kind} server, which {generates}")


def _worker_place(environment: EnvironmentSection) -> tuple[ProcessCount, ...]:
    number = num_workers(environment)
    return (ProcessCount("worker", number, 1, "cpu", f"agents of {agent_of(environment)}"),) if number else ()


def _teacher_place(config: Config) -> tuple[ProcessCount, ...]:
    if config.distillation.teacher is None:
        return ()
    return (ProcessCount("teacher", 1, config.engine.threads, config.engine.device, "scores what the engines generate"),)


def computing_threads(config: Config) -> int:
    """Threads of engines, teacher and trainer that compete for CPU cores; those on a GPU count one each, servers started by others none."""
    computing = [p for p in placement(config) if p.process in ("engine", "teacher", "trainer")]
    return sum(p.count * (p.threads if p.device == "cpu" else min(p.threads, 1)) for p in computing)


def core_note(config: Config, cores: int) -> str | None:
    """A warning where engines and trainer want more cores than there are."""
    wanted = computing_threads(config)
    if wanted <= cores:
        return None
    return (
        f"engines and trainer compute with {wanted} threads on {cores} cores: they slow each other; lower engine.threads or trainer.threads"
    )


MADE_ARCHITECTURE = "qwen3"
MADE_VOCABULARY = 262
"""Tokens of the tokenizer of made models: 256 bytes and 6 special ones."""
TORCH_PROCESS_BYTES = 320 * 2**20
"""A process that has imported torch and transformers and run a model once, measured on Linux with the CPU build."""
SERVER_BYTES = 1900 * 2**20
"""A vLLM or SGLang server on a CPU before it has weights, keys and values: both measured at about this."""
COMPANION_BYTES = 110 * 2**20
"""Our process beside a server: without torch."""
ROLLOUT_PROCESS_BYTES = 160 * 2**20
WORKER_BYTES = 90 * 2**20
"""With the SDK; what agents import comes on top."""
LAUNCHER_BYTES = 50 * 2**20
ROW_BYTES_PER_TOKEN = 4 + 1 + 1 + 4 + 4 + 4
"""Bytes of a trajectory's row: ids, two masks, log-probabilities, two versions."""
ACTIVATIONS_PER_LAYER = 14
"""Vectors of hidden size kept per token and layer for the backward pass, the feed-forward's counted separately."""
LOGIT_COPIES = 4
"""Logits, their log-softmax and the gradients of both."""
CONTEXT_STEP = 64
"""A context that memory bounds is a multiple of this."""
LOGITS_AT_ONCE = 2**24
"""The most of them that the trainer makes at a time (`trainer.model.policy.CHUNK`)."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the estimate. `num_bytes` is for all processes of that kind together."""

    where: str
    what: str
    num_bytes: int


def model_sizes(model: ModelSection) -> ModelSizes:
    """The sizes of the model at `path` (`ModelNotFound` if there is none), else of the model that will be made."""
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
    )


def default_context(config: Config) -> tuple[int, int] | None:
    """`model.max_context` where it is not given, and what the model itself can; None where its folder does not say.

    The longest row must fit a quarter of the memory twice: as keys and values in every slot of our own engines, and as activations of the
    trainer. Less than a prompt of some length would be of no use: 256 at least.
    """
    try:
        sizes = sizes_of(config.model.path) if config.model.path is not None else None
    except ModelNotFound:
        return None  # said where the model is looked for
    if sizes is None or not sizes.max_context:
        return None
    engine, room = config.engine, machine_bytes() // 4
    slots = num_engines(engine) * engine.max_running * sizes.kv_bytes_per_token(served_dtype(config)) if engine.kind == "embedded" else 0
    row = element_bytes(config.model.dtype) * sizes.num_layers * (ACTIVATIONS_PER_LAYER * sizes.hidden_size + 3 * sizes.intermediate_size)
    fits = min(room // max(slots, 1), room // row)
    least = min(sizes.max_context, ModelSection().max_context)
    return max(least, min(sizes.max_context, fits // CONTEXT_STEP * CONTEXT_STEP)), sizes.max_context


def context_notes(config: Config) -> Iterator[str]:
    """That memory bounds the context."""
    if (found := default_context(config)) is not None and found[0] == config.model.max_context < found[1]:
        yield (
            f"model.max_context is {found[0]:,} of the {found[1]:,} tokens that the model can: more would take a quarter of the memory for the "
            f"keys and values of {config.engine.max_running} slots, or for the trainer's activations; set it, or lower engine.max_running."
        )


def memory_estimate(config: Config, sizes: ModelSizes) -> tuple[MemoryItem, ...]:
    """Worst case of each part: every slot full to `max_context`, every waiting rollout as long as can be."""
    m, e, t, r = config.model, config.engine, config.trainer, config.rollout
    element = element_bytes(m.dtype)
    weights, served = sizes.num_parameters * element, sizes.weight_bytes(served_dtype(config))
    trained, handed = _trained_parameters(config, sizes), handed_bytes(config, sizes)
    added = 0 if config.lora.rank is None else trained * element  # adapters beside the weights; a warm start trains the weights first
    optimised = weights if config.warm_start.is_made else trained * element
    slots = e.max_running * m.max_context * sizes.kv_bytes_per_token(served_dtype(config))
    engines = 0 if e.urls else num_engines(e)  # servers that others started take their memory whether we run or not
    per_token = sizes.num_layers * (ACTIVATIONS_PER_LAYER * sizes.hidden_size + 3 * sizes.intermediate_size)
    logits = LOGIT_COPIES * min(sizes.vocab_size * t.micro_batch_tokens, LOGITS_AT_ONCE)
    activations = t.ranks * element * (per_token * t.micro_batch_tokens + logits)
    rollouts, each = buffer_groups(r) * r.group_size, m.max_context * ROW_BYTES_PER_TOKEN
    delta, held = config.weights.delta, held_versions(config)
    has_critic = config.objective.advantage == "gae"
    converted = served_dtype(config) != m.dtype
    return (
        MemoryItem("trainer", "weights, gradients and AdamW's two moments", weights + added + 3 * optimised),
        MemoryItem("trainer", f"activations of {t.ranks} x a micro-batch of {t.micro_batch_tokens} tokens", activations),
        *([MemoryItem("trainer", "the reference's weights", weights)] * (config.objective.kl_coefficient > 0)),
        MemoryItem("trainer", "the newest version as it is served", (delta + converted) * handed),
        MemoryItem("engines", "weights, live and staged", _weights_memory(config, served=served, handed=handed)),
        MemoryItem("engines", f"keys and values: {engines} x {e.max_running} slots of {m.max_context} tokens", slots * engines),
        *([MemoryItem("trainer", "the critic's weights, gradients and moments", weights + added + 3 * trained * element)] * has_critic),
        *_teacher_memory(config),
        MemoryItem("weights", "published versions in memory", held * handed),
        MemoryItem(
            "rollout",
            f"up to {rollouts + in_flight(config)} trajectories running and waiting",
            min(rollouts * each, buffer_bytes(r)) + in_flight(config) * each,
        ),
        MemoryItem("processes", "interpreters and libraries", _processes_memory(config)),
    )


def held_versions(config: Config) -> int:
    """Versions in shared memory: live, under way, waiting; with differences see `DeltaPublisher`."""
    return 0 if config.weights.transport == "file" else 4 if config.weights.delta else 3


def shared_bytes(config: Config, sizes: ModelSizes) -> int:
    """Room that versions take in shared memory: what is published, and two folders beside a server, but where its workers get them straight."""
    converted = config.lora.merged or (config.model.path is not None and num_experts_of(config.model.path) > 0)
    folders = config.engine.kind != "embedded" and (config.weights.transport != "direct" or converted)
    held = held_versions(config) if config.weights.transport == "shared_memory" else 0
    return held * handed_bytes(config, sizes) + 2 * folders * num_engines(config.engine) * sizes.weight_bytes(served_dtype(config))


def disk_bytes(config: Config, sizes: ModelSizes) -> int:
    """Room that a run takes in its folder for sure: models, and checkpoints with two moments of what is trained, one more while it is
    written. The store comes on top."""
    weights = sizes.weight_bytes(config.model.dtype)
    trained = _trained_parameters(config, sizes) * element_bytes(config.model.dtype)
    models = (3 if config.model.path is None else 2) + (config.objective.kl_coefficient > 0)
    critic = 3 * trained * (config.objective.advantage == "gae")
    versions = 3 * handed_bytes(config, sizes) * (config.weights.transport == "file")
    return models * weights + (config.trainer.keep_checkpoints + 1) * (3 * trained + critic) + versions


def _trained_parameters(config: Config, sizes: ModelSizes) -> int:
    return sizes.num_parameters if config.lora.rank is None else sizes.num_adapter_parameters(config.lora.rank)


def handed_bytes(config: Config, sizes: ModelSizes) -> int:
    """Of one version on its way."""
    return _trained_parameters(config, sizes) * element_bytes(served_dtype(config))


def total_bytes(items: tuple[MemoryItem, ...]) -> int:
    return sum(item.num_bytes for item in items)


def _teacher_memory(config: Config) -> tuple[MemoryItem, ...]:
    if config.distillation.teacher is None:
        return ()
    weights = sizes_of(config.distillation.teacher).weight_bytes(served_dtype(config))
    return (MemoryItem("teacher", "process and weights", TORCH_PROCESS_BYTES + weights),)


def _weights_memory(config: Config, *, served: int, handed: int) -> int:
    """Weights of all engines. Beside a server: two folders that it loads from, and what is fetched or merged next, or adapters in files and
    in its memory. For differences: what they change."""
    engine, lora = config.engine, config.lora
    each = served + handed if engine.kind == "embedded" else ((3 if engine.urls else 4) + lora.merged) * served
    if engine.kind != "embedded" and lora.rank is not None and not lora.merged:
        each = (0 if engine.urls else served) + (2 * (config.rollout.max_staleness + 2) + 1) * handed
    return num_engines(engine) * (each + config.weights.delta * handed)


def _processes_memory(config: Config) -> int:
    engine, workers = config.engine, num_workers(config.environment) * WORKER_BYTES
    ours = config.trainer.ranks * TORCH_PROCESS_BYTES + ROLLOUT_PROCESS_BYTES + workers + LAUNCHER_BYTES
    if engine.kind == "embedded":
        return ours + num_engines(engine) * TORCH_PROCESS_BYTES
    return ours + num_engines(engine) * (COMPANION_BYTES + (0 if engine.urls else SERVER_BYTES))
