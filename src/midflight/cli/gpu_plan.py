"""The part of a dry run about GPUs that options describe (`--gpus 8 --gpu h100`): the places of the
processes, the command lines of the servers, the groups of processes, the memory of each GPU at its
fullest moment, and the way of a version.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midflight.cli.tables import new_table
from midflight.config import Config
from midflight.config.context import default_context
from midflight.config.derived import engine_python, model_sizes, num_engines, served_dtype
from midflight.config.devices import VISIBLE
from midflight.config.gpu_memory import TURNS, GpuMemory, gpu_memory, is_server, server_layout
from midflight.config.gpus import GPUS_OF_A_MACHINE, DescribedGpus, described_map
from midflight.config.memory import memory_estimate
from midflight.config.seats import (
    DeviceAssignment,
    by_handles,
    by_server_engine,
    config_in_place,
    server_of,
    stays_on_gpus,
)
from midflight.config.transport import handles_in_words
from midflight.config.version_ways import (
    MEMORY,
    SHARED,
    HostNeed,
    most_shared,
    num_workers_of_servers,
    version_needs,
    version_ways,
)
from midflight.engines.servers.command import ServedModel, server_command
from midflight.models.sizes import num_experts_of, reads_more_than_text
from midflight.observe.readable import size

PORT = 0
"""The port of a server in the plan. A start takes a free one."""
_OF_THE_MACHINE = ("PATH", "PYTHONPATH")
"""Variables of a server that name folders of the machine that it is started on."""


def gpu_plan(
    config: Config, gpus: DescribedGpus, longest_prompt: int | None
) -> Iterator[RenderableType]:
    """Yields the tables of the plan, from the kind of GPU to the memory of the machines."""
    laid = described_map(config, gpus)
    found = gpu_memory(config, gpus, laid)
    yield _kind(gpus)
    yield _places(gpus, laid)
    yield from _launch_lines(config, laid)
    yield _groups(config)
    yield _gpu_memory(gpus, found, in_turns=config.engine.takes_turns)
    yield _ways(config, gpus)
    yield _machine_memory(config, laid, longest_prompt)


def plan_notes(config: Config, gpus: DescribedGpus) -> Iterator[str]:
    """Remarks on a plan that may surprise."""
    laid = described_map(config, gpus)
    used = {(part.host, device) for part in laid for device in part.devices}
    idle = gpus.number - len(used)
    if not used:
        yield (
            f"no process computes on the {gpus.number} GPUs: engine.device is "
            f"{config.engine.device!r} and trainer.device is {config.trainer.device!r}; set them "
            'to "cuda".'
        )
    elif idle:
        yield (
            f"{idle} of {gpus.number} GPUs have no process; raise trainer.ranks or engine.count, "
            "or add engine.servers."
        )
    if config.cluster.kind == "local" and gpus.number > GPUS_OF_A_MACHINE:
        yield (
            f"{gpus.number} GPUs are planned on one machine, and most have {GPUS_OF_A_MACHINE}; "
            "set cluster.kind for several machines."
        )
    context = default_context(config)
    if context is not None and context[0] == config.model.max_context < context[1]:
        yield (
            f"model.max_context ({config.model.max_context:,}) may follow from the memory of this "
            "machine, which the plan is not for; set it."
        )
    for way in version_ways(config, gpus):
        if way.transport == config.weights.transport and way.parts:
            seconds = way.slowest.seconds
            option = "commit_seconds" if by_server_engine(config) else "stage_seconds"
            given: float = getattr(config.weights, option)
            if seconds > given:
                yield (
                    f"a version is estimated to take {seconds:,.0f} s by {way.transport}, and "
                    f"weights.{option} is {given:g}; raise it."
                )


def _kind(gpus: DescribedGpus) -> Table:
    kind = gpus.kind
    table = new_table(f"{gpus.number} x {kind.name}, as options say")
    table.add_row("kind", kind.title)
    table.add_row("memory", f"{size(kind.memory_bytes)}, read with {kind.memory_speed:,} GB/s")
    nvlink = f"{kind.nvlink_speed:,} GB/s each way" if kind.nvlink_speed else "none"
    table.add_row("NVLink", nvlink)
    table.add_row("PCIe", f"{kind.pcie_speed:,} GB/s each way")
    return table


# --- Places ---------------------------------------------------------------------------------------


def _places(gpus: DescribedGpus, laid: Sequence[DeviceAssignment]) -> Table:
    table = new_table("GPUs", "host", "device", "who")
    for part in sorted(laid, key=lambda part: (_natural(part.host), part.devices)):
        table.add_row(escape(part.host), _joined(part.devices), part.who)
    if not laid:
        table.add_row("none", "", f"0 of {gpus.number} are used")
    return table


def _natural(host: str) -> tuple[str, int]:
    """The order of hosts: `machine 2` comes before `machine 10`."""
    name, _, number = host.rpartition(" ")
    return (name, int(number)) if number.isdecimal() else (host, 0)


def _joined(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


# --- Servers --------------------------------------------------------------------------------------


def _launch_lines(config: Config, laid: Sequence[DeviceAssignment]) -> Iterator[Table]:
    """Yields a table of the command lines, each with the servers that have it."""
    if not is_server(config):
        return
    devices = {part.who: part.devices for part in laid}
    starts = defaultdict[str, list[str]](list)
    for number in range(num_engines(config.engine)):
        name = f"engine{number}"
        starts[_line(config, name)].append(_start(name, devices.get(name, ())))
    table = new_table(
        "launch lines of the servers, with a free port in the place of 0; PATH and PYTHONPATH are "
        "left out",
        "server",
        "line",
    )
    for line, those in starts.items():
        table.add_row(Text("\n".join(those)), Text(line))
    yield table


def _start(name: str, devices: Sequence[int]) -> str:
    """The name of a server, and the devices that it sees."""
    return f"{name}: {VISIBLE}={','.join(map(str, devices))}" if devices else name


def _line(config: Config, name: str) -> str:
    """The command that starts the server, without the variable that names its devices."""
    own = config_in_place(config, name)
    command = server_command(
        own.engine, _served(config), python=engine_python(config.engine), port=PORT, inherited={}
    )
    settings: list[str] = []
    for key, value in command.environ.items():
        if key not in _OF_THE_MACHINE:
            settings.append(f"{key}={value}")
    return shlex.join([*settings, *command.argv])


def _served(config: Config) -> ServedModel:
    """The model that a server starts with, as the run will write it into its folder."""
    dtype = served_dtype(config)
    path = config.model.path
    lora = config.lora
    has_adapters = lora.rank is not None and not lora.merged
    replays = path is not None and config.correction.routing_replay
    return ServedModel(
        folder=Path(config.run.folder) / "start",
        name=config.model.name,
        dtype=dtype,
        max_context=config.model.max_context,
        kv_bytes_per_token=model_sizes(config.model).kv_bytes_per_token(dtype),
        version=0,
        num_adapters=config.rollout.max_staleness + 2 if has_adapters else 0,
        rank=(lora.rank or 0) if has_adapters else 0,
        targets=lora.targets or ("all",),
        records_experts=replays and path is not None and num_experts_of(path) > 0,
        has_other_towers=path is not None and reads_more_than_text(path),
    )


# --- Groups of processes --------------------------------------------------------------------------


def _groups(config: Config) -> Table:
    """The groups of processes that send each other tensors."""
    table = new_table(
        "process groups; those with NCCL are untested on a GPU", "group", "by", "ranks", "members"
    )
    ranks = config.trainer.ranks
    if ranks > 1:
        by = "gloo" if config.trainer.device == "cpu" else "NCCL; gloo for tensors in memory"
        members = f"trainer to trainer{ranks - 1}"
        table.add_row("steps of the trainer", by, str(ranks), members)
        table.add_row("orders of the first rank", "gloo", str(ranks), members)
    if is_server(config):
        for row in _server_groups(config):
            table.add_row(*row)
    if config.weights.transport == "direct":
        workers = num_workers_of_servers(config)
        by = "NCCL; gloo where a GPU has no room" if stays_on_gpus(config) else "gloo"
        if by_handles(config):
            by = f"{handles_in_words(config)}; gloo where a worker cannot"
        members = f"trainer, {workers} workers of the servers"
        if by_server_engine(config):
            by = f"the servers' own engines by {by}"
            members += ", a group for each server"
        table.add_row("versions, direct", by, str(workers + 1), members)
    if not table.row_count:
        table.add_row("none", "", "", "no process sends tensors in a group")
    return table


def _server_groups(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """A row for the servers that are laid over several processes, for each way of doing so."""
    by = "gloo" if config.engine.device == "cpu" else "NCCL"
    alike = defaultdict[tuple[str, str], list[str]](list)
    for number in range(num_engines(config.engine)):
        name = f"engine{number}"
        layout = server_layout(config.engine, server_of(config, name))
        if layout.num_processes > 1:
            words = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
            alike[words, str(layout.num_processes)].append(name)
    for (words, processes), names in alike.items():
        last = f" to {names[-1]}, each" if len(names) > 1 else ""
        yield (f"a server's own: {words}", by, processes, names[0] + last)


# --- Memory ---------------------------------------------------------------------------------------


def _gpu_memory(gpus: DescribedGpus, found: Sequence[GpuMemory], *, in_turns: bool) -> Table:
    """Each GPU at its fullest moment, or at each moment if engines and trainer take turns. GPUs
    with the same on them share their rows.
    """
    when = "at each moment" if in_turns else "at its fullest moment"
    table = new_table(
        f"memory of each GPU {when}, estimated, not measured; untested on a GPU",
        "GPUs",
        "moment" if in_turns else "fullest",
        "whose",
        "what",
        "size",
        "together",
    )
    memory = gpus.kind.memory_bytes
    for own in _alike(found, in_turns=in_turns):
        for moment in TURNS if in_turns else (own[0].fullest,):
            items = own[0].at(moment)
            taken = own[0].taken(moment)
            together = f"{size(taken)} of {size(memory)}, {taken / memory:.0%}"
            for number, item in enumerate(items):
                is_first = number == 0
                is_last = number == len(items) - 1
                table.add_row(
                    escape(_names(own)) if is_first else "",
                    moment if is_first else "",
                    item.part,
                    item.what,
                    size(item.num_bytes),
                    together if is_last else "",
                )
    if not found:
        table.add_row("none", "", "", "", "", "")
    return table


def _alike(found: Sequence[GpuMemory], *, in_turns: bool) -> Sequence[Sequence[GpuMemory]]:
    """The GPUs in groups of those that have the same on them at their fullest moment, or at all
    moments.
    """
    groups = defaultdict[tuple[object, ...], list[GpuMemory]](list)
    for gpu in found:
        shown = gpu.items if in_turns else gpu.at_fullest
        items = tuple((item.part, item.what, item.num_bytes) for item in shown)
        key = (gpu.fullest, items)
        groups[key].append(gpu)
    return list(groups.values())


def _names(gpus: Sequence[GpuMemory]) -> str:
    """`this machine: 0-3`, or `machine 1, machine 2: 0-7` where hosts have the same."""
    devices = defaultdict[str, list[int]](list)
    for gpu in gpus:
        devices[gpu.host].append(gpu.device)
    hosts = defaultdict[str, list[str]](list)
    for host, own in devices.items():
        hosts[_ranges(own)].append(host)
    return "; ".join(f"{', '.join(those)}: {own}" for own, those in hosts.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, those in a row as `0-3`."""
    words: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        words.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    return ", ".join(words)


