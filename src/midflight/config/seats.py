"""What follows from a run's places: which GPUs each part has on one machine, what its seat asks of
a cluster, and which options cannot be.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from midflight.config.derived import handed_bytes, model_sizes, num_engines, num_workers
from midflight.config.devices import VLLM_RANKS, DevicePool, DeviceRequest, ServerSection
from midflight.config.sections import Config, EngineSection
from midflight.config.shards import shard_contradictions
from midflight.errors import ConfigError, ModelNotFound

Resources = Mapping[str, float]
Transport = Literal["shared_memory", "file", "collective", "direct", "pull"]
_TENSOR_PARALLEL = re.compile(r"(?:--tensor-parallel-size|-tp|--tp-size|--tp)[= ](\d+)")


LARGE_BYTES = 2**30
"""Of a version: a server's own loader takes a second or more for so many, in a pause; to swap them
takes milliseconds.
"""
MANY_ENGINES = 8
"""Over machines. From so many on, what every engine's link and the trainer's CPU save by `pull` is
worth two and a half times the CPU of an engine.
"""


def placed(config: Config) -> Config:
    """What a run's place and size change of its sections: how many engines a cluster has, and how
    weights go where that is not said.
    """
    engine = config.engine
    weights = config.weights
    cluster = config.cluster
    if (
        cluster.kind != "local"
        and cluster.engines_max is not None
        and not engine.urls
        and not engine.servers
    ):
        engine = engine.model_copy(update={"count": cluster.engines_max})
    config = config.model_copy(update={"engine": engine})
    if weights.transport != "auto":
        return config
    return config.model_copy(
        update={"weights": weights.model_copy(update={"transport": chosen_transport(config)[0]})}
    )


def chosen_transport(config: Config) -> tuple[Transport, str]:
    """What `weights.transport = "auto"` stands for in this run, and why, in words."""
    return way_of_weights(
        num_bytes=version_bytes(config),
        num_engines=num_engines(config.engine),
        swaps=config.engine.kind != "embedded" and config.lora.rank is None,
        over_machines=config.cluster.kind != "local",
        from_ranks=config.trainer.ranks > 1 and not config.weights.delta,
    )


def version_bytes(config: Config) -> int:
    """Of one version on its way; 0 where there is no such model, which is said where it is looked
    for.
    """
    try:
        return handed_bytes(config, model_sizes(config.model))
    except ModelNotFound:
        return 0


def way_of_weights(
    *, num_bytes: int, num_engines: int, swaps: bool, over_machines: bool, from_ranks: bool
) -> tuple[Transport, str]:
    """The transport for a version of `num_bytes`, and why. `swaps`: engines are servers that take
    whole versions. `from_ranks`: each of several trainer ranks may give away its own part.

    | engines | a version has | on one machine | over machines, fewer than `MANY_ENGINES` | over machines, more |
    |---|---|---|---|---|
    | servers | `LARGE_BYTES` or more | direct | direct | pull |
    | servers | less, or is adapters | shared_memory | collective; pull from several ranks | pull |
    | embedded | any size | shared_memory | collective; pull from several ranks | pull |
    """
    if over_machines and num_engines >= MANY_ENGINES:
        return "pull", f"{num_engines} engines over machines give it to each other"
    if swaps and num_bytes >= LARGE_BYTES:
        return (
            "direct",
            (
                "a server would pause long to load so much, and only swaps what came straight to "
                "its workers"
            ),
        )
    if not over_machines:
        return "shared_memory", "engines on the trainer's machine map what it has written"
    if from_ranks:
        return "pull", "each rank of the trainer gives away its own part"
    return "collective", f"one broadcast for {num_engines} engines over machines"


def engines_min(config: Config) -> int:
    """Engines that it starts with."""
    return config.cluster.engines_min or num_engines(config.engine)


def seat_resources(config: Config) -> Mapping[str, Resources]:
    """What one seat of each part asks for, by the section's option."""
    trainer = config.trainer
    cluster = config.cluster
    return {
        "engine": engine_resources(config, None),
        "trainer": cluster.trainer
        if cluster.trainer is not None
        else _computing(trainer.threads, trainer.device, gpus=1),
        "rollout": cluster.rollout
        if cluster.rollout is not None
        else {"CPU": 1.0 + num_workers(config.environment)},
    }


def engine_resources(config: Config, server: ServerSection | None) -> Resources:
    """What the seat of one engine asks for. Without a server: one that would do for any."""
    engine = config.engine
    asked = config.cluster.engine
    if asked is None and not engine.urls:
        sizes = [
            server_size(engine, one)
            for one in ((server,) if server is not None else engine.servers or (None,))
        ]
        asked = _computing(engine.threads, engine.device, gpus=max(sizes))
    return {"CPU": 1.0} if asked is None else asked


def engine_seats(config: Config) -> Sequence[Resources]:
    """What the seats of engines and teacher ask for, one by one."""
    servers = [
        *(config.engine.servers or [None] * num_engines(config.engine)),
        *[None] * (config.distillation.teacher is not None),
    ]
    return [engine_resources(config, server) for server in servers]


