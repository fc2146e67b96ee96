"""The sources of tasks that a run draws from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.config.sections import SourceSection
from midflight.environments.reasoning_gym import draw_tasks
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

    Whether a content is held out depends on the seed and the content alone, so no source trains on what another holds out.
    """
    seen: Counter[str] = Counter()
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
            options=section.options,
            seed=seed,
            source=name,
        )
        sources.append(Source(name=name, weight=section.weight, training=drawn.training, heldout=drawn.heldout))
    return tuple(sources)
