"""Tasks from the `reasoning-gym` package, split into training and held-out by content.

Seeds do not split: reasoning-gym makes entry i of a dataset from seed + i, so the entries of seeds 0 and 1 are the same but
for one, and distinct seeds draw the same words anyway. Here a hash of the content and the seed decides on which side of the
split an entry falls; size and options do not matter, so a content once held out stays so when the numbers change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from midflight.errors import ConfigError, nearest
from midflight.types import Json, Task

HELDOUT_SHARE = 1 / 8
"""Share of all contents on the held-out side: about what the defaults (256 beside 2000) ask for."""
MAX_DRAWS_PER_TASK = 32
"""Entries drawn per task asked for before a dataset counts as exhausted: bounds the search in one that repeats itself."""


@dataclass(frozen=True, slots=True)
class DrawnTasks:
    training: tuple[Task, ...]
    heldout: tuple[Task, ...]


def draw_tasks(
    dataset: str,
    *,
    size: int,
    heldout: int,
    prompt: str = "{question}",
    content: str = "question",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    source: str | None = None,
) -> DrawnTasks:
    """`size` training and `heldout` held-out tasks of distinct content; the two share no value of the field `content`.

    `Task.data` has `question` (by the format `prompt`), `answer` (text, or None if the dataset has no single one), `dataset` and
    `metadata`. Equal arguments give equal tasks. `ConfigError` if the dataset, an option or a field is unknown, or if there are
    fewer distinct contents than asked for.
    """
    sides: dict[bool, list[Task]] = {False: [], True: []}
    wanted = {False: size, True: heldout}
    seen: set[str] = set()
    max_draws = MAX_DRAWS_PER_TASK * (size + round(heldout / HELDOUT_SHARE))
    for number, entry in enumerate(_entries(dataset, options or {}, seed=seed, max_draws=max_draws)):
        identity = _content(entry, content, dataset)
        side = is_held_out(identity, seed=seed)
        if identity not in seen and len(sides[side]) < wanted[side]:
            seen.add(identity)
            sides[side].append(_task(entry, task_id=str(number), source=source or dataset, dataset=dataset, prompt=prompt))
        if all(len(sides[s]) == wanted[s] for s in wanted):
            break
    for side, option in ((True, "heldout"), (False, "size")):
        _check_enough(len(sides[side]), wanted[side], option=option, dataset=dataset, content=content)
    return DrawnTasks(training=tuple(sides[False]), heldout=tuple(sides[True]))


def is_held_out(content: str, *, seed: int) -> bool:
    """The side of a content: a hash of it and the seed. Letter case does not separate, so that `Word` is not held out from `word`."""
    digest = hashlib.blake2b(f"{seed}|{content.casefold()}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < HELDOUT_SHARE * 2**64


def _entries(dataset: str, options: Mapping[str, Any], *, seed: int, max_draws: int) -> Iterator[dict[str, Any]]:
    """Entries of the dataset. Its own seed is a hash of ours, so that neighbouring seeds do not draw the same entries."""
    factory = _factory()
    if dataset not in factory.DATASETS:
        raise ConfigError(f"environment source {dataset!r} is not a dataset of reasoning-gym.{nearest(dataset, factory.DATASETS)}")
    _check_options(dataset, options, known=[f.name for f in dataclasses.fields(factory.DATASETS[dataset][1])])
    start = int.from_bytes(hashlib.blake2b(f"{seed}|{dataset}".encode(), digest_size=8).digest(), "little") % 2**30
    try:
        made = factory.create_dataset(dataset, **options, seed=start, size=max_draws)
        for i in range(max_draws):
            yield made[i]
    except Exception as error:
        given = json.dumps(dict(options), default=str)
        raise ConfigError(
            f"dataset {dataset!r} refuses options {given}: {type(error).__name__}: {error}; change environment.sources.options."
        ) from error


def _factory() -> Any:
    try:
        import reasoning_gym.factory as factory
    except ImportError as error:
        raise ConfigError(
            "environment.sources need the package reasoning-gym; install it with: pip install 'midflight[reasoning-gym]'."
        ) from error
    return factory


def _check_options(dataset: str, options: Mapping[str, Any], *, known: Sequence[str]) -> None:
    for name in options:
        if name in ("seed", "size"):
            raise ConfigError(
                f"option {name!r} of dataset {dataset!r} is set by the source itself; remove it from environment.sources.options."
            )
        if name not in known:
            raise ConfigError(f"dataset {dataset!r} has no option {name!r}.{nearest(name, set(known) - {'seed', 'size'})}")


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt or `content` may name: the metadata, and the entry's own two fields before them."""
    return {**cast(dict[str, Any], entry.get("metadata") or {}), "question": entry["question"], "answer": entry["answer"]}


def _content(entry: Mapping[str, Any], field: str, dataset: str) -> str:
    fields = _fields(entry)
    if field not in fields:
        raise ConfigError(f"environment source {dataset!r}: content = {field!r} is not a field of its entries.{nearest(field, fields)}")
    value = fields[field]
    return value if isinstance(value, str) else json.dumps(_json(value), sort_keys=True)


def _task(entry: Mapping[str, Any], *, task_id: str, source: str, dataset: str, prompt: str) -> Task:
    answer = entry["answer"]
    data: dict[str, Json] = {
        "question": _format(prompt, _fields(entry), dataset),
        "answer": None if answer is None else str(answer),
        "dataset": dataset,
        "metadata": _json(entry.get("metadata") or {}),
    }
    return Task(id=task_id, source=source, data=data)


def _format(prompt: str, fields: Mapping[str, Any], dataset: str) -> str:
    try:
        for _, name, _, _ in string.Formatter().parse(prompt):
            if name is not None and name not in fields:
                raise ConfigError(
                    f"environment source {dataset!r}: prompt {prompt!r} names the unknown field {name!r}; known: {', '.join(sorted(fields))}."
                )
        return prompt.format(**fields)
    except ValueError as error:
        raise ConfigError(
            f"environment source {dataset!r}: prompt {prompt!r} is not a format: {error}; write a literal brace twice."
        ) from error


def _check_enough(found: int, wanted: int, *, option: str, dataset: str, content: str) -> None:
    if found < wanted:
        raise ConfigError(
            f"environment source {dataset!r}: {option} = {wanted}, but only {found} distinct values of {content!r} were found for it; "
            f"lower {option} to {found}, or widen the dataset's options."
        )


def _json(value: Any) -> Json:
    """Metadata as plain JSON: tuples become lists, what JSON lacks becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast(Sequence[Any], value)]
    return str(value)