def run_resources(config: Config) -> Resources:
    """What all seats of a run ask for together."""
    asked = seat_resources(config)
    total = defaultdict[str, float](float)
    for seat in (
        *engine_seats(config),
        *[asked["trainer"]] * config.trainer.ranks,
        asked["rollout"],
    ):
        for name, amount in seat.items():
            total[name] += amount
    return total


def _computing(threads: int, device: str, *, gpus: int) -> Resources:
    return (
        {"CPU": float(threads)} if device == "cpu" else {"CPU": float(threads), "GPU": float(gpus)}
    )


def server_size(engine: EngineSection, server: ServerSection | None) -> int:
    """GPUs of one server, as it says, or its command line."""
    found = _TENSOR_PARALLEL.search(
        " ".join((*engine.arguments, *(server.arguments if server else ())))
    )
    return int(found[1]) if found else 1 if server is None else server.world_size


def lent_engine(engine: EngineSection) -> str | None:
    """The name of the one in the trainer's place."""
    return f"engine{num_engines(engine) - 1}" if engine.lend else None


def _lending_contradictions(config: Config) -> Iterator[str]:
    engine = config.engine
    needs = "engine.lend is one more embedded engine in the trainer's place"
    if engine.kind != "embedded" or engine.servers:
        given = "engine.servers are given" if engine.servers else f'engine.kind is "{engine.kind}"'
        yield f"{needs}, and {given}; remove one"
    if config.cluster.kind != "local":
        yield (
            f'{needs}, and cluster.kind is "{config.cluster.kind}", where the trainer may be on '
            "another machine; remove one"
        )
    if engine.device.partition(":")[0] != config.trainer.device.partition(":")[0]:
        yield (
            f"{needs}, and engine.device ({engine.device}) is another kind than trainer.device "
            f"({config.trainer.device}); give both the same"
        )
    if config.gateway.shards > 1:
        yield (
            f"{needs}, of which one gateway decides, and gateway.shards is "
            f"{config.gateway.shards}; remove one"
        )
    if config.environment.untracked.engines:
        yield (
            f"{needs}, and environment.untracked.engines "
            f"({config.environment.untracked.engines}) sets the last engines apart; remove one"
        )


# --- The GPUs of one machine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Laid:
    """Where a process is that computes on GPUs. `devices` are empty where a cluster chooses
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
) -> Sequence[Laid]:
    """Whose each GPU is: ranks, then engines, then the teacher; nothing for parts that compute on
    CPUs, or are not there. `number`: of this machine's.

    `ConfigError` where two would have one, or where there are too few.
    """
    requests = list(_requests(config, ranks=ranks, teacher=teacher))
    if config.cluster.kind != "local":
        hosts = {
            f"engine{index}": server.host for index, server in enumerate(config.engine.servers)
        }
        return [Laid(one.who, hosts.get(one.who) or ANY_MACHINE, one.number) for one in requests]
    given = dict(DevicePool(number, shared=config.engine.share_devices).give_all(requests))
    if (
        (lent := lent_engine(config.engine)) is not None
        and config.engine.device != "cpu"
        and "trainer" in given
    ):
        requests.append(DeviceRequest(lent, 1, "engine.lend"))
        given[lent] = given["trainer"]
    return [Laid(one.who, THIS_MACHINE, one.number, given[one.who]) for one in requests]


def _requests(config: Config, *, ranks: bool, teacher: bool) -> Iterator[DeviceRequest]:
    engine = config.engine
    trainer = config.trainer
    if ranks and trainer.device != "cpu":
        for rank in range(trainer.ranks):
            named = trainer.devices[rank : rank + 1] or _numbered(trainer.device)
            yield DeviceRequest(
                f"trainer{rank or ''}",
                1,
                "trainer.devices" if trainer.devices else f"trainer.device = {trainer.device!r}",
                named,
            )
    if engine.device == "cpu":
        return
    option = f"engine.device = {engine.device!r}"
    if not engine.urls:
        for index, server in enumerate(
            engine.servers or (None,) * (num_engines(engine) - engine.lend)
        ):
            at = f"engine.servers.{index}.devices" if server is not None else option
            named = (
                server.devices
                if server is not None and server.devices
                else _numbered(engine.device)
            )
            yield DeviceRequest(f"engine{index}", server_size(engine, server), at, named)
    if teacher and config.distillation.teacher is not None:
        yield DeviceRequest("teacher", 1, option)


def _numbered(device: str) -> tuple[int, ...]:
    _, _, number = device.partition(":")
    return (int(number),) if number.isdecimal() else ()


def server_of(config: Config, name: str) -> ServerSection | None:
    """Of the engine of that name, where there are such sections; of no other part."""
    number = name.removeprefix("engine")
    return (
        config.engine.servers[int(number)] if number.isdecimal() and config.engine.servers else None
    )


def config_in_place(config: Config, name: str) -> Config:
    """As the part of that name reads it, which sees its own GPUs alone and numbers them from 0; an
    engine has its own server.
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


