"""Completions that are shown to people."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from midflight.observe.completions import MAX_LETTERS, Completions, in_words
from midflight.types.facts import CompletionsShown, Leased, Stepped


def trajectory(task: str, reward: float, prompt: str, said: str) -> Any:
    ids = np.array([ord(letter) for letter in prompt + said], np.int32)
    row = SimpleNamespace(role="", token_ids=ids, generated=np.arange(len(ids)) >= len(prompt))
    return SimpleNamespace(source="numbers", task_id=task, reward=reward, rows=(row,))


def leased(version: int, *groups: list[Any]) -> Any:
    return Leased(SimpleNamespace(train_version=version, groups=[SimpleNamespace(trajectories=g) for g in groups]), {}, {}, {})  # type: ignore[arg-type]


def stepped(version: int) -> Stepped:
    return Stepped(version, version, 0.0, 1.0, 1, {})


def shown(*, every: int, number: int = 2) -> tuple[Completions, list[CompletionsShown]]:
    told: list[CompletionsShown] = []
    return Completions(told.append, lambda ids: "".join(map(chr, ids)), every=every, number=number), told


def test_every_second_step_shows_the_first_rollouts_of_its_groups_in_turn() -> None:
    watched, told = shown(every=2, number=3)
    for version in range(4):  # the next batch is drawn during a step
        watched.apply(
            leased(version, [trajectory("a", 0.0, "ask ", "no"), trajectory("a", 1.0, "ask ", "yes")], [trajectory("b", 0.5, "x", "y")])
        )
        if version:
            watched.apply(stepped(version))
    assert [completions.version for completions in told] == [2]
    assert [(rollout.task_id, rollout.completion) for rollout in told[0].rollouts] == [("a", "no"), ("b", "y"), ("a", "yes")]
    assert in_words(told[0]).splitlines()[:4] == [
        "version 2 was trained on:",
        "  numbers, task a, reward 0.000",
        "    > ask ",
        "    < no",
    ]


def test_without_an_interval_nothing_is_shown_or_kept() -> None:
    watched, told = shown(every=0)
    watched.apply(leased(0, [trajectory("a", 0.0, "ask", "no")]))
    watched.apply(stepped(1))
    assert told == [] and not watched._batches


def test_long_texts_are_cut_in_the_middle() -> None:
    watched, told = shown(every=1)
    watched.apply(leased(0, [trajectory("a", 0.0, "p", "b" + "x" * 5000 + "e")]))
    watched.apply(stepped(1))
    text = told[0].rollouts[0].completion
    assert len(text) < MAX_LETTERS + 10 and text.startswith("bx") and text.endswith("xe") and " [...] " in text
