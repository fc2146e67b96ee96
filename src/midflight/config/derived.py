"""Numbers that follow from the options of a run, where B = groups_per_step, n = group_size, S =
max_staleness.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from midflight.config.agent import SINGLE_TURN, agent_of
from midflight.config.engine import EngineSection
from midflight.config.environment import CLAIMED, EnvironmentSection
from midflight.config.model import LoraSection, ModelSection
from midflight.config.rollout import RolloutSection
from midflight.config.sections import Config
from midflight.models.sizes import ModelSizes, element_bytes, sizes_of
from midflight.types import StalePolicy


def batch_rollouts(rollout: RolloutSection) -> int:
    """B * n: rollouts one step trains on."""
    return rollout.groups_per_step * rollout.group_size


def most_in_flight(rollout: RolloutSection) -> int:
    """Rollouts that may run at once, without regard to the engines' slots: `max_in_flight`, else (S
    + 1) * B * n, which is the most that admission can let in.
    """
    return rollout.max_in_flight or (rollout.max_staleness + 1) * batch_rollouts(rollout)


def in_flight(config: Config, slots: int | None = None) -> int:
    """Rollouts running at once: `max_in_flight`, else one for each of the engines' `slots`, and n -
    1 more, because a group starts when one slot is free. Each has a session of the gateway.
    """
    rollout = config.rollout
    if slots is None:
        slots = engine_slots(config)
    fill_the_slots = max(1, slots) + rollout.group_size - 1
    sessions = config.gateway.max_sessions
    return rollout.max_in_flight or min(most_in_flight(rollout), fill_the_slots, sessions)


def buffer_groups(rollout: RolloutSection) -> int:
    """Finished groups that may wait: `buffer_groups`, else (S + 1) * B, with which the buffer is
    never the limit.
    """
    return rollout.buffer_groups or (rollout.max_staleness + 1) * rollout.groups_per_step


def buffer_bytes(shards: int) -> int:
    """Returns the memory that finished rollouts of one of so many shards may take: together a
    quarter of the memory of this machine, or of its container.
    """
    return machine_bytes() // 4 // shards


def machine_bytes() -> int:
    """Memory of this machine, or of its container if that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = Path("/sys/fs/cgroup/memory.max")
    allowed = container.read_text().strip() if container.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def trains_truncated(config: Config, *, trainer_is_ours: bool) -> bool:
    """True if turns sampled with top-p, top-k or min-p are trained when engines record the kept
    ids. Beside a teacher they are not, because it scores tokens over the whole vocabulary.
    """
    if config.distillation.teacher is not None:
        return False
    asked = config.correction.sampling_masks
    return trainer_is_ours if asked is None else asked


def batch_bytes(config: Config) -> int:
    """The size of the rows of one batch whose rollouts all fill the context."""
    return batch_rollouts(config.rollout) * config.model.max_context * ROW_BYTES_PER_TOKEN


def min_group_size(rollout: RolloutSection) -> int:
    """Scored rollouts a group needs: `min_group_size`, else ceil(n / 2)."""
    return rollout.min_group_size or math.ceil(rollout.group_size / 2)


@dataclass(frozen=True, slots=True)
class Staleness:
    """The largest age that a trained token can have, in versions, and the cost of the bound
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
    price = _PRICES[rollout.stale_policy]
    if rollout.max_staleness == 0:
        price = "none: each batch is sampled under the version it trains"
    return Staleness(rollout.max_staleness, price)


def num_engines(engine: EngineSection) -> int:
    """Engines of the run: the servers attached, else the processes started, of which the last may
    be lent.
    """
    return (len(engine.urls or engine.servers) or engine.count) + engine.lend


MAX_WORKERS = 8
"""The most processes by default: more would rarely be busy, and each takes memory."""


def num_workers(environment: EnvironmentSection) -> int:
    """Processes that run agents; with 0 they run in the rollout process. The default is half as
    many as cores, two at least.
    """
    agent = agent_of(environment)
    if environment.workers is not None:
        return 0 if agent == CLAIMED else environment.workers
    if agent in (SINGLE_TURN, CLAIMED) and not environment.rewards:
        return 0
    half_the_cores = (os.cpu_count() or 1) // 2
    return min(MAX_WORKERS, max(2, half_the_cores))


def engine_slots(config: Config) -> int:
    """Requests decoded together by all engines of the policy."""
    engines = num_engines(config.engine) - config.environment.untracked.engines
    return engines * config.engine.max_running


def served_dtype(config: Config) -> str:
    """Precision of the weights in engines, and on their way there."""
    return config.engine.served_dtype(config.model.dtype)


def lora_alpha(lora: LoraSection) -> float:
    """The output of adapters is scaled by this over the rank: `alpha`, else 2 * rank."""
    return lora.alpha or 2 * (lora.rank or 0)


def engine_python(engine: EngineSection) -> Path:
    """Interpreter of the server's environment: `python`, else the one that `make engines` makes.
    The path is not resolved: a link leads to another environment.
    """
    return engine.python or Path(f".venv-{engine.kind}/bin/python")


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """One kind of process. `threads` is how many compute in each of them."""

    process: str
    count: int
    threads: int
    device: str
    task: str


def placement(config: Config) -> tuple[ProcessCount, ...]:
    """The processes of a run, kind by kind."""
    holds = "gateway, buffer, store"
    if not num_workers(config.environment):
        holds += ", agents"
    return (
        ProcessCount("launcher", 1, 0, "cpu", "starts and supervises the others, terminal"),
        ProcessCount("rollout", config.gateway.shards, 1, "cpu", holds),
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
    generates = f"generates, {engine.max_running} requests together"
    if engine.lend:
        generates += ", the last while the trainer waits"
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
    if not number:
        return ()
    return (ProcessCount("worker", number, 1, "cpu", f"agents of {agent_of(environment)}"),)


def _teacher_place(config: Config) -> tuple[ProcessCount, ...]:
    if config.distillation.teacher is None:
        return ()
    engine = config.engine
    scores = "scores what the engines generate"
    return (ProcessCount("teacher", 1, engine.threads, engine.device, scores),)


def computing_threads(config: Config) -> int:
    """Threads of engines, teacher and trainer that compete for CPU cores. A process on a GPU counts
    as one; a server that others started does not count.
    """
    total = 0
    for place in placement(config):
        if place.process in ("engine", "teacher", "trainer"):
            threads = place.threads if place.device == "cpu" else min(place.threads, 1)
            total += place.count * threads
    return total


def core_note(config: Config, cores: int) -> str | None:
    """A warning if engines and trainer want more cores than there are."""
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
    )


def engines_option(config: Config) -> str:
    """The option that says how many engines there are."""
    if config.engine.urls:
        return "engine.urls"
    if config.engine.servers:
        return "engine.servers"
    return "engine.count"


def trained_parameters(config: Config, sizes: ModelSizes) -> int:
    """Parameters that the trainer changes: all, or those of the adapters."""
    if config.lora.rank is None:
        return sizes.num_parameters
    return sizes.num_adapter_parameters(config.lora.rank)


def handed_bytes(config: Config, sizes: ModelSizes) -> int:
    """The size of one version on its way to the engines."""
    return trained_parameters(config, sizes) * element_bytes(served_dtype(config))
