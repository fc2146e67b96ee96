"""Checks of torch, and of the devices that a run computes on. Torch is asked in a process of its
own, because a broken library may crash its process.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from midflight.config.seats import device_map
from midflight.config.sections import Config
from midflight.observe.readable import size
from midflight.run.launcher.checks.check import (
    Caller,
    Finding,
    Plan,
    TorchFound,
    error,
    ok,
    warning,
)
from midflight.run.launcher.trial import STALL_SECONDS, TrialFailed, TrialWait, answer_of

PROBE_TORCH = """
import json, torch
seen = torch.cuda.is_available()
named = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if seen else []
(torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [[d.name, d.total_memory] for d in named]}))
"""


def torch(plan: Plan) -> Iterator[Finding]:
    """Says which torch there is, and which devices it sees. A dry run for CPUs does not ask: the
    import takes seconds of a processor, and the start asks in any case.
    """
    if plan.caller is Caller.DRY_RUN and not _wanted(plan.config):
        return
    command = [sys.executable, "-c", PROBE_TORCH]
    try:
        answer = answer_of(command, TrialWait("importing torch", STALL_SECONDS))
    except TrialFailed as failed:
        last = str(failed).splitlines()[-1]
        yield error(
            "torch",
            f"cannot be used: {last}",
            "install it again, in the build for this machine",
        )
        return
    found = plan.loaded.torch = msgspec.json.decode(answer, type=TorchFound)
    build = f"CUDA {found.cuda}" if found.cuda else "built for the CPU"
    yield ok("torch", f"{found.torch}, {build}")
    for number, (name, memory) in enumerate(found.devices):
        yield ok(f"cuda:{number}", f"{name}, {size(memory)}")
    if not found.devices and Path("/dev/nvidia0").exists():
        yield warning(
            "devices",
            "there is a GPU (/dev/nvidia0) that torch does not see",
            "install a CUDA build of torch, and look at the driver with nvidia-smi; without, "
            "everything runs on the CPU",
        )


def devices(plan: Plan) -> Iterator[Finding]:
    """Checks that the GPUs of trainer and engines are there, and enough for all of them."""
    wanted = _wanted(plan.config)
    found = plan.loaded.torch
    if not wanted or found is None:
        return
    count = len(found.devices)
    if count:
        device_map(plan.config, number=count)
        return
    for key, device in wanted.items():
        yield error(
            key,
            f"{key} is {device!r}, which this machine has not got; set it to cpu: torch sees no GPU.",
        )


def _wanted(config: Config) -> dict[str, str]:
    """The GPUs that the configuration names, by their options."""
    if config.cluster.kind != "local":
        return {}
    named = {"trainer.device": config.trainer.device}
    if not config.engine.urls:
        named["engine.device"] = config.engine.device
    return {key: device for key, device in named.items() if device.startswith("cuda")}
