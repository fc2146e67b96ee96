"""Which processes a run starts and what each computes on."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.config.derived import num_engines
from midflight.config.sections import Config, EngineSection


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of process. `threads` are those that compute in each of them."""

    process: str
    count: int
    threads: int
    device: str
    task: str


def placement(config: Config) -> tuple[Place, ...]:
    return (
        Place("launcher", 1, 0, "cpu", "starts and supervises the others, terminal"),
        Place("rollout", 1, 1, "cpu", "gateway, environments, buffer, store"),
        _engine(config.engine),
        *_teacher(config),
        Place("trainer", config.trainer.ranks, config.trainer.threads, config.trainer.device, "takes steps, publishes weights"),
    )


def _engine(engine: EngineSection) -> Place:
    generates = f"generates, {engine.max_running} requests together"
    if engine.kind == "embedded":
        return Place("engine", engine.count, engine.threads, engine.device, generates)
    if engine.urls:
        return Place("engine", num_engines(engine), 0, "theirs", f"speaks to a running {engine.kind} server, which {generates}")
    return Place("engine", engine.count, engine.threads, engine.device, f"a {engine.kind} server, which {generates}")


def _teacher(config: Config) -> tuple[Place, ...]:
    if config.distillation.teacher is None:
        return ()
    return (Place("teacher", 1, config.engine.threads, config.engine.device, "scores what the engines generate"),)


def computing_threads(config: Config) -> int:
    """Threads of engines, teacher and trainer that compete for CPU cores; those on a GPU count one each, servers started by others none."""
    computing = [p for p in placement(config) if p.process in ("engine", "teacher", "trainer")]
    return sum(p.count * (p.threads if p.device == "cpu" else min(p.threads, 1)) for p in computing)


def core_note(config: Config, cores: int) -> str | None:
    """A warning where engines and trainer want more cores than there are."""
    wanted = computing_threads(config)
    if wanted <= cores:
        return None
    return (
        f"engines and trainer compute with {wanted} threads on {cores} cores: they slow each other; lower engine.threads or trainer.threads"
    )
