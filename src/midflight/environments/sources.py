"""The sources that the tasks of a run come from: datasets, the user's own rows, and their split
into training and held-out tasks.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from midflight.config.sources import DATASET_SIZE, SourceSection, source_names
from midflight.environments.reasoning_gym import DrawnTasks, draw_tasks, rank_of
from midflight.environments.row_tasks import Ranks, RowSource
from midflight.errors import ConfigError
from midflight.types import Json, Task


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks of one kind. `weight` is their share in the stream, relative to the other sources."""

    name: str
    weight: float
    training: Sequence[Task]
    heldout: Sequence[Task] = ()
    shuffle: bool = True
    """True if each pass through the tasks has an order of its own."""
    num_left_out: int = 0
    """Rows that are on neither side, because their content is held out already."""
    held_ranks: Ranks = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The ranks of the contents that it holds out. A posted task must have none of them."""


def load_sources(
    sections: Sequence[SourceSection], *, seed: int, on_entry: Callable[[], None] = lambda: None
) -> tuple[Source, ...]:
    """Draws or opens the tasks of every source. A dataset named twice gives the sources `name` and
    `name-2`. `on_entry` is called for each entry that is drawn from a dataset, and may raise to end
    the drawing.

    No source trains on contents that another source holds out, whether of the same dataset or of
    rows. Raises `ConfigError` if a dataset is too small for that. Posted tasks are not among these
    sources.
    """
    names = source_names(sections)
    drawn: dict[int, DrawnTasks] = {}
    by_dataset: defaultdict[str, list[DrawnTasks]] = defaultdict(list)
    for number, section in enumerate(sections):
        if section.dataset is not None:
            tasks = _drawn(section, names[number], seed=seed, on_entry=on_entry)
            drawn[number] = tasks
            by_dataset[section.dataset].append(tasks)
    for dataset, draws in by_dataset.items():
        _check_apart(dataset, draws)
    from_rows = _from_rows(sections, names, seed=seed)
    sources: list[Source] = []
    for number, section in enumerate(sections):
        if number in drawn:
            sources.append(_from_dataset(section, names[number], drawn[number], seed=seed))
        elif number in from_rows:
            sources.append(from_rows[number])
    return tuple(sources)


def _from_dataset(section: SourceSection, name: str, drawn: DrawnTasks, *, seed: int) -> Source:
    return Source(
        name,
        section.weight,
        drawn.training,
        drawn.heldout,
        section.shuffle,
        held_ranks=_held_ranks(drawn, seed=seed),
    )


def _from_rows(
    sections: Sequence[SourceSection], names: Sequence[str], *, seed: int
) -> dict[int, Source]:
    """The sources over rows, by their place in `sections`."""
    rows: dict[int, RowSource] = {}
    for number, section in enumerate(sections):
        if section.dataset is None and not section.posted:
            rows[number] = RowSource(section, name=names[number], number=number, seed=seed)
    nothing = np.zeros(0, np.uint64)
    held: dict[int, Ranks] = {}
    if any(source.needs_contents for source in rows.values()):
        held = {number: source.look() for number, source in rows.items()}
    of_all = np.concatenate([nothing, *held.values()])
    sources: dict[int, Source] = {}
    for number, source in rows.items():
        section = sections[number]
        own = held.get(number, nothing)
        split = source.split(own, of_all)
        sources[number] = Source(
            names[number],
            section.weight,
            split.training,
            split.heldout,
            section.shuffle,
            split.num_left_out,
            own,
        )
    return sources


def _held_ranks(drawn: DrawnTasks, *, seed: int) -> Ranks:
    """The ranks of a dataset's held-out contents and of the prompts made from them: a client that
    posts tasks need not know which field identifies a content.
    """
    told = set(drawn.heldout_contents)
    told.update(str(task.data["question"]) for task in drawn.heldout)
    return np.asarray([rank_of(content, seed=seed) for content in told], dtype=np.uint64)


def _drawn(
    section: SourceSection, name: str, *, seed: int, on_entry: Callable[[], None]
) -> DrawnTasks:
    heldout = section.num_heldout
    assert section.dataset is not None and isinstance(heldout, int)
    drawn = draw_tasks(
        section.dataset,
        size=section.size or DATASET_SIZE,
        heldout=heldout,
        prompt=section.prompt,
        content=section.content or "question",
        only=section.only,
        options=section.options,
        seed=seed,
        source=name,
        on_entry=on_entry,
    )
    if not section.system:
        return drawn
    return replace(
        drawn,
        training=tuple(_with_system(task, section.system) for task in drawn.training),
        heldout=tuple(_with_system(task, section.system) for task in drawn.heldout),
    )


def _with_system(task: Task, system: str) -> Task:
    messages: list[Json] = [{"role": "system", "content": system}, *task.messages]
    return replace(task, data={**task.data, "messages": messages})


def _check_apart(dataset: str, draws: Sequence[DrawnTasks]) -> None:
    training = set[str]()
    heldout = set[str]()
    for drawn in draws:
        training |= drawn.training_contents
        heldout |= drawn.heldout_contents
    shared = training & heldout
    if shared:
        raise ConfigError(
            f"the sources of dataset {dataset!r} would train on {len(shared)} contents that "
            f"another of them holds out, {min(shared)!r} among them: it is too small for their "
            "numbers; lower heldout, or make it one source."
        )
