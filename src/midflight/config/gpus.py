"""GPUs that options describe (`--gpus 8 --gpu h100`), in the place of those that a machine has:
their kinds, and the places of a run's processes on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midflight.config.seats import ANY_MACHINE, DeviceAssignment, device_map
from midflight.config.sections import Config
from midflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU. Speeds are the maker's, in 10^9 bytes a second, and for one direction where
    there are two. None of them was measured here.
    """

    name: str
    title: str
    memory_mb: int
    """MiB that `nvidia-smi` reports."""
    memory_speed: int
    """Reading its own memory."""
    nvlink_speed: int
    """To the other GPUs of its machine; 0 without NVLink."""
    pcie_speed: int
    """To the memory of its machine."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * 2**20


GPU_KINDS: Mapping[str, GpuKind] = {
    kind.name: kind
    for kind in (
        GpuKind("h100", "NVIDIA H100 80GB SXM", 81_559, 3_350, 450, 64),
        GpuKind("h200", "NVIDIA H200 SXM", 143_771, 4_800, 450, 64),
        GpuKind("b200", "NVIDIA B200", 183_359, 8_000, 900, 64),
        GpuKind("a100-80", "NVIDIA A100 80GB SXM", 81_920, 2_039, 300, 32),
        GpuKind("l40s", "NVIDIA L40S", 46_068, 864, 0, 32),
        GpuKind("4090", "NVIDIA GeForce RTX 4090", 24_564, 1_008, 0, 32),
    )
}
"""The kinds that `--gpu` takes, with the sources of their figures:

| figure | source |
|---|---|
| memory | what `nvidia-smi` reports for such a GPU: less than its name says |
| reading its memory | NVIDIA's data sheets of H100 SXM, H200 SXM, DGX B200, A100 80GB SXM, L40S; the architecture paper of Ada for RTX 4090 |
| NVLink | the same data sheets, which give both directions together (900, 1800 and 600): half of it |
| PCIe | 16 lanes of PCIe 5.0 (H100, H200, B200) or 4.0, before encoding and protocol |
"""
GPUS_OF_A_MACHINE = 8
"""The most GPUs of a machine of a cluster, as in DGX and HGX."""


@dataclass(frozen=True, slots=True)
class DescribedGpus:
    """So many GPUs of one kind, in all machines together."""

    number: int
    kind: GpuKind


def described_gpus(number: int | None, name: str | None, *, dry_run: bool) -> DescribedGpus | None:
    """The GPUs of `--gpus` and `--gpu`, or None without these. Raises `ConfigError` if they are not
    for a dry run, if one of the two is missing, or if there is no such kind.
    """
    if number is None and name is None:
        return None
    if not dry_run:
        given = f"--gpus {number}" if number is not None else f"--gpu {name}"
        raise ConfigError(
            f"{given} describes GPUs that this machine need not have, which is for a dry run: add "
            "--dry-run, or leave it out to train on the GPUs that are here."
        )
    kinds = ", ".join(GPU_KINDS)
    if number is None:
        raise ConfigError(f"--gpu {name} says which GPUs, and not how many; add --gpus, such as 8.")
    if name is None:
        raise ConfigError(f"--gpus {number} says how many GPUs; add --gpu with one of {kinds}.")
    kind = GPU_KINDS.get(name.lower())
    if kind is None:
        raise ConfigError(f"--gpu {name} is no kind that is known here; give one of {kinds}.")
    return DescribedGpus(number, kind)


def described_map(config: Config, gpus: DescribedGpus) -> Sequence[DeviceAssignment]:
    """The places of the processes on described GPUs. On one machine they are those of `device_map`.
    A cluster's machines have `GPUS_OF_A_MACHINE` each, and fill up in the order of the processes,
    which is near to Ray's own choice.

    Raises `ConfigError` if there are too few.
    """
    laid = device_map(config, number=gpus.number)
    if config.cluster.kind == "local":
        return laid
    machines = _machines(gpus.number)
    placed: dict[str, DeviceAssignment] = {}
    # a process that names its machine comes first, so that no other fills it
    for part in sorted(laid, key=lambda part: part.host == ANY_MACHINE):
        placed[part.who] = _place(part, machines, gpus)
    return [placed[part.who] for part in laid]


@dataclass(slots=True)
class _DescribedMachine:
    """A machine of a cluster that is described. Its GPUs are given from the lowest on."""

    name: str
    size: int
    is_named: bool = False
    """True if an option names it."""
    taken: int = 0


def _machines(number: int) -> Sequence[_DescribedMachine]:
    whole, rest = divmod(number, GPUS_OF_A_MACHINE)
    sizes = [GPUS_OF_A_MACHINE] * whole
    if rest:
        sizes.append(rest)
    return [
        _DescribedMachine(f"machine {index}", size) for index, size in enumerate(sizes, start=1)
    ]


def _place(
    part: DeviceAssignment, machines: Sequence[_DescribedMachine], gpus: DescribedGpus
) -> DeviceAssignment:
    """Gives a process the lowest free GPUs of its machine, or of the first with enough of them."""
    for machine in _candidates(part.host, machines):
        if machine.taken + part.number <= machine.size:
            devices = tuple(range(machine.taken, machine.taken + part.number))
            machine.taken += part.number
            return DeviceAssignment(part.who, machine.name, part.number, devices)
    asked = f"{part.who} asks for {part.number} GPU{'' if part.number == 1 else 's'}"
    if part.number > GPUS_OF_A_MACHINE:
        raise ConfigError(
            f"{asked}, and its seat is on one machine, which has {GPUS_OF_A_MACHINE}; lower the "
            "sizes of engine.servers."
        )
    raise ConfigError(
        f"{asked}, and no machine that it may be on has so many left of --gpus {gpus.number}; "
        "raise --gpus, or start fewer engines or trainer ranks."
    )


def _candidates(host: str, machines: Sequence[_DescribedMachine]) -> Sequence[_DescribedMachine]:
    """The machines that a process may be on. A host that options name is the first of the machines
    that has no such name yet.
    """
    if host == ANY_MACHINE:
        return machines
    for machine in machines:
        if machine.name == host:
            return [machine]
    for machine in machines:
        if not machine.is_named:
            machine.name = host
            machine.is_named = True
            return [machine]
    return []
