"""Checks that a run fits its hardware: processor cores, memory, and the width of its model.

A value that must be a mistake is refused, in a sentence that names the present hardware. One that
is only large is allowed, and the user is told.

| refused | when |
|---|---|
| threads of one process, or of all that compute | more than `THREADS_PER_CORE` for each core |
| memory that is taken in any case, of all parts together | more than `CERTAIN_SHARE` times the memory there |
| memory in the worst case, of one part | more than `WORST_SHARE` times the memory there |
| the rank of adapters | more than the width of the model |
| the memory of a worker | less than `WORKER_SHARE` of what it takes by itself |

Four engines on two cores work, only slower. Memory of GPUs is not counted here.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midflight.config.derived import (
    batch_bytes,
    computing_threads,
    engines_option,
    machine_bytes,
    model_sizes,
    num_workers,
)
from midflight.config.memory import MemoryItem, memory_estimate, total_bytes, worker_bytes
from midflight.config.sections import Config
from midflight.config.sources import DATASET_HELDOUT, DATASET_SIZE
from midflight.errors import ConfigError, ModelNotFound
from midflight.models.sizes import ModelSizes
from midflight.observe.readable import size
from midflight.run.launcher.checks.check import Caller, Plan
from midflight.run.places.cluster import Machine

THREADS_PER_CORE = 32
CERTAIN_SHARE = 2.0
"""The estimate counts pages twice that processes share, and a machine may have swap."""
LARGEST = 3
"""The number of parts that are named if memory is short."""
WORKER_SHARE = 0.5
"""The part of a worker's own memory that is surely data, and not files that it has mapped."""
WORST_SHARE = 16.0
"""Rollouts are rarely all as long as the context allows at once."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a run. On a cluster `cores` and `memory_bytes` are those of all machines
    together, and a process has the cores of one machine: `most_cores` at most. Numbers are 0 if
    they are not known.
    """

    where: str
    cores: int
    memory_bytes: int
    most_cores: int


UNKNOWN = Hardware("the machine", cores=0, memory_bytes=0, most_cores=0)
"""A machine that a plan is for. Its cores and memory are not known, and refuse nothing."""


def this_hardware() -> Hardware:
    cores = os.cpu_count() or 1
    return Hardware("this machine", cores, machine_bytes(), cores)


def hardware_of(machines: Sequence[Machine]) -> Hardware:
    """The hardware of a cluster, as Ray counts it."""
    cores = [int(machine.resources.get("CPU", 0.0)) for machine in machines]
    memory = sum(machine.resources.get("memory", 0.0) for machine in machines)
    return Hardware("the cluster", sum(cores), int(memory), max(cores, default=0))


def sizes(plan: Plan) -> None:
    """Raises `ConfigError` unless the run fits this machine. On a cluster that runs already,
    `cluster.check_cluster` looks at the machines.
    """
    config = plan.config
    if config.cluster.kind != "local" and config.cluster.address != "start":
        return
    hardware = UNKNOWN if plan.caller is Caller.PLAN else this_hardware()
    try:
        problems = list(misfits(config, hardware, trains=plan.trains))
    except ModelNotFound:  # said where the teacher is looked for
        return
    if problems:
        raise ConfigError("\n".join(problems))


def misfits(config: Config, hardware: Hardware, *, trains: bool = True) -> Iterator[str]:
    """A sentence for each option that is absurd here, with the remedy. `trains` is true if our
    trainer is a part of the run.
    """
    said = set[str]()
    for misfit in _misfits(config, hardware, trains=trains):
        if misfit.option not in said:
            yield misfit.sentence
        said.add(misfit.option)


@dataclass(frozen=True, slots=True)
class Misfit:
    """The fault of an option."""

    option: str
    sentence: str


def _misfits(config: Config, hardware: Hardware, *, trains: bool) -> Iterator[Misfit]:
    if hardware.cores:
        yield from _threads(config, hardware)
    try:
        sizes = model_sizes(config.model)
    except ModelNotFound:  # said where the model is looked for
        return
    yield from _rank(config, sizes)
    yield from _worker(config)
    if hardware.memory_bytes:
        yield from _memory(config, hardware, sizes, trains=trains)


