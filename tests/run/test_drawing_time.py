"""How long the tasks of datasets take to be drawn."""

from __future__ import annotations

import pytest

from midflight.config.sources import SourceSection
from midflight.run.launcher.drawing_time import DrawingTime, TakesLonger


class Work:
    """A clock of processor time, which a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def section(size: int) -> SourceSection:
    return SourceSection(dataset="spell_backward", size=size, heldout=0)


def test_what_is_imported_before_the_first_entry_is_not_counted_for_each() -> None:
    work = Work()
    drawing = DrawingTime([section(1000)], seconds=20, clock=work)
    work.now = 2400.0  # forty minutes of imports, on a busy machine or a slow disk
    for _ in range(1000):
        drawing.drawn()
        work.now += 0.01
    assert drawing.whole_seconds == pytest.approx(10.0, rel=0.01)


def test_a_drawing_that_takes_longer_ends_with_an_estimate_of_the_whole() -> None:
    work = Work()
    drawing = DrawingTime([section(10_000), section(20_000)], seconds=20, clock=work)

    def draw() -> None:
        while True:
            drawing.drawn()
            work.now += 0.01

    with pytest.raises(TakesLonger):
        draw()
    assert drawing.whole_seconds == pytest.approx(300.0, rel=0.01)


def test_how_far_it_is_is_said_about_once_a_second() -> None:
    work, said = Work(), list[str]()
    drawing = DrawingTime([section(1000)], seconds=20, say=said.append, clock=work)
    for _ in range(1000):
        drawing.drawn()
        work.now += 0.004
    assert said == ["draws tasks, 251 of about 1,000", "draws tasks, 501 of about 1,000", "draws tasks, 751 of about 1,000"]
