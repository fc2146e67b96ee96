"""Places of the parts of a run: the GPUs of each on one machine, and the resources of its seat on a
cluster.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from midflight.config.derived import num_engines
from midflight.config.devices import DevicePool, DeviceRequest, ServerSection
from midflight.config.engine import EngineSection
from midflight.config.sections import Config
from midflight.config.shards import workers_of_shard
from midflight.config.transport import chosen_transport, may_use_handles

Resources = Mapping[str, float]
_TENSOR_PARALLEL = re.compile(r"(?:--tensor-parallel-size|-tp|--tp-size|--tp)[= ](\d+)")


def with_placement(config: Config) -> Config:
    """The configuration with the transport of weights, which follows from a run's place and size
    if none is named.
    """
    weights = config.weights
    if weights.transport != "auto":
        return config
    transport, _ = chosen_transport(config)
    weights = weights.model_copy(update={"transport": transport})
    return config.model_copy(update={"weights": weights})


def engines_min(config: Config) -> int:
    """The number of engines that a run starts with."""
    return config.cluster.engines_min or num_engines(config.engine)


def seat_resources(config: Config) -> Mapping[str, Resources]:
    """The resources of one seat of each part, by the section's option."""
    cluster = config.cluster
    trainer = cluster.trainer
    if trainer is None:
        trainer = _computing(config.trainer.threads, config.trainer.device, gpus=1)
    rollout = cluster.rollout
    if rollout is None:
        rollout = {"CPU": 1.0 + workers_of_shard(config)}
    return {
        "engine": engine_resources(config, None),
        "trainer": trainer,
        "rollout": rollout,
    }


def engine_resources(config: Config, server: ServerSection | None) -> Resources:
    """The resources of the seat of one engine. Without a server, the seat would do for any of
    them.
    """
    engine = config.engine
    if config.cluster.engine is not None:
        return config.cluster.engine
    if engine.urls:
        return {"CPU": 1.0}
    servers: Sequence[ServerSection | None] = [server]
    if server is None and engine.servers:
        servers = engine.servers
    gpus = max(server_size(engine, one) for one in servers)
    return _computing(engine.threads, engine.device, gpus=gpus)


def engine_seats(config: Config) -> Sequence[Resources]:
    """The resources of the seats of engines and teacher, one by one."""
    servers: list[ServerSection | None] = list(config.engine.servers)
    if not servers:
        servers = [None] * num_engines(config.engine)
    if config.distillation.teacher is not None:
        servers.append(None)
    return [engine_resources(config, server) for server in servers]


def run_resources(config: Config) -> Resources:
    """The resources of all seats of a run together."""
    asked = seat_resources(config)
    seats = list(engine_seats(config))
    seats += [asked["trainer"]] * config.trainer.ranks
    seats += [asked["rollout"]] * config.gateway.shards
    total = defaultdict[str, float](float)
    for seat in seats:
        for name, amount in seat.items():
            total[name] += amount
    return total


def _computing(threads: int, device: str, *, gpus: int) -> Resources:
    resources = {"CPU": float(threads)}
    if device != "cpu":
        resources["GPU"] = float(gpus)
    return resources


def server_size(engine: EngineSection, server: ServerSection | None) -> int:
    """The number of GPUs of one server, from its command line, else from its section."""
    found = _TENSOR_PARALLEL.search(" ".join(engine.arguments))
    if found:
        return int(found[1])
    return 1 if server is None else server.world_size


def stays_on_gpus(config: Config) -> bool:
    """True if versions go from the trainer's GPUs to those of the servers, and through no host
    memory. By NCCL that is untested.

    If our plugin receives, beside running answers, no end may have another group of GPUs, whose
    kernels could wait for those of this one: one trainer rank, and servers of one GPU each. Copies
    by handles wait for nobody.
    """
    engine = config.engine
    if by_handles(config):
        return True
    if not _on_gpus(config):
        return False
    sizes = [server_size(engine, server) for server in engine.servers or (None,)]
    return by_server_engine(config) or (config.trainer.ranks == 1 and max(sizes) == 1)


def by_handles(config: Config) -> bool:
    """True if the servers' workers read versions on the trainer's GPU (CUDA IPC)."""
    return config.weights.transport == "direct" and may_use_handles(config)


BY_SERVER_ENGINE = (
    "the server's own transfer engine receives versions; untested on a GPU "
    "(weights.server_engine = false turns it off)"
)


def by_server_engine(config: Config) -> bool:
    """True if the servers' own transfer engines receive versions. Untested on a GPU.

    SGLang's takes them in servers that are laid over GPUs by tensor only, and we ask the same of
    vLLM. All workers of a server receive between the same two steps, so that it may have several
    GPUs.
    """
    servers = config.engine.servers
    return (
        config.weights.server_engine
        and _on_gpus(config)
        and config.lora.rank is None
        and all(one.world_size == one.tensor_parallel for one in servers)
    )


