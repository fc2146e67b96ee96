"""Sources of tasks: their options, and the numbers and names that follow without reading
anything.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from midflight.config.section import Above0, Count, Positive, Section
from midflight.entries import ENTRY

DATASET_SIZE = 2000
DATASET_HELDOUT = 256
"""Sizes of a dataset of reasoning-gym, which can be as large as one likes."""

Share = Annotated[float, Field(ge=0, lt=1)]


class SourceSection(Section):
    """A source has one of `dataset`, `path`, `entry` and `posted`."""

    dataset: str | None = None
    """A dataset of reasoning-gym, such as `spell_backward`."""
    path: Path | None = None
    """A file of rows (`.jsonl`, `.csv`, `.tsv`, `.parquet`), or a folder of
    `datasets.save_to_disk`.
    """
    entry: str | None = None
    """`module:function` that returns the rows, the same each time."""
    posted: bool = False
    """Tasks come by `POST /midflight/v1/tasks`, and are tried first."""
    name: str = ""
    """Its name in metrics. Default: that of dataset, file or function."""
    weight: Above0 = 1.0
    """Its share of tasks, relative to other sources."""
    size: Positive | None = None
    """Most tasks to train on. Default: 2000 of a dataset, else all rows."""
    heldout: Count | Share | Path | None = None
    """Tasks kept for evaluation: a number, a share, or a second file. Default: 256 of a dataset,
    else 0.
    """
    shuffle: bool = True
    """Each pass has an order of its own; false: that of the rows."""
    prompt: str = "{question}"
    """A format over columns, or the name of a column with a text or conversation."""
    system: str = ""
    """A system message before the prompt."""
    answer: str = ""
    """The column with the expected answer, which becomes a text."""
    id: str = ""
    """The column that identifies a task; empty numbers the rows from 0."""
    content: str = ""
    """Training and held-out tasks share no value of this column. Default: the prompt; of a dataset
    `question`.
    """
    only: str = ""
    """A regular expression that the whole content of tasks matches, such as `[a-z]+`."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Options of the dataset, or arguments of the function."""

    @property
    def origin(self) -> str:
        """The origin of the rows, as it was written."""
        return str(self.dataset or self.path or self.entry or "posted")

    @property
    def num_heldout(self) -> int | float | Path:
        """`heldout` with its default."""
        if self.heldout is not None:
            return self.heldout
        return 0 if self.dataset is None else DATASET_HELDOUT

    @property
    def has_heldout(self) -> bool:
        return self.num_heldout != 0

    @property
    def described(self) -> str:
        """For people: the origin of tasks, their number, and the tasks that are held out."""
        if self.posted:
            return "what is posted"
        size = self.size
        if size is None and self.dataset is not None:
            size = DATASET_SIZE
        trained = "all rows" if size is None else size
        return f"{self.origin}, {trained} for training and {self._described_heldout} held out"

    @property
    def _described_heldout(self) -> str:
        held = self.num_heldout
        if isinstance(held, float):
            return f"{held:g} of the rows"
        if isinstance(held, Path):
            return f"those of {held}"
        return str(held or "none")


class CurriculumSection(Section):
    """The next task may be chosen by how often its rollouts passed lately."""

    priority: Literal["uniform", "learnability"] = "uniform"
    """uniform: tasks take turns. learnability: mostly tasks that are untried or pass sometimes
    (docs/data.md#which-task-comes-next).
    """
    passes: float = 1.0
    """The reward from which a rollout passes, also for pass@k."""

    @property
    def chooses(self) -> bool:
        """Whether tasks are drawn by their pass rates at all."""
        return self.priority != "uniform"


