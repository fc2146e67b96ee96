"""Tasks from the `reasoning-gym` package, split into training and held-out by content.

Seeds cannot split: reasoning-gym makes entry i of a dataset from seed + i, so the entries of seeds
0 and 1 are the same except for one, and distinct seeds draw the same words anyway. Here a hash of
the content and the seed decides: contents of low hash are held out. Size and options do not matter,
so a content once held out stays held out when the numbers change. Only if a dataset has too few
contents for that, the limit between low and high moves until both sides have as many as was asked
for.
"""

import dataclasses
import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from midflight.errors import ConfigError, nearest
from midflight.types import Json, Task

HELDOUT_SHARE = 1 / 8
"""Share of all contents on the held-out side: about as many as the defaults (256 beside 2000) ask
for.
"""
MAX_DRAWS_PER_TASK = 32
"""The most entries that are drawn for each content asked for. It bounds the search in a dataset
that repeats itself.
"""
BARREN_DRAWS = 8
"""After this many draws without a new content, per content known, a dataset counts as exhausted.
One of the last contents would be missed with a chance of e^-8.
"""


@dataclass(frozen=True, slots=True)
class DrawnTasks:
    """Both sides of the split, and the contents of each in small letters."""

    training: tuple[Task, ...]
    heldout: tuple[Task, ...]
    training_contents: frozenset[str]
    heldout_contents: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Distinct:
    """An entry with a content that no earlier one had."""

    number: int
    entry: dict[str, Any]
    content: str
    rank: int
    """The rank of its content."""


