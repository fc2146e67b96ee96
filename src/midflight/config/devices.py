"""Which GPU is whose: the servers of a run that have devices of their own, and what hands out a
machine's. Nothing here imports torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.config.section import Count, Positive, Section
from midflight.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Of a process, the devices that it sees; it numbers them from 0."""
_FILES = "nvidia[0-9]*"
"""One for each device that this machine, or this container, has."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, for which vLLM makes room; others get the next."""


class ServerSection(Section):
    """One engine of a run whose engines differ, or have GPUs that are named. There are as many
    engines as there are of these, and with `engine.urls` these say what is expected of each."""

    host: str = ""
    """Address of the machine of the cluster that it is to be on. Default: any with room."""
    devices: tuple[Count, ...] = ()
    """Numbers of its GPUs on this machine, among those that the launcher may use; as many as the
    sizes below ask for. Default: what is free. On a cluster Ray chooses.
    """
    tensor_parallel: Positive = 1
    """GPUs over which a server shares each layer; larger fits a larger model, and answers
    sooner.
    """
    pipeline_parallel: Positive = 1
    """Groups of those, each with a share of the layers; larger fits a larger model."""
    data_parallel: Positive = 1
    """Copies of all that in one server; larger serves more requests at once."""
    arguments: tuple[str, ...] = ()
    """Further words for this server's command line, after those of `engine.arguments`."""

    @property
    def world_size(self) -> int:
        """Processes that compute for it, each on a GPU where there are any."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What a process asks for: so many, or those named. `option` is where they are named."""

    who: str
    number: int
    option: str
    named: tuple[int, ...] = ()


class DevicePool:
    """The GPUs of one machine. Each is given to one process, or, where they are `shared`, to the
    fewest that can be.

    `number` is how many there are; None is not known: then there is no bound, or, where they are
    shared, as few as are named.
    """

    def __init__(self, number: int | None = None, *, shared: bool = False) -> None:
        self._number = number
        self._shared = shared
        self._owners = defaultdict[int, list[DeviceRequest]](list)

    def give_all(self, requests: Sequence[DeviceRequest]) -> Mapping[str, tuple[int, ...]]:
        """Those named first, so that nobody else gets them; then the others in order, each the
        lowest that are free, side by side where there are such. `ConfigError` where two would have
        one, or where too few are left."""
        named = {
            request.who: self._take(request, request.named) for request in requests if request.named
        }
        return named | {
            request.who: self._take(request, self._free(request))
            for request in requests
            if not request.named
        }

    def _take(self, request: DeviceRequest, devices: Iterable[int]) -> tuple[int, ...]:
        taken = tuple(devices)
        for device in taken:
            if self._number is not None and device >= self._number:
                there = (
                    "none"
                    if not self._number
                    else "GPU 0 alone"
                    if self._number == 1
                    else f"GPUs 0 to {self._number - 1}"
                )
                raise ConfigError(
                    f"{request.option} gives GPU {device} to {request.who}, and this machine has "
                    f"{there}; name others."
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
        if self._shared:
            there = range(max([*self._owners, 0]) + 1 if self._number is None else self._number)
            left = sorted(
                sorted(there, key=lambda device: (len(self._owners[device]), device))[
                    : request.number
                ]
            )
        else:
            end = (
                max([*self._owners, -1]) + 1 + request.number
                if self._number is None
                else self._number
            )
            left = [device for device in range(end) if not self._owners[device]]
        if len(left) < request.number:
            shared = (
                ""
                if self._shared
                else ", or set engine.share_devices = true where processes are to share them"
            )
            raise ConfigError(
                f"{request.who} asks for {_count(request.number)} ({request.option}), and of this "
                f"machine's {_count(self._number or 0)} {len(left)} "
                f"{'is' if len(left) == 1 else 'are'} left; start fewer engines or trainer "
                f"ranks{shared}."
            )
        beside = (left[i : i + request.number] for i in range(len(left) - request.number + 1))
        return next(
            (run for run in beside if run[-1] - run[0] == request.number - 1),
            left[: request.number],
        )


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def num_present(inherited: Mapping[str, str], *, folder: Path = Path("/dev")) -> int:
    """GPUs of this machine that we may use, as far as that is known without torch; 0 where it is
    not.
    """
    listed = inherited.get(VISIBLE)
    return (
        len(list(folder.glob(_FILES)))
        if listed is None
        else len([one for one in listed.split(",") if one])
    )


def visible(devices: Sequence[int], inherited: Mapping[str, str]) -> str:
    """What a process gets as `VISIBLE` that is to see these alone, which count those that we
    see.
    """
    ours = [one for one in inherited.get(VISIBLE, "").split(",") if one]
    return ",".join(ours[device] if device < len(ours) else str(device) for device in devices)
