"""GPUs of one machine: the servers of a run that have devices of their own, and the pool that gives
them out. Nothing here imports torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.config.section import Count, Positive, Section
from midflight.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with the devices that a process sees, which it numbers from 0."""
_FILES = "nvidia[0-9]*"
"""Files of the devices that this machine, or this container, has: one for each."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM makes room. Adapters of another rank get the next one."""


class ServerSection(Section):
    """Each table is one engine. With `engine.urls` it says what to expect of one."""

    host: str = ""
    """Its machine of the cluster, by address. Default: any with room."""
    devices: tuple[Count, ...] = ()
    """Its GPUs on this machine. Default: free ones; on a cluster Ray chooses."""
    tensor_parallel: Positive = 1
    """GPUs over which a server shares each layer."""
    pipeline_parallel: Positive = 1
    """Groups of those, each with a share of the layers."""
    data_parallel: Positive = 1
    """Copies of all that in one server."""

    @property
    def world_size(self) -> int:
        """Processes that compute for it, each on a GPU if there are any."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A process's request for a number of GPUs, or for named ones. `option` is the option that
    names them.
    """

    who: str
    number: int
    option: str
    named: tuple[int, ...] = ()


class DevicePool:
    """The GPUs of one machine. Each is given to one process, or, if they are `shared`, to as few as
    possible.

    `number` is their number, or None if it is not known. Then there is no bound, or, if they are
    shared, there are as few as are named.
    """

    def __init__(self, number: int | None = None, *, shared: bool = False) -> None:
        self._number = number
        self._shared = shared
        self._owners = defaultdict[int, list[DeviceRequest]](list)

    def give_all(self, requests: Sequence[DeviceRequest]) -> Mapping[str, tuple[int, ...]]:
        """Gives devices to all requests. Named devices are given first, so that no other request
        gets them. The other requests get the lowest that are free, in order, side by side if
        possible. Raises `ConfigError` if two would have the same one, or if too few are left.
        """
        given: dict[str, tuple[int, ...]] = {}
        for request in requests:
            if request.named:
                given[request.who] = self._take(request, request.named)
        for request in requests:
            if not request.named:
                given[request.who] = self._take(request, self._free(request))
        return given

    def _take(self, request: DeviceRequest, devices: Iterable[int]) -> tuple[int, ...]:
        taken = tuple(devices)
        for device in taken:
            if self._number is not None and device >= self._number:
                raise ConfigError(
                    f"{request.option} gives GPU {device} to {request.who}, and this machine has "
                    f"{_gpus_of_machine(self._number)}; name others."
                )
            if taken.count(device) > 1:
                raise ConfigError(
                    f"{request.option} gives GPU {device} to {request.who} twice; name each once."
                )
            if self._owners[device] and not self._shared:
                other = self._owners[device][0]
                raise ConfigError(
                    f"GPU {device} would be given to both {other.who} ({other.option}) and "
                    f"{request.who} ({request.option}); name others, or set engine.share_devices = "
                    "true where they are to share it."
                )
            self._owners[device].append(request)
        return taken

    def _free(self, request: DeviceRequest) -> Sequence[int]:
        """The devices that a request gets."""
        number = request.number
        left = self._least_shared(number) if self._shared else self._unowned(number)
        if len(left) < number:
            remedy = "start fewer engines or trainer ranks"
            if not self._shared:
                remedy += ", or set engine.share_devices = true where processes are to share them"
            verb = "is" if len(left) == 1 else "are"
            raise ConfigError(
                f"{request.who} asks for {_count(number)} ({request.option}), and of this "
                f"machine's {_count(self._number or 0)} {len(left)} {verb} left; {remedy}."
            )
        for start in range(len(left) - number + 1):
            beside = left[start : start + number]
            if beside[-1] - beside[0] == number - 1:
                return beside
        return left[:number]

    def _least_shared(self, number: int) -> list[int]:
        """The devices with the fewest owners, ascending."""
        end = max([*self._owners, 0]) + 1 if self._number is None else self._number
        fewest_first = sorted(range(end), key=lambda device: (len(self._owners[device]), device))
        return sorted(fewest_first[:number])

    def _unowned(self, number: int) -> list[int]:
        """The devices without an owner, ascending; at least `number` if their count is not
        known.
        """
        end = max([*self._owners, -1]) + 1 + number if self._number is None else self._number
        return [device for device in range(end) if not self._owners[device]]


def _gpus_of_machine(number: int) -> str:
    if number == 0:
        return "none"
    return "GPU 0 alone" if number == 1 else f"GPUs 0 to {number - 1}"


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def num_present(inherited: Mapping[str, str], *, folder: Path = Path("/dev")) -> int:
    """The number of this machine's GPUs that we may use, as far as that is known without torch; 0
    if it is not.
    """
    listed = inherited.get(VISIBLE)
    if listed is None:
        return len(list(folder.glob(_FILES)))
    return len([one for one in listed.split(",") if one])


def visible(devices: Sequence[int], inherited: Mapping[str, str]) -> str:
    """The value of `VISIBLE` for a process that is to see only these devices. Their numbers count
    the devices that we see.
    """
    ours = [one for one in inherited.get(VISIBLE, "").split(",") if one]
    names: list[str] = []
    for device in devices:
        names.append(ours[device] if device < len(ours) else str(device))
    return ",".join(names)
