"""Whether a run fits what it runs on: processor cores, memory, and the width of its model. What
cannot be meant is refused, each in a sentence that says what there is; what is only much is
allowed, and said.

| refused | when |
|---|---|
| threads of one process, or of all that compute | more than `THREADS_PER_CORE` for each core |
| memory that is taken in any case, of all parts together | more than `CERTAIN_SHARE` times what there is |
| memory in the worst case, of one part | more than `WORST_SHARE` times what there is |
| the rank of adapters | more than the width of the model |

Four engines on two cores work, only slower. What lies on GPUs is not counted here.
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
)
from midflight.config.memory import MemoryItem, memory_estimate, total_bytes
from midflight.config.sections import Config
from midflight.config.sources import DATASET_HELDOUT, DATASET_SIZE
from midflight.errors import ModelNotFound
from midflight.models.sizes import ModelSizes
from midflight.observe.readable import size
from midflight.run.places.seated import Machine

THREADS_PER_CORE = 32
CERTAIN_SHARE = 2.0
"""The estimate counts pages twice that processes share, and a machine may have swap."""
LARGEST = 3
"""Parts that are named where memory is short."""
WORST_SHARE = 16.0
"""Rollouts are rarely all as long as the context allows at once."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run has. On a cluster `cores` and `memory_bytes` are of all machines together, and a
    process has those of one: `most_cores`.
    """

    where: str
    cores: int
    memory_bytes: int
    """0 is not known."""
    most_cores: int


def this_hardware() -> Hardware:
    cores = os.cpu_count() or 1
    return Hardware("this machine", cores, machine_bytes(), cores)


def hardware_of(machines: Sequence[Machine]) -> Hardware:
    """What a cluster has, as Ray counts it."""
    cores = [int(machine.resources.get("CPU", 0.0)) for machine in machines]
    memory = sum(machine.resources.get("memory", 0.0) for machine in machines)
    return Hardware("the cluster", sum(cores), int(memory), max(cores, default=0))


def misfits(config: Config, hardware: Hardware, *, trains: bool = True) -> Iterator[str]:
    """A sentence for each option that is absurd here, with the remedy. `trains`: our trainer is a
    part.
    """
    said = set[str]()
    for misfit in _misfits(config, hardware, trains=trains):
        if misfit.option not in said:
            yield misfit.sentence
        said.add(misfit.option)


@dataclass(frozen=True, slots=True)
class Misfit:
    """What is wrong with an option."""

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
    if hardware.memory_bytes:
        items = _of_memory(config, sizes, trains=trains)
        certain = [*_certain(items, config, hardware)]
        yield from certain or (*_worst(items, config, hardware), *_batch(config, hardware))


def memory_note(
    config: Config, hardware: Hardware, *, longest_prompt: int | None = None
) -> str | None:
    """Where the worst case is more than there is. None for a cluster, of which no machine has it
    all.
    """
    if config.cluster.kind != "local":
        return None
    worst = sum(
        item.num_bytes
        for item in memory_estimate(
            config, model_sizes(config.model), longest_prompt=longest_prompt
        )
        if not item.on_gpu
    )
    if worst <= hardware.memory_bytes:
        return None
    return (
        "with every slot full and every rollout as long as it can be, the parts would take "
        f"{size(worst)}, and {_memory_of(hardware)}: lower what is large in the estimate, or watch "
        "it."
    )


def memory_words(config: Config, hardware: Hardware, *, trains: bool) -> str:
    """The words for a user with too little memory: what there is, what the run takes at most, its
    largest parts, and the remedy.
    """
    # of a cluster no part has all of it
    there = f"{_memory_of(hardware)}, and " if config.cluster.kind == "local" else ""
    try:
        items = _of_memory(config, model_sizes(config.model), trains=trains)
    except ModelNotFound as missing:
        return f"{there}what the run takes is not known: {missing}"
    largest = sorted(items, key=lambda item: -item.num_bytes)[:LARGEST]
    parts = ", ".join(f"{size(item.num_bytes)} for {item.what} ({item.where})" for item in largest)
    options = [_grown(item.options, config) for item in largest if item.options]
    remedies = dict.fromkeys(_remedy(option) for option in options if _node(option, config) != 1)
    said = (
        f"{there}the parts of the run are estimated to take {size(total_bytes(items))} at "
        "most: "
        f"{parts} and others."
    )
    return (
        f"{said[0].upper()}{said[1:]} "
        f"{'; '.join([*remedies, 'end what else takes memory']).capitalize()}; or give it more."
    )


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
    if (
        wanted > THREADS_PER_CORE * hardware.cores
        and max(config.engine.threads, config.trainer.threads) <= most
    ):
        option = _grown(
            (engines_option(config), "trainer.ranks", "engine.threads", "trainer.threads"), config
        )
        there = _cores(hardware, hardware.cores)
        yield Misfit(
            option,
            (
                f"{_values((option,), config)}, so that {wanted:,} threads would compute, and "
                f"{there}; "
                "lower it."
            ),
        )


def _cores(hardware: Hardware, cores: int) -> str:
    largest = "the largest machine of " if cores < hardware.cores else ""
    return f"{largest}{hardware.where} has {cores} core{'s' * (cores > 1)}"


def _rank(config: Config, sizes: ModelSizes) -> Iterator[Misfit]:
    rank = config.lora.rank
    if rank is not None and rank > sizes.hidden_size:
        yield Misfit(
            "lora.rank",
            f"lora.rank is {rank:,}, and the layers of the model are {sizes.hidden_size:,} wide: "
            "adapters would be larger than what they adapt; lower it to at most "
            f"{sizes.hidden_size:,}, or remove [lora] to train all weights.",
        )


def _is_of_trainer(item: MemoryItem) -> bool:
    return item.where in ("trainer", "teacher", "shared memory")


def _batch(config: Config, hardware: Hardware) -> Iterator[Misfit]:
    """One batch must fit beside what runs, or there is never a step."""
    r = config.rollout
    room = hardware.memory_bytes // 4
    if r.buffer_bytes is None and batch_bytes(config) > WORST_SHARE * room:
        options = ("rollout.groups_per_step", "rollout.group_size", "model.max_context")
        yield Misfit(
            _grown(options, config),
            f"{_values(options, config)}: the rollouts of one step can take "
            f"{size(batch_bytes(config))}, and {_memory_of(hardware)}, of which a quarter is for "
            f"finished rollouts; {_remedy(_grown(options, config))}.",
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
    """All parts together. To blame is the option by which most of it grows."""
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
    """Of several options that multiply the one that is furthest above its default."""
    return max(options, key=lambda option: _times_default(option, config))


def _times_default(option: str, config: Config) -> float:
    """A folder, and whatever has no default number, comes before a number that is the default."""
    value = _node(option, config)
    default = _default(option)
    if not isinstance(value, int):
        return 0.0 if value is None else 1.5
    return value / default if isinstance(default, int) and default else value / 256


def _default(option: str) -> object:
    section, _, key = option.partition(".")
    if section == "environment" and key.startswith("sources."):
        return {"size": DATASET_SIZE, "heldout": DATASET_HELDOUT}.get(key.rpartition(".")[2])
    return _node(option, Config())


def _remedy(option: str) -> str:
    return (
        "choose a smaller model"
        if option in ("model.path", "distillation.teacher")
        else f"lower {option}"
    )


def _values(options: Sequence[str], config: Config) -> str:
    return ", ".join(f"{option} is {_value(option, config)}" for option in options)


def _value(option: str, config: Config) -> str:
    """As the configuration has it; a list by its length."""
    node = _node(option, config)
    return f"{node:,}" if isinstance(node, int) else "not set" if node is None else str(node)


def _node(option: str, config: Config) -> object:
    """The value of an option; of a list its length."""
    node: object = config
    for word in option.split("."):
        node = node[int(word)] if isinstance(node, tuple) else getattr(node, word)
    return len(node) if isinstance(node, tuple) else node
