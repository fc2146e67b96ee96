"""The check that a run fits the GPUs that options of a dry run describe."""

from collections.abc import Iterator, Sequence

from midflight.config.gpu_memory import (
    SHARE_OPTIONS,
    GpuMemory,
    ServerMemory,
    gpu_memory,
    is_server,
    wider_server,
)
from midflight.config.gpus import DescribedGpus, described_map
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.readable import size
from midflight.run.launcher.checks.check import Plan


def described_gpus(plan: Plan) -> None:
    """Raises `ConfigError` unless the processes find GPUs, and have room on each at its fullest
    moment.
    """
    gpus = plan.gpus
    if gpus is None:
        return
    found = gpu_memory(plan.config, gpus, described_map(plan.config, gpus))
    problems = list(gpu_misfits(plan.config, gpus, found))
    if problems:
        raise ConfigError("\n".join(problems))


def gpu_misfits(config: Config, gpus: DescribedGpus, found: Sequence[GpuMemory]) -> Iterator[str]:
    """A sentence for each way in which a GPU is too small, with the option to change. GPUs that
    are too small in the same way are named together.
    """
    alike: dict[str, list[GpuMemory]] = {}
    for gpu in found:
        for words in _misfits(config, gpus, gpu):
            alike.setdefault(words, []).append(gpu)
    for words, those in alike.items():
        others = len(those) - 1
        named = those[0].name
        if others:
            named += f", as {others} other{'' if others == 1 else 's'},"
        yield f"{named} {words}"


def _misfits(config: Config, gpus: DescribedGpus, gpu: GpuMemory) -> Iterator[str]:
    memory = gpus.kind.memory_bytes
    moment = gpu.fullest
    taken = gpu.taken(moment)
    for who in dict.fromkeys(item.who for item in gpu.items):
        if who.startswith("engine") and is_server(config):
            yield from _too_few_keys(config, gpus, who)
    if taken <= memory:
        return
    largest = sorted(gpu.at_fullest, key=lambda item: -item.num_bytes)[:2]
    parts = [f"{size(item.num_bytes)} for {item.what} ({item.part})" for item in largest]
    yield (
        f"would take {size(taken)} {moment}, and a GPU of the kind {gpus.kind.name} has "
        f"{size(memory)}: {' and '.join(parts)}; {largest[0].remedy}."
    )


def _too_few_keys(config: Config, gpus: DescribedGpus, who: str) -> Iterator[str]:
    """A misfit if a server has no room for the keys and values of one row: it would not start."""
    server = ServerMemory(config, gpus, who)
    if server.keys < server.row:
        yield (
            f"leaves its server {size(max(0, server.keys))} for keys and values, of which a row of "
            f"{config.model.max_context:,} tokens takes {size(server.row)}: the server's share of "
            f"the {size(gpus.kind.memory_bytes)} is {server.share:g}, and its weights take "
            f"{size(server.weights)} on each GPU; {wider_server(config, who)}, or raise "
            f"{SHARE_OPTIONS[config.engine.kind]} in engine.arguments."
        )
