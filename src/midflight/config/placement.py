"""Which processes a run starts and what each computes on."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.config.sections import Config


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
        Place(
            "engine",
            config.engine.count,
            config.engine.threads,
            config.engine.device,
            f"generates, {config.engine.max_running} requests together",
        ),
        Place("trainer", 1, config.trainer.threads, config.trainer.device, "takes steps, publishes weights"),
    )


def computing_threads(config: Config) -> int:
    """Threads of engines and trainer that compete for CPU cores; those on a GPU count one each."""
    return sum(p.count * (p.threads if p.device == "cpu" else 1) for p in placement(config) if p.process in ("engine", "trainer"))


def core_note(config: Config, cores: int) -> str | None:
    """A warning where engines and trainer want more cores than there are."""
    wanted = computing_threads(config)
    if wanted <= cores:
        return None
    return (
        f"engines and trainer compute with {wanted} threads on {cores} cores: they slow each other; lower engine.threads or trainer.threads"
    )
