"""Busy times, against a brute force over a grid of eighths of a second."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.observe import rolling
from midflight.observe.rolling import Overlap, Spans, common_length

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0] / 8, (p[0] + p[1]) / 8)), max_size=25)


def cells(pairs: list[tuple[float, float]]) -> set[int]:
    return {cell for start, end in pairs for cell in range(round(start * 8), round(end * 8))}


@given(spans, spans)
@settings(max_examples=200, deadline=None)
def test_unions_and_intersection_are_exact_in_any_order_of_arrival(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    a, b = Spans(), Spans()
    for start, end in left:
        a.add(start, end)
    for start, end in right:
        b.add(start, end)
    assert all(e < s for e, s in zip(a.ends, a.starts[1:], strict=False)), "disjoint and in order"
    assert a.length() == len(cells(left)) / 8
    assert common_length(a, b) == len(cells(left) & cells(right)) / 8


@given(spans, st.integers(0, 80))
@settings(max_examples=100, deadline=None)
def test_a_cut_divides_without_loss(pairs: list[tuple[float, float]], at: int) -> None:
    whole = Spans()
    for start, end in pairs:
        whole.add(start, end)
    before = whole.cut(at / 8)
    assert before.length() + whole.length() == len(cells(pairs)) / 8
    assert all(end <= at / 8 for end in before.ends) and all(start >= at / 8 for start in whole.starts)


def test_only_what_lies_in_the_phase_counts() -> None:
    overlap = Overlap()
    overlap.add(0, 0.0, 50.0)
    overlap.begin(10.0)
    overlap.add(0, 5.0, 14.0)
    overlap.add(1, 12.0, 16.0)
    overlap.finish(15.0)
    overlap.add(1, 14.0, 20.0)
    assert overlap.busy() == (4.0, 3.0, 2.0)
    assert overlap.seconds(99.0) == 5.0


def test_a_long_run_is_settled_and_stays_exact_for_reports_that_come_late() -> None:
    overlap, exact = Overlap(), (Spans(), Spans())
    overlap.begin(0.0)
    generator = random.Random(1)
    reports = []
    for number in range(40_000):
        start = number * 0.02
        reports.append((start + generator.random() * 60, 0, start, start + 0.015))
        if number % 25 == 0:
            reports.append((start + generator.random() * 60, 1, start, start + 0.3))
    for _, side, start, end in sorted(reports):
        overlap.add(side, start, end)
        exact[side].add(start, end)
    kept = max(len(side.starts) for side in overlap._sides)
    assert kept < 10_000 < len(exact[0].starts)
    expected = (exact[0].length(), exact[1].length(), common_length(*exact))
    assert all(abs(a - b) < 1e-6 for a, b in zip(overlap.busy(), expected, strict=True))


def test_a_side_that_reports_alone_for_ever_keeps_bounded_memory(monkeypatch) -> None:
    monkeypatch.setattr(rolling, "MAX_SPANS", 100)
    overlap = Overlap()
    overlap.begin(0.0)
    for number in range(1000):
        overlap.add(0, number, number + 0.5)
    assert len(overlap._sides[0].starts) <= 101
    assert overlap.busy() == (500.0, 0.0, 0.0)