def draw_tasks(
    dataset: str,
    *,
    size: int,
    heldout: int,
    prompt: str = "{question}",
    content: str = "question",
    only: str = "",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    source: str | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> DrawnTasks:
    """`size` training and `heldout` held-out tasks of distinct content. The two sides share no
    value of the field `content`.

    `Task.data` has `question` (by the format `prompt`), `answer` (text, or None if the dataset has
    no single one), `dataset` and `metadata`. Equal arguments give equal tasks. Raises `ConfigError`
    if the dataset, an option or a field is unknown, or if there are fewer distinct contents than
    asked for. `only` is a regular expression for whole contents; others are passed over. `on_entry`
    is called for each entry that is drawn.
    """
    kept = pattern_of(only)
    found, limit = _search(
        dataset,
        size=size,
        heldout=heldout,
        content=content,
        only=kept,
        options=options or {},
        seed=seed,
        on_entry=on_entry,
    )
    low = [item for item in found if item.rank < limit][:heldout]
    high = [item for item in found if item.rank >= limit][:size]
    _check_enough(len(high), len(low), size=size, heldout=heldout, dataset=dataset, content=content)

    def made(item: _Distinct) -> Task:
        return _task(
            item.entry,
            task_id=str(item.number),
            source=source or dataset,
            dataset=dataset,
            prompt=prompt,
        )

    return DrawnTasks(
        training=tuple(map(made, high)),
        heldout=tuple(map(made, low)),
        training_contents=frozenset(item.content.casefold() for item in high),
        heldout_contents=frozenset(item.content.casefold() for item in low),
    )


def _search(
    dataset: str,
    *,
    size: int,
    heldout: int,
    content: str,
    only: re.Pattern[str] | None,
    options: Mapping[str, Any],
    seed: int,
    on_entry: Callable[[], None],
) -> tuple[list[_Distinct], int]:
    """Draws until both sides of the usual limit are full, or the dataset is exhausted. Returns the
    distinct contents in order, and the limit.
    """
    usual = round(HELDOUT_SHARE * 2**64)
    max_draws = MAX_DRAWS_PER_TASK * (size + round(heldout / HELDOUT_SHARE))
    found: dict[str, _Distinct] = {}
    missing = {True: heldout, False: size}
    newest = 0
    for number, entry in enumerate(_entries(dataset, options, seed=seed, max_draws=max_draws)):
        on_entry()
        value = _content(entry, content, dataset)
        wanted = only is None or only.fullmatch(value) is not None
        if wanted and value not in found:
            found[value] = _Distinct(number, entry, value, rank_of(value, seed=seed))
            missing[found[value].rank < usual] -= 1
            newest = number
        elif number - newest > max(1000, BARREN_DRAWS * len(found)):
            break
        if max(missing.values()) <= 0:
            break
    items = list(found.values())
    if max(missing.values()) <= 0:
        return items, usual
    return items, _limit(items, heldout)


def pattern_of(only: str) -> re.Pattern[str] | None:
    """The compiled pattern. Raises `ConfigError` if it is no regular expression."""
    try:
        return re.compile(only) if only else None
    except re.error as error:
        raise ConfigError(
            f"environment.sources.only = {only!r} is not a regular expression: {error}; correct or "
            "remove it."
        ) from error


def rank_of(content: str, *, seed: int) -> int:
    """A hash of seed and content, below 2**64. Letter case does not count, so that `Word` is not
    held out from `word`.
    """
    return _hashed(f"{seed}|{content.casefold()}")


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _limit(found: Sequence[_Distinct], heldout: int) -> int:
    """The limit that holds out the `heldout` contents of lowest rank, for a dataset that was
    exhausted.
    """
    if heldout <= 0:
        return 0
    if heldout > len(found):
        return 2**64
    ranks = sorted(item.rank for item in found)
    return ranks[heldout - 1] + 1


def _entries(
    dataset: str, options: Mapping[str, Any], *, seed: int, max_draws: int
) -> Iterator[dict[str, Any]]:
    """The entries of the dataset. Its own seed is a hash of ours, so that neighbouring seeds do not
    draw the same entries.
    """
    factory = _factory()
    if dataset not in factory.DATASETS:
        raise ConfigError(
            f"environment source {dataset!r} is not a dataset of "
            f"reasoning-gym.{nearest(dataset, factory.DATASETS)}"
        )
    _, config = factory.DATASETS[dataset]
    _check_options(dataset, options, known=[field.name for field in dataclasses.fields(config)])
    start = _hashed(f"{seed}|{dataset}") % 2**30
    try:
        made = factory.create_dataset(dataset, **options, seed=start, size=max_draws)
        for i in range(max_draws):
            yield made[i]
    except Exception as error:
        given = json.dumps(dict(options), default=str)
        raise ConfigError(
            f"dataset {dataset!r} refuses options {given}: {type(error).__name__}: {error}; change "
            "environment.sources.options."
        ) from error


def _factory() -> Any:
    try:
        import reasoning_gym.factory as factory
    except ImportError as error:
        raise ConfigError(
            "environment.sources need the package reasoning-gym; install it with: pip install "
            "'midflight[reasoning-gym]'."
        ) from error
    return factory


def _check_options(dataset: str, options: Mapping[str, Any], *, known: Sequence[str]) -> None:
    for name in options:
        if name in ("seed", "size"):
            raise ConfigError(
                f"option {name!r} of dataset {dataset!r} is set by the source itself; remove it "
                "from environment.sources.options."
            )
        if name not in known:
            raise ConfigError(
                f"dataset {dataset!r} has no option "
                f"{name!r}.{nearest(name, set(known) - {'seed', 'size'})}"
            )


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a prompt or `content` may name: those of the metadata, and the entry's own
    two, which come first.
    """
    fields = dict(cast(dict[str, Any], entry.get("metadata") or {}))
    fields["question"] = entry["question"]
    fields["answer"] = entry["answer"]
    return fields


def _content(entry: Mapping[str, Any], field: str, dataset: str) -> str:
    fields = _fields(entry)
    if field not in fields:
        raise ConfigError(
            f"environment source {dataset!r}: content = {field!r} is not a field of its "
            f"entries.{nearest(field, fields)}"
        )
    value = fields[field]
    return value if isinstance(value, str) else json.dumps(_json(value), sort_keys=True)


def _task(
    entry: Mapping[str, Any], *, task_id: str, source: str, dataset: str, prompt: str
) -> Task:
    answer = entry["answer"]
    data: dict[str, Json] = {
        "question": _format(prompt, _fields(entry), dataset),
        "answer": None if answer is None else str(answer),
        "dataset": dataset,
        "metadata": _json(entry.get("metadata") or {}),
    }
    return Task(id=task_id, source=source, data=data)


def _format(prompt: str, fields: Mapping[str, Any], dataset: str) -> str:
    prompt = f"{{{prompt}}}" if prompt in fields else prompt
    try:
        for _, name, _, _ in string.Formatter().parse(prompt):
            if name is not None and name not in fields:
                raise ConfigError(
                    f"environment source {dataset!r}: prompt {prompt!r} names the unknown field "
                    f"{name!r}; known: {', '.join(sorted(fields))}."
                )
        return prompt.format(**fields)
    except ValueError as error:
        raise ConfigError(
            f"environment source {dataset!r}: prompt {prompt!r} is not a format: {error}; write a "
            "literal brace twice."
        ) from error


def _check_enough(
    training: int, held: int, *, size: int, heldout: int, dataset: str, content: str
) -> None:
    if training < size or held < heldout:
        remedy = "lower heldout and size"
        if training and held == heldout:
            remedy = f"lower size to {training}"
        raise ConfigError(
            f"environment source {dataset!r}: size = {size} and heldout = {heldout}, but only "
            f"{training + held} distinct values of {content!r} were found; {remedy}, or widen the "
            "dataset's options."
        )


def _json(value: Any) -> Json:
    """Returns metadata as plain JSON. Tuples become lists, and values that JSON does not have
    become text.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast(Sequence[Any], value)]
    return str(value)
