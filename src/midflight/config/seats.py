"""What follows from a run's places: what a seat of each part asks of a cluster, and which options cannot be there."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from midflight.config.derived import num_engines, num_workers
from midflight.config.sections import Config, EngineSection

Resources = Mapping[str, float]
_TENSOR_PARALLEL = re.compile(r"(?:--tensor-parallel-size|-tp|--tp-size|--tp)[= ](\d+)")


def placed(config: Config) -> Config:
    """What a cluster changes of the other sections: how many engines there are, and, where no transport is given, that weights go by
    broadcast, because machines share no memory."""
    engine, weights, cluster = config.engine, config.weights, config.cluster
    if cluster.kind == "local":
        return config
    if "transport" not in weights.model_fields_set:
        weights = weights.model_copy(update={"transport": "collective"})
    if cluster.engines_max is not None and not engine.urls:
        engine = engine.model_copy(update={"count": cluster.engines_max})
    return config.model_copy(update={"engine": engine, "weights": weights})


def engines_min(config: Config) -> int:
    """Engines that it starts with."""
    return config.cluster.engines_min or num_engines(config.engine)


def seat_resources(config: Config) -> Mapping[str, Resources]:
    """What one seat of each part asks for, by the section's option."""
    engine, trainer, cluster = config.engine, config.trainer, config.cluster
    of_engine = _computing(engine.threads, engine.device, gpus=tensor_parallel(engine))
    return {
        "engine": cluster.engine if cluster.engine is not None else {"CPU": 1.0} if engine.urls else of_engine,
        "trainer": cluster.trainer if cluster.trainer is not None else _computing(trainer.threads, trainer.device, gpus=1),
        "rollout": cluster.rollout if cluster.rollout is not None else {"CPU": 1.0 + num_workers(config.environment)},
    }


def run_resources(config: Config) -> Resources:
    """What all seats of a run ask for together."""
    teachers = config.distillation.teacher is not None
    number = {"engine": num_engines(config.engine) + teachers, "trainer": config.trainer.ranks, "rollout": 1}
    total = defaultdict[str, float](float)
    for part, asked in seat_resources(config).items():
        for name, amount in asked.items():
            total[name] += number[part] * amount
    return total


def _computing(threads: int, device: str, *, gpus: int) -> Resources:
    return {"CPU": float(threads)} if device == "cpu" else {"CPU": float(threads), "GPU": float(gpus)}


def tensor_parallel(engine: EngineSection) -> int:
    """GPUs of one server, as its command line says."""
    found = _TENSOR_PARALLEL.search(" ".join(engine.arguments))
    return int(found[1]) if found else 1


def cluster_contradictions(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.kind == "local":  # the rest then waits for the day when it is not
        return
    least, most = engines_min(config), num_engines(config.engine)
    if least > most:
        yield f"cluster.engines_min ({least}) is more than the engines that the run asks for ({most}); lower it, or raise cluster.engines_max"
    if cluster.engines_min is not None and (apart := config.environment.untracked.engines) >= least:
        yield f"cluster.engines_min ({least}) leaves none for the policy beside environment.untracked.engines ({apart}); raise it"
    if config.engine.urls and cluster.engines_max is not None:
        yield f"cluster.engines_max ({cluster.engines_max}) does nothing beside engine.urls, which say how many there are; remove it"
    for key, device in (("engine.device", config.engine.device), ("trainer.device", config.trainer.device)):
        if ":" in device:
            yield f'{key} is {device!r}, and on a cluster a seat has GPUs of its own, numbered from 0; set it to "cuda"'
