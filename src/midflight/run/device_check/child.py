"""The process of one part of a device's check: a fault of the device, or a hang, ends no other part.

    python -m midflight.run.device_check.child DEVICE FOLDER SECONDS ROOM PART

It writes `CheckedDevice` as JSON to its standard output, then a `DeviceTrial` for each thing that was tried, one a
line. After so many seconds it writes its stacks to standard error and ends. ROOM is the bytes of the device's memory
that it may take: other parts run beside it.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from midflight.errors import ConfigError
from midflight.run.device_check import (
    groups,
    handles,
    inside,
    kernels,
    sameness,
    servers,
    speeds,
    swaps,
    whole_run,
)
from midflight.run.device_check.bench import Bench
from midflight.run.device_check.lanes import num_lanes
from midflight.run.device_check.part_process import WRONG
from midflight.run.device_check.report import CheckedDevice, DeviceTrial
from midflight.run.device_check.table import FIRST, PARTS, segment_prefix
from midflight.version import described

Trials = Callable[[Bench], Iterator[DeviceTrial]]


def _of_server(name: str, kind: str) -> Mapping[str, Trials]:
    parts: Mapping[str, Callable[[servers.ServerBench], Iterator[DeviceTrial]]] = {
        name: servers.small,
        f"{name} on two GPUs": servers.on_two_gpus,
        f"{name} asleep": servers.asleep,
        f"{name} in a run": partial(servers.in_a_run, deterministic=False),
        f"{name} in a deterministic run": partial(servers.in_a_run, deterministic=True),
        f"{name} in real size": servers.real,
    }
    return {
        part: partial(servers.servers, kind=kind, trials=trials) for part, trials in parts.items()
    }


TRIALS: Mapping[str, Trials] = {
    FIRST: speeds.limits,
    "kernels of the trainer": kernels.trainer_kernels,
    "kernels of the embedded engine": kernels.engine_kernels,
    "versions in mid-answer": swaps.swaps,
    "taking a version back": swaps.take_back,
    "straight into a server's workers": inside.inside_workers,
    "two ranks": groups.groups,
    "a version in two processes": handles.by_handles,
    "determinism": sameness.sameness,
    "a step in one order": sameness.one_order,
    "speeds": speeds.speeds,
    "a whole run": whole_run.whole_run,
    "a whole run in real size": whole_run.real_run,
    **_of_server("vLLM", "vllm"),
    **_of_server("SGLang", "sglang"),
}


def main() -> int:
    device, folder, seconds, room, part = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    # prints of libraries must not come between the lines
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: CheckedDevice | DeviceTrial) -> None:
        out.write(msgspec.json.encode(message).decode() + "\n")
        out.flush()

    try:
        bench = Bench(
            existing(device),
            Path(folder),
            room=int(room),
            prefix=segment_prefix(Path(folder), part),
        )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    beside = 2 if PARTS[part].is_alone else num_lanes()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // beside))
    say(about(bench.device))
    for trial in TRIALS[part](bench):
        say(trial)
    return 0


def existing(name: str) -> torch.device:
    """The device of that name. Raises `ConfigError` if it is none, or is not here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device; give cuda, cuda:1 or cpu.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"--device {name} is not here: torch {torch.__version__} sees {count} GPUs; install "
                "the build of torch for your CUDA, look at nvidia-smi, or give --device cpu."
            )
        torch.cuda.set_device(device.index or 0)
        return torch.device("cuda", device.index or 0)
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # torch says in many ways that it has no such device
        raise ConfigError(f"--device {name} is not here: {error}") from error
    return device


def about(device: torch.device) -> CheckedDevice:
    title = platform.processor() or platform.machine()
    memory = 0
    if device.type == "cuda":
        title = torch.cuda.get_device_name(device)
        memory, _ = torch.cuda.mem_get_info(device)
    versions = {
        "Midflight": described(),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "transformers": metadata.version("transformers"),
    }
    return CheckedDevice(title, versions, memory)


if __name__ == "__main__":
    sys.exit(main())