def _ways(config: Config, gpus: DescribedGpus) -> Table:
    """The way of a version by each transport."""
    table = new_table(
        "a version's way by transport, estimated, not measured",
        "transport",
        "bytes",
        "slowest part",
        "speed",
        "seconds",
    )
    for way in version_ways(config, gpus):
        name = way.transport
        if name == config.weights.transport:
            name = f"{name} (chosen)"
        if way.why_not:
            table.add_row(name, "", way.why_not, "", "")
            continue
        slowest = way.slowest
        table.add_row(
            name,
            f"{slowest.num_bytes:,}",
            slowest.words,
            f"{slowest.speed:g} GB/s",
            _seconds(slowest.seconds),
        )
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _machine_memory(
    config: Config, laid: Sequence[DeviceAssignment], longest_prompt: int | None
) -> Table:
    """What a run takes of the memory of its machines, and of their `/dev/shm`, in all of them
    together.
    """
    sizes = model_sizes(config.model)
    needs: list[HostNeed] = []
    for item in memory_estimate(config, sizes, longest_prompt=longest_prompt):
        if item.on_gpu or item.num_bytes == 0:
            continue
        if item.where != "shared memory":
            needs.append(HostNeed(MEMORY, f"{item.where}: {item.what}", item.num_bytes))
        elif config.weights.transport != "shared_memory":
            needs.append(HostNeed(MEMORY, f"trainer: {item.what}", item.num_bytes))
    needs += version_needs(config, sizes)
    table = new_table(
        "memory of the machines, all together, estimated, not measured",
        "where",
        "what",
        "size",
        "together",
    )
    for where in (SHARED, MEMORY):
        own = [need for need in needs if need.where == where]
        if not own:
            table.add_row(where, "nothing", size(0), size(0))
        for number, need in enumerate(own):
            is_last = number == len(own) - 1
            together = size(sum(each.num_bytes for each in own)) if is_last else ""
            table.add_row("" if number else where, need.what, size(need.num_bytes), together)
    if config.cluster.kind != "local":
        most = _most_engines(laid)
        taken = most_shared(config, sizes, engines_there=most)
        table.add_row(SHARED, f"of one machine, with {most} of the engines", "", size(taken))
    return table


def _most_engines(laid: Sequence[DeviceAssignment]) -> int:
    """The most engines that are on one machine."""
    engines = Counter(part.host for part in laid if part.who.startswith("engine"))
    return max(engines.values(), default=0)