def _memory(
    config: Config, hardware: Hardware, sizes: ModelSizes, *, trains: bool
) -> Iterator[Misfit]:
    items = _of_memory(config, sizes, trains=trains)
    certain = list(_certain(items, config, hardware))
    if certain:
        yield from certain
        return
    yield from _worst(items, config, hardware)
    yield from _batch(config, hardware)


def memory_note(
    config: Config, hardware: Hardware, *, longest_prompt: int | None = None
) -> str | None:
    """A sentence if the worst case is more than the memory there. None for a cluster, where no
    machine has it all.
    """
    if config.cluster.kind != "local":
        return None
    items = memory_estimate(config, model_sizes(config.model), longest_prompt=longest_prompt)
    worst = sum(item.num_bytes for item in items if not item.on_gpu)
    if worst <= hardware.memory_bytes:
        return None
    return (
        "with every slot full and every rollout as long as it can be, the parts would take "
        f"{size(worst)}, and {_memory_of(hardware)}: lower what is large in the estimate, or watch "
        "it."
    )


def memory_words(config: Config, hardware: Hardware, *, trains: bool) -> str:
    """Returns the text for a user with too little memory: the memory that there is, the most that
    the run takes, its largest parts, and the remedy.
    """
    # no part has all the memory of a cluster
    there = f"{_memory_of(hardware)}, and " if config.cluster.kind == "local" else ""
    try:
        items = _of_memory(config, model_sizes(config.model), trains=trains)
    except ModelNotFound as missing:
        return f"{there}what the run takes is not known: {missing}"
    largest = sorted(items, key=lambda item: -item.num_bytes)[:LARGEST]
    parts = ", ".join(f"{size(item.num_bytes)} for {item.what} ({item.where})" for item in largest)
    options = [_grown(item.options, config) for item in largest if item.options]
    lowered = [_remedy(option) for option in options if _node(option, config) != 1]
    remedies = [*dict.fromkeys(lowered), "end what else takes memory"]
    said = (
        f"{there}the parts of the run are estimated to take {size(total_bytes(items))} at most: "
        f"{parts} and others."
    )
    return f"{said[0].upper()}{said[1:]} {'; '.join(remedies).capitalize()}; or give it more."


def _of_memory(config: Config, sizes: ModelSizes, *, trains: bool) -> tuple[MemoryItem, ...]:
    """The items of the estimate that lie in the machine's own memory."""
    return tuple(
        item
        for item in memory_estimate(config, sizes)
        if not item.on_gpu and (trains or not _is_of_trainer(item))
    )


def _threads(config: Config, hardware: Hardware) -> Iterator[Misfit]:
    most = THREADS_PER_CORE * hardware.most_cores
    for option, threads in (
        ("engine.threads", config.engine.threads),
        ("trainer.threads", config.trainer.threads),
    ):
        if threads > most:
            there = _cores(hardware, hardware.most_cores)
            yield Misfit(
                option,
                f"{option} is {threads:,}, and {there}; lower it to at most {hardware.most_cores}.",
            )
    wanted = computing_threads(config)
    one_has_too_many = max(config.engine.threads, config.trainer.threads) > most
    if wanted > THREADS_PER_CORE * hardware.cores and not one_has_too_many:
        options = (engines_option(config), "trainer.ranks", "engine.threads", "trainer.threads")
        option = _grown(options, config)
        there = _cores(hardware, hardware.cores)
        yield Misfit(
            option,
            f"{_values((option,), config)}, so that {wanted:,} threads would compute, and "
            f"{there}; lower it.",
        )


def _cores(hardware: Hardware, cores: int) -> str:
    largest = "the largest machine of " if cores < hardware.cores else ""
    plural = "s" if cores > 1 else ""
    return f"{largest}{hardware.where} has {cores} core{plural}"


def _rank(config: Config, sizes: ModelSizes) -> Iterator[Misfit]:
    rank = config.lora.rank
    if rank is not None and rank > sizes.hidden_size:
        yield Misfit(
            "lora.rank",
            f"lora.rank is {rank:,}, and the layers of the model are {sizes.hidden_size:,} wide: "
            "adapters would be larger than what they adapt; lower it to at most "
            f"{sizes.hidden_size:,}, or remove [lora] to train all weights.",
        )


