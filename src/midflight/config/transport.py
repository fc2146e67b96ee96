"""The transport of weights that a run gets if none is named."""

from typing import Literal

from midflight.config.derived import handed_bytes, model_sizes, num_engines
from midflight.config.sections import Config
from midflight.errors import ModelNotFound

Transport = Literal["shared_memory", "pull", "direct"]

LARGE_BYTES = 2**30
"""A version of this size takes a server's own loader a second or more, in a pause. To swap it takes
milliseconds.
"""
MANY_ENGINES = 8
"""The number of engines over machines from which servers pull what they would otherwise get in one
broadcast: it saves the trainer's link, for two and a half times the CPU of an engine.
"""


BY_HANDLES = (
    "the servers' workers read it on the trainer's GPU, and none of it goes through host memory"
)
CUDA_IPC = "CUDA IPC"


def chosen_transport(config: Config) -> tuple[Transport, str]:
    """The transport that `weights.transport = "auto"` stands for in this run, and why, in words."""
    handles = may_use_handles(config)
    way, why = way_of_weights(
        num_bytes=version_bytes(config),
        num_engines=num_engines(config.engine),
        swaps=_may_swap(config),
        over_machines=config.cluster.kind != "local",
        handles=handles,
    )
    return way, f"{why} ({handles_in_words(config)})" if handles else why


def handles_in_words(config: Config) -> str:
    """The name of the way by handles, with what of it this run would be the first to try: it was
    run on one GPU.
    """
    if not config.engine.shares_devices:
        return f"{CUDA_IPC}, untested between two GPUs"
    return CUDA_IPC


def may_use_handles(config: Config) -> bool:
    """True if servers may read whole versions on the GPU of the trainer, by handles of CUDA IPC: all
    are on one machine, and the trainer has one rank, which has all of a version.

    Two GPUs also have NCCL, by which a server's own engine receives, unless it is turned off. In
    turns engines take a version while they have no keys, out of the trainer's own weights: so each
    step must make one.
    """
    engine = config.engine
    return (
        _takes_whole_versions(config)
        and config.cluster.kind == "local"
        and not engine.urls
        and not config.weights.delta
        and config.trainer.ranks == 1
        and _is_cuda(config.trainer.device)
        and _is_cuda(engine.device)
        and (engine.shares_devices or not config.weights.server_engine)
        and (not engine.takes_turns or config.weights.every == 1)
    )


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def _may_swap(config: Config) -> bool:
    """True if servers can have a whole version beside the one that they serve. One that sleeps has
    no memory for it.
    """
    return _takes_whole_versions(config) and not config.engine.takes_turns


def _takes_whole_versions(config: Config) -> bool:
    return config.engine.kind != "embedded" and config.lora.rank is None


def version_bytes(config: Config) -> int:
    """The size of one version on its way; 0 if there is no such model, which is an error
    elsewhere.
    """
    try:
        return handed_bytes(config, model_sizes(config.model))
    except ModelNotFound:
        return 0


def way_of_weights(
    *,
    num_bytes: int,
    num_engines: int,
    swaps: bool,
    over_machines: bool,
    handles: bool = False,
) -> tuple[Transport, str]:
    """The transport for a version of `num_bytes`, and why. `swaps`: engines are servers that take
    whole versions. `handles`: they read them on the trainer's GPU, which is `direct` at any size.

    | engines | a version has | on one machine | over machines, fewer than `MANY_ENGINES` | over machines, more |
    |---|---|---|---|---|
    | servers | `LARGE_BYTES` or more | direct | direct | pull |
    | servers | less, or is adapters | shared_memory | pull | pull |
    | embedded | any size | shared_memory | pull | pull |
    """
    if handles:
        return "direct", BY_HANDLES
    are_many = over_machines and num_engines >= MANY_ENGINES
    if swaps and num_bytes >= LARGE_BYTES and not are_many:
        why = (
            "a server would pause long to load so much, and only swaps what came straight to its "
            "workers"
        )
        return "direct", why
    if over_machines:
        return "pull", "engines on other machines ask for it, and give it to each other"
    return "shared_memory", "engines on the trainer's machine map what it has written"
