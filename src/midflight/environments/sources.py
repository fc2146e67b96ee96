"""The sources of tasks that a run draws from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.config.sections import SourceSection
from midflight.environments.reasoning_gym import DrawnTasks, draw_tasks
from midflight.errors import ConfigError
from midflight.types import Task


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks of one kind. `weight` is their share in the stream, relative to the other sources."""

    name: str
    weight: float
    training: tuple[Task, ...]
    heldout: tuple[Task, ...] = ()


def load_sources(sections: Sequence[SourceSection], *, seed: int) -> tuple[Source, ...]:
    """Draws the tasks of every source. A dataset named twice gives the sources `name` and `name-2`.

    No source trains on what another one of the same dataset holds out: `ConfigError` if it is too small for that.
    """
    seen: Counter[str] = Counter()
    draws: dict[str, list[DrawnTasks]] = {}
    sources: list[Source] = []
    for section in sections:
        seen[section.dataset] += 1
        name = section.dataset if seen[section.dataset] == 1 else f"{section.dataset}-{seen[section.dataset]}"
        drawn = draw_tasks(
            section.dataset,
            size=section.size,
            heldout=section.heldout,
            prompt=section.prompt,
            content=section.content,
            only=section.only,
            options=section.options,
            seed=seed,
            source=name,
        )
        draws.setdefault(section.dataset, []).append(drawn)
        sources.append(Source(name=name, weight=section.weight, training=drawn.training, heldout=drawn.heldout))
    for dataset, drawn_of_one in draws.items():
        _check_apart(dataset, drawn_of_one)
    return tuple(sources)


def _check_apart(dataset: str, draws: Sequence[DrawnTasks]) -> None:
    training = frozenset[str]().union(*(drawn.training_contents for drawn in draws))
    shared = training & frozenset[str]().union(*(drawn.heldout_contents for drawn in draws))
    if shared:
        raise ConfigError(
            f"the sources of dataset {dataset!r} would train on {len(shared)} contents that another of them holds out, "
            f"{min(shared)!r} among them: it is too small for their numbers; lower heldout, or make it one source."
        )