def _worker(config: Config) -> Iterator[Misfit]:
    """Yields a misfit if a worker by itself has more data than it may have."""
    environment = config.environment
    if environment.worker_mb is None or not num_workers(environment):
        return
    alone = worker_bytes(environment)
    if environment.worker_mb * 2**20 < WORKER_SHARE * alone:
        yield Misfit(
            "environment.worker_mb",
            f"environment.worker_mb is {environment.worker_mb}, and a worker takes about "
            f"{size(alone)} before it runs an agent; raise it to what agents may take beside that, "
            "or remove it.",
        )


def _is_of_trainer(item: MemoryItem) -> bool:
    return item.where in ("trainer", "teacher", "shared memory")


def _batch(config: Config, hardware: Hardware) -> Iterator[Misfit]:
    """Yields a misfit if one batch does not fit beside the parts that run. Without room for a batch
    there is never a step.
    """
    room = hardware.memory_bytes // 4
    if batch_bytes(config) > WORST_SHARE * room:
        options = ("rollout.groups_per_step", "rollout.group_size", "model.max_context")
        option = _grown(options, config)
        yield Misfit(
            option,
            f"{_values(options, config)}: the rollouts of one step can take "
            f"{size(batch_bytes(config))}, and {_memory_of(hardware)}, of which a quarter is for "
            f"finished rollouts; {_remedy(option)}.",
        )


def _worst(items: Sequence[MemoryItem], config: Config, hardware: Hardware) -> Iterator[Misfit]:
    for item in items:
        if not item.is_certain and item.num_bytes > WORST_SHARE * hardware.memory_bytes:
            option = _grown(item.options, config)
            yield Misfit(
                option,
                f"{_values(item.options, config)}: {item.what} ({item.where}) could take "
                f"{size(item.num_bytes)}, and {_memory_of(hardware)}; {_remedy(option)}.",
            )


def _certain(items: Sequence[MemoryItem], config: Config, hardware: Hardware) -> Iterator[Misfit]:
    """Looks at all parts together. The option is to blame by which most of the memory grows."""
    certain = tuple(item for item in items if item.is_certain)
    taken = total_bytes(certain)
    if taken <= CERTAIN_SHARE * hardware.memory_bytes:
        return
    grown = Counter[str]()
    for item in certain:
        if item.options:
            grown[_grown(item.options, config)] += item.num_bytes
    ((option, num_bytes),) = grown.most_common(1)
    yield Misfit(
        option,
        f"{_values((option,), config)}: the parts of the run would take {size(taken)}, "
        f"{size(num_bytes)} of it by this option, and {_memory_of(hardware)}; {_remedy(option)}.",
    )


def _memory_of(hardware: Hardware) -> str:
    return f"{hardware.where} has {size(hardware.memory_bytes)} of memory"


def _grown(options: Sequence[str], config: Config) -> str:
    """The one of several options that multiply which is furthest above its default."""
    return max(options, key=lambda option: _times_default(option, config))


def _times_default(option: str, config: Config) -> float:
    """The value of an option as a multiple of its default. A folder, or another value that is no
    number, comes before a number that is the default.
    """
    value = _node(option, config)
    default = _default(option)
    if value is None:
        return 0.0
    if not isinstance(value, int):
        return 1.5
    if isinstance(default, int) and default:
        return value / default
    return value / 256


def _default(option: str) -> object:
    section, _, key = option.partition(".")
    if section == "environment" and key.startswith("sources."):
        return {"size": DATASET_SIZE, "heldout": DATASET_HELDOUT}.get(key.rpartition(".")[2])
    return _node(option, Config())


def _remedy(option: str) -> str:
    if option in ("model.path", "distillation.teacher"):
        return "choose a smaller model"
    return f"lower {option}"


def _values(options: Sequence[str], config: Config) -> str:
    return ", ".join(f"{option} is {_value(option, config)}" for option in options)


def _value(option: str, config: Config) -> str:
    """The value as the configuration has it; of a list its length."""
    node = _node(option, config)
    if node is None:
        return "not set"
    if isinstance(node, int):
        return f"{node:,}"
    return str(node)


def _node(option: str, config: Config) -> object:
    """The value of an option; of a list its length."""
    node: object = config
    for word in option.split("."):
        node = node[int(word)] if isinstance(node, tuple) else getattr(node, word)
    return len(node) if isinstance(node, tuple) else node