def source_names(sources: Sequence[SourceSection]) -> tuple[str, ...]:
    """The name of each source. A dataset that occurs a second time is `name-2`."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for source in sources:
        name = source.name or _own_name(source)
        if source.dataset is not None and not source.name:
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}-{seen[name]}"
        names.append(name)
    return tuple(names)


def _own_name(source: SourceSection) -> str:
    if source.path is not None:
        return source.path.stem or source.path.resolve().stem
    return source.entry.rpartition(":")[2] if source.entry is not None else source.origin


def source_contradictions(
    sources: Sequence[SourceSection], curriculum: CurriculumSection, *, learns_to_accuracy: bool
) -> Iterator[str]:
    """One sentence for each thing that is wrong with the sources as they are written.
    `learns_to_accuracy`: a warm start stops by the accuracy on the first one.
    """
    yield from _of_curriculum(sources, curriculum)
    if learns_to_accuracy and not any(source.has_heldout for source in sources[:1]):
        yield (
            "warm_start.target_accuracy is measured on the held-out tasks of the first source, "
            "which has none; set environment.sources.0.heldout, or warm_start.data, or remove "
            "target_accuracy"
        )
    if not sources:
        yield (
            "environment.sources is empty, so there is nothing to train on; add an "
            "[[environment.sources]] with a dataset, a path or an entry"
        )
    for number, source in enumerate(sources):
        yield from (f"environment.sources.{number}{problem}" for problem in _of_one(source))
    names = source_names(sources)
    for name, count in Counter(names).items():
        if count > 1:
            numbers = [str(number) for number, other in enumerate(names) if other == name]
            yield (
                f"environment.sources {' and '.join(numbers)} are both called {name!r}, so "
                "nobody could tell their scores apart; give one another name"
            )
    if sum(source.posted for source in sources) > 1:
        yield "environment.sources has more than one posted source; one takes all that is posted"


def _of_curriculum(
    sources: Sequence[SourceSection], curriculum: CurriculumSection
) -> Iterator[str]:
    if not curriculum.chooses:
        return
    if sources and all(source.posted for source in sources):
        yield (
            "[curriculum] chooses among the tasks of a source, and what is posted is tried once "
            "each, in the order of posting; remove [curriculum], or add a source with a dataset, "
            "a path or an entry"
        )
    for number, source in enumerate(sources):
        if not source.shuffle and not source.posted:
            yield (
                f"environment.sources.{number}.shuffle = false keeps the order of the rows, and "
                "[curriculum] draws by pass rate; remove one of them"
            )


def _of_one(source: SourceSection) -> Iterator[str]:
    kinds = ("dataset", "path", "entry", "posted")
    given = [key for key in kinds if getattr(source, key) not in (None, False)]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else "says nothing of where its tasks are from"
        yield f" {said}; give it exactly one of dataset, path, entry and posted"
        return
    kind = given[0]
    if source.dataset is not None and not source.dataset.strip():
        yield ".dataset is empty; give the name of a dataset, such as spell_backward"
    if source.entry is not None and not ENTRY.fullmatch(source.entry):
        yield f".entry must be 'module:function', got {source.entry!r}"
    for name in _idle_options(source, kind):
        remedy = "remove it"
        if name == "heldout" and kind == "dataset":
            remedy = "give a number of tasks"
        yield (
            f".{name} ({getattr(source, name)}) has no meaning for a source with {kind}; {remedy}"
        )
    if not source.prompt:
        yield (
            ".prompt is empty, so nothing would be asked; give a format such as '{question}', or "
            "the name of a column"
        )


def _idle_options(source: SourceSection, kind: str) -> Iterator[str]:
    """The options that are given and mean nothing for a source of this kind."""
    match kind:
        case "dataset":
            if source.id:
                yield "id"
            if source.answer:
                yield "answer"
            if isinstance(source.heldout, float | Path):
                yield "heldout"
        case "path":
            if source.options:
                yield "options"
        case "posted":
            for name in ("size", "heldout", "weight", "shuffle", "only", "options"):
                if name in source.model_fields_set:
                    yield name
        case _:
            pass


def num_draws(source: SourceSection) -> int:
    """Entries of a dataset that are drawn for its tasks. It is about this many, since every eighth
    content is held out.
    """
    assert isinstance(source.num_heldout, int), "a dataset holds out a number"
    return max(source.size or DATASET_SIZE, 8 * source.num_heldout, 1)