def server_contradictions(config: Config) -> Iterator[str]:
    """Of `[[engine.servers]]` and `trainer.devices`; and every GPU that two would have, however
    many there are.
    """
    engine = config.engine
    trainer = config.trainer
    local = config.cluster.kind == "local"
    for index, server in enumerate(engine.servers):
        yield from _server_contradictions(engine, f"engine.servers.{index}", server, local=local)
    for name, given in (
        ("engine.urls", len(engine.urls)),
        ("engine.count", engine.count if engine.count > 1 else 0),
    ):
        if engine.servers and given not in (0, len(engine.servers)):
            yield (
                f"{name} says that there are {given} engines, and engine.servers that there are "
                f"{len(engine.servers)}; mend one"
            )
    if trainer.devices and trainer.device != "cuda":
        yield (
            f'trainer.devices ({list(trainer.devices)}) are of trainer.device = "cuda", which '
            "is "
            f"{trainer.device!r}; remove them, or set it"
        )
    elif trainer.devices and len(trainer.devices) != trainer.ranks:
        yield (
            f"trainer.devices ({list(trainer.devices)}) are one for each of trainer.ranks "
            f"({trainer.ranks}); name as many"
        )
    if trainer.devices and not local:
        yield (
            f"trainer.devices ({list(trainer.devices)}) are chosen by Ray on a cluster; remove them"
        )
    yield from _adapter_contradictions(config)
    yield from _lending_contradictions(config) if engine.lend else ()
    if local:
        try:
            device_map(config)
        except ConfigError as error:
            yield str(error).rstrip(".")


def _adapter_contradictions(config: Config) -> Iterator[str]:
    lora = config.lora
    engine = config.engine
    if lora.merged and (lora.rank is None or engine.kind == "embedded"):
        yield (
            "lora.merged is for adapters that vLLM or SGLang serve, and there are none: remove "
            "it, or set lora.rank and engine.kind"
        )
    if lora.rank is None or lora.merged or engine.kind == "embedded":
        return
    if config.weights.commit == "barrier":
        yield (
            'weights.commit = "barrier" is for weights that replace each other, and servers '
            "keep "
            "versions of adapters side by side; remove it, or set lora.merged"
        )
    if engine.kind == "vllm" and lora.rank > VLLM_RANKS[-1]:
        yield (
            f"lora.rank ({lora.rank}) is more than vLLM's own LoRA takes ({VLLM_RANKS[-1]}); "
            "lower it, or set lora.merged"
        )


def _server_contradictions(
    engine: EngineSection, at: str, server: ServerSection, *, local: bool
) -> Iterator[str]:
    size = server_size(engine, server)
    given = list(server.devices)
    if server.host and local:
        yield (
            f'{at}.host ({server.host}) is a machine of a cluster, and cluster.kind is "local"; '
            "remove it, or set cluster.kind"
        )
    if engine.kind == "embedded" and (server.world_size > 1 or server.arguments):
        yield (
            f'{at} has sizes or arguments of a server, and engine.kind is "embedded", which is '
            "on one device; remove them"
        )
    if engine.urls and (given or server.arguments or server.host):
        yield (
            f"{at} has a host, devices or arguments, and engine.urls are of a server that runs "
            "already; remove them"
        )
    if given and not local:
        yield (
            f"{at}.devices ({given}) are chosen by Ray on a cluster; remove them: it is given "
            "as "
            "many as the sizes ask for"
        )
    elif given and engine.device != "cuda":
        yield (
            f'{at}.devices ({given}) are of engine.device = "cuda", which is {engine.device!r}; '
            "remove them, or set it"
        )
    if size != server.world_size and server.world_size > 1:
        yield (
            f"{at} and the server's arguments both say over how many GPUs it is laid "
            f"({server.world_size} and {size}); remove it from the arguments"
        )
    elif given and len(given) != size:
        yield (
            f"{at}.devices ({given}) are {len(given)}, and the server is laid over {size} "
            "(tensor x pipeline x data parallel); name as many"
        )


def cluster_contradictions(config: Config) -> Iterator[str]:
    cluster = config.cluster
    yield from shard_contradictions(config)
    if cluster.kind == "local":  # the rest then waits for the day when it is not
        return
    least = engines_min(config)
    most = num_engines(config.engine)
    if least > most:
        yield (
            f"cluster.engines_min ({least}) is more than the engines that the run asks for "
            f"({most}); lower it, or raise cluster.engines_max"
        )
    if cluster.engines_min is not None and (apart := config.environment.untracked.engines) >= least:
        yield (
            f"cluster.engines_min ({least}) leaves none for the policy beside "
            f"environment.untracked.engines ({apart}); raise it"
        )
    if (config.engine.urls or config.engine.servers) and cluster.engines_max is not None:
        which = "engine.urls" if config.engine.urls else "engine.servers"
        yield (
            f"cluster.engines_max ({cluster.engines_max}) does nothing beside {which}, which "
            "say "
            "how many there are; remove it"
        )
    for key, device in (
        ("engine.device", config.engine.device),
        ("trainer.device", config.trainer.device),
    ):
        if ":" in device:
            yield (
                f"{key} is {device!r}, and on a cluster a seat has GPUs of its own, numbered "
                'from 0; set it to "cuda"'
            )
