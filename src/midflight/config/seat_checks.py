"""Options of places that contradict each other: clusters, servers and their GPUs, adapters, the
engine that is lent, and devices that are shared in turns.
"""

from collections.abc import Iterator, Sequence

from midflight.config.derived import engines_option, num_engines
from midflight.config.devices import VLLM_RANKS, ServerSection
from midflight.config.engine import EngineSection
from midflight.config.seats import DeviceAssignment, device_map, engines_min, server_size
from midflight.config.sections import Config
from midflight.config.shards import shard_contradictions
from midflight.config.transport import may_use_handles
from midflight.errors import ConfigError


def server_contradictions(config: Config) -> Iterator[str]:
    """Contradictions of `[[engine.servers]]`, adapters, lending and turns, and every GPU that two
    processes would have, however many there are.
    """
    engine = config.engine
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
    yield from _adapter_contradictions(config)
    if engine.lend:
        yield from _lending_contradictions(config)
    if engine.takes_turns:
        yield from _turn_contradictions(config)
    if local:
        try:
            given = device_map(config)
        except ConfigError as error:
            yield str(error).rstrip(".")
        else:
            if engine.takes_turns:
                yield from _apart(given)


def _adapter_contradictions(config: Config) -> Iterator[str]:
    lora = config.lora
    engine = config.engine
    if lora.merged and (lora.rank is None or engine.kind == "embedded"):
        yield (
            "lora.merged is for adapters that vLLM or SGLang serve, and there are none: remove "
            "it, or set lora.rank and engine.kind"
        )
    if lora.rank is not None and config.weights.delta:
        yield (
            f"weights.delta is for versions that are whole weights, and with lora.rank "
            f"({lora.rank}) only adapters are sent, which are small and change as a whole; remove "
            "weights.delta"
        )
    if lora.rank is None or lora.merged or engine.kind == "embedded":
        return
    if config.weights.commit == "barrier":
        yield (
            'weights.commit = "barrier" is for weights that replace each other, and servers keep '
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
    if engine.kind == "embedded" and server.world_size > 1:
        yield (
            f'{at} has sizes of a server, and engine.kind is "embedded", which is on one device; '
            "remove them"
        )
    if engine.urls and (given or server.host):
        yield (
            f"{at} has a host or devices, and engine.urls are of a server that runs already; "
            "remove them"
        )
    if given and not local:
        yield (
            f"{at}.devices ({given}) are chosen by Ray on a cluster; remove them: it is given as "
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


def _turn_contradictions(config: Config) -> Iterator[str]:
    engine = config.engine
    turns = 'engine.share = "time" lets engines sleep while the trainer has their devices'
    if engine.urls:
        yield f"{turns}, and engine.urls are of servers that run already; remove one"
    if config.cluster.kind != "local":
        yield (
            f'{turns}, and cluster.kind is "{config.cluster.kind}", where they may be on several '
            "machines; remove one"
        )
    if engine.device.partition(":")[0] != config.trainer.device.partition(":")[0]:
        yield (
            f"{turns}, and engine.device ({engine.device}) is another than trainer.device "
            f"({config.trainer.device}); give both the same, or remove engine.share"
        )
    if engine.lend:
        yield (
            f"{turns}, and engine.lend has one that generates beside others while it waits; remove "
            "one"
        )
    if config.gateway.shards > 1:
        yield (
            f"{turns}, of which one gateway decides, and gateway.shards is "
            f"{config.gateway.shards}; remove one"
        )
    if config.environment.untracked.engines:
        yield (
            f"{turns}, and environment.untracked.engines "
            f"({config.environment.untracked.engines}) are to answer at any time; remove one"
        )
    if config.weights.transport == "direct" and not may_use_handles(config):
        yield (
            f'{turns}, and weights.transport = "direct" brings versions to workers that have no '
            'memory then; set it to "shared_memory"'
        )


def _apart(given: Sequence[DeviceAssignment]) -> Iterator[str]:
    """A sentence if engines and trainer ranks, which take turns, are not on the same GPUs."""
    of_trainer = {
        device for one in given if one.who.startswith("trainer") for device in one.devices
    }
    of_engines = {device for one in given if one.who.startswith("engine") for device in one.devices}
    if not of_trainer or not of_engines or of_trainer == of_engines:
        return
    alone = ", ".join(map(str, sorted(of_trainer ^ of_engines)))
    yield (
        'engine.share = "time" is for engines and trainer on the same GPUs, and one side alone has '
        f"GPU {alone}; give both the same by engine.servers, engine.device and trainer.device, or "
        "remove engine.share"
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
            f"({most}); lower it, or raise {engines_option(config)}"
        )
    apart = config.environment.untracked.engines
    if cluster.engines_min is not None and apart >= least:
        yield (
            f"cluster.engines_min ({least}) leaves none for the policy beside "
            f"environment.untracked.engines ({apart}); raise it"
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