def _on_gpus(config: Config) -> bool:
    """True if trainer and servers have GPUs of their own, and versions may go between these."""
    engine = config.engine
    return (
        config.weights.transport == "direct"
        and not config.weights.delta
        and config.trainer.device != "cpu"
        and engine.kind != "embedded"
        and engine.device != "cpu"
        and not engine.shares_devices
        and not engine.urls
    )


def lent_engine(engine: EngineSection) -> str | None:
    """The name of the engine in the trainer's place, if there is one."""
    return f"engine{num_engines(engine) - 1}" if engine.lend else None


# --- The GPUs of one machine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The place of a process that computes on GPUs. `devices` are empty if a cluster chooses
    them.
    """

    who: str
    host: str
    number: int
    devices: tuple[int, ...] = ()


THIS_MACHINE = "this machine"
ANY_MACHINE = "any with room"


def device_map(
    config: Config, *, number: int | None = None, ranks: bool = True, teacher: bool = True
) -> Sequence[DeviceAssignment]:
    """The processes that compute on GPUs, with their devices: ranks, then engines, then the
    teacher. Parts that compute on CPUs, or are not there, are left out. `number` counts this
    machine's GPUs.

    Raises `ConfigError` if two would have the same one, or if there are too few.
    """
    requests = list(_requests(config, ranks=ranks, teacher=teacher))
    if config.cluster.kind != "local":
        hosts = {
            f"engine{index}": server.host for index, server in enumerate(config.engine.servers)
        }
        return [
            DeviceAssignment(one.who, hosts.get(one.who) or ANY_MACHINE, one.number)
            for one in requests
        ]
    given: dict[str, tuple[int, ...]] = {}
    for side in _sides(config, requests):
        given |= DevicePool(number, shared=config.engine.share_devices).give_all(side)
    lent = lent_engine(config.engine)
    if lent is not None and config.engine.device != "cpu" and "trainer" in given:
        requests.append(DeviceRequest(lent, 1, "engine.lend"))
        given[lent] = given["trainer"]
    return [DeviceAssignment(one.who, THIS_MACHINE, one.number, given[one.who]) for one in requests]


def _sides(config: Config, requests: Sequence[DeviceRequest]) -> Sequence[Sequence[DeviceRequest]]:
    """The requests that share out the GPUs among them: all, or if engines and trainer take turns
    those of each.
    """
    if not config.engine.takes_turns:
        return [requests]
    sides = defaultdict[str, list[DeviceRequest]](list)
    for request in requests:
        sides[request.who.rstrip("0123456789")].append(request)
    return list(sides.values())


def _requests(config: Config, *, ranks: bool, teacher: bool) -> Iterator[DeviceRequest]:
    engine = config.engine
    trainer = config.trainer
    if ranks and trainer.device != "cpu":
        option = f"trainer.device = {trainer.device!r}"
        for rank in range(trainer.ranks):
            yield DeviceRequest(f"trainer{rank or ''}", 1, option, _numbered(trainer.device))
    if engine.device == "cpu":
        return
    option = f"engine.device = {engine.device!r}"
    numbered = _numbered(engine.device)
    if engine.servers and not engine.urls:
        for index, server in enumerate(engine.servers):
            at = f"engine.servers.{index}.devices"
            size = server_size(engine, server)
            yield DeviceRequest(f"engine{index}", size, at, server.devices or numbered)
    elif not engine.urls:
        for index in range(num_engines(engine) - engine.lend):
            yield DeviceRequest(f"engine{index}", server_size(engine, None), option, numbered)
    if teacher and config.distillation.teacher is not None:
        yield DeviceRequest("teacher", 1, option)


def _numbered(device: str) -> tuple[int, ...]:
    _, _, number = device.partition(":")
    return (int(number),) if number.isdecimal() else ()


def server_of(config: Config, name: str) -> ServerSection | None:
    """The section of the engine of that name, if there are such sections. Other parts have none."""
    number = name.removeprefix("engine")
    if not number.isdecimal() or not config.engine.servers:
        return None
    return config.engine.servers[int(number)]


def config_in_place(config: Config, name: str) -> Config:
    """The configuration for the part of that name. It sees its own GPUs alone and numbers them from
    0, and an engine has its own server.
    """
    section = config.engine
    trainer = config.trainer
    own = server_of(config, name)
    servers = section.servers if own is None else (own,)
    changed = {
        "device": section.device.partition(":")[0],
        "servers": tuple(one.model_copy(update={"devices": ()}) for one in servers),
    }
    trained = {"device": trainer.device.partition(":")[0], "devices": ()}
    return config.model_copy(
        update={
            "engine": section.model_copy(update=changed),
            "trainer": trainer.model_copy(update=trained),
        }
    )
